"""``text_data.py``: print batches of a text data set as training sees them."""

from __future__ import annotations

import sys
from pathlib import Path

from mlbert.cli.published import Parser
from mlbert.data.batches import HostBatch
from mlbert.data.formats.streams import Stream
from mlbert.data.formats.tokenizer import UNCASED_NAMES, Tokenizer, load_tokenizer
from mlbert.data.loading.masked_text import TRUNCATE, TextSet, TextSource
from mlbert.data.loading.text_run import masking_rate
from mlbert.host.command_line import exit_code
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import SUCCEEDED

PROGRAM = "text_data.py"
BATCHES = 5
BATCH_SIZE = 2
RATE = 0.15
LEAST_LENGTH = 3  # [CLS], a token, [SEP]


def _parser() -> Parser:
    parser = Parser(
        PROGRAM, f"Print {BATCHES} batches of {BATCH_SIZE} sequences of a text data set."
    )
    parser.add_argument(
        "--local_path", type=Path, required=True, help="folder with one folder per split"
    )
    parser.add_argument("--remote_path", help="path or address to copy missing files from")
    parser.add_argument(
        "--tokenizer",
        default=UNCASED_NAMES[0],
        help="a vocab.txt or tokenizer.json, its folder, or a model's name",
    )
    parser.add_argument("--split", default="val")
    parser.add_argument("--max_seq_len", type=int, default=32, help="tokens")
    return parser


def main() -> None:
    """Run with this process's arguments, then exit."""
    sys.exit(exit_code(_run))


def _run() -> int:
    given = _parser().parse_args()
    if given.max_seq_len < LEAST_LENGTH:
        reason = f"{given.max_seq_len} is too short"
        raise UserError("config.range", "--max_seq_len", reason, f"Use {LEAST_LENGTH} or more")
    tokenizer = load_tokenizer(given.tokenizer)
    remote = None if given.remote_path is None else f"{given.remote_path.rstrip('/')}/{given.split}"
    streams = [Stream(local=str(given.local_path / given.split), remote=remote)]
    texts = TextSet(streams, tokenizer, given.max_seq_len, TRUNCATE)
    source = TextSource(
        texts,
        sequences_per_step=BATCH_SIZE,
        shuffle=None,
        shuffle_seed=0,
        canonical_nodes=1,
        rate=masking_rate("constant", RATE, RATE, max_steps=1),
        seed=0,
    )
    print(f"{source.info.num_texts:,} texts, {source.info.identity}")
    source.open()
    for number in range(BATCHES):
        print(f"\n#### batch {number}")
        for batch in source.batches_of(number):
            _show(batch, tokenizer)
    source.close()
    return SUCCEEDED


def _show(batch: HostBatch, tokenizer: Tokenizer) -> None:
    parts = batch.arrays()
    for first, end in zip(
        parts["cu_seqlens"][:-1].tolist(), parts["cu_seqlens"][1:].tolist(), strict=True
    ):
        ids = parts["ids"][first:end].tolist()
        inside = (parts["masked_positions"] >= first) & (parts["masked_positions"] < end)
        positions = (parts["masked_positions"][inside] - first).tolist()
        labels = parts["masked_labels"][inside].tolist()
        print(f"ids     {' '.join(map(str, ids))}")
        print(f"text    {tokenizer.decode(ids)}")
        masked = (
            f"{place}: {tokenizer.entries[label]}"
            for place, label in zip(positions, labels, strict=True)
        )
        print(f"masked  {', '.join(masked) or 'none'}")
