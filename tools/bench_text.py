"""Time training on text: tokenizing, loading tokenized shards,
and the longest wait at a shard change.

python tools/bench_text.py [--rounds 5] [--copies 20] [--shard-mb 4] [--json FILE]

The text is this Python installation's documentation, repeated. Tokenizing is timed in CPU seconds
of one thread. Loading is timed in wall seconds and in CPU seconds of the process, including the
background threads that build batches. "first" rounds start without tokenized shards and create them
while loading. "waits" are measured with batches requested at 5,000 sequences per second.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.mds import MdsReader, MdsWriter
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.token_shards import TEXT
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.loading.masked_text import SPLIT, TRUNCATE, TextEvalSet, TextSet, TextSource
from mlbert.data.loading.text_run import masking_rate
from mlbert.data.prepare import python_text
from mlbert.host import native
from mlbert.host.errors import UserError

LENGTH = 128
SEQUENCES = 256  # per step
STEPS = 200
PACE = 5_000  # sequences per second
TOKENISED_BYTES = 3_000_000
EVAL_BATCH = 128


def write_set(folder: Path, copies: int, shard_bytes: int) -> Path:
    """Write an MDS set of this Python installation's documentation, repeated."""
    documents = [" ".join(sentences) for sentences in python_text.documents()]
    with MdsWriter(folder, {TEXT: "str"}, size_limit=shard_bytes) as writer:
        for text in documents * copies:
            writer.write({TEXT: text})
    return folder


def tokenizing(texts: list[str], tokenizer: Tokenizer, rounds: int) -> dict[str, Any]:
    """Return MB of UTF-8 per CPU second of the compiled and the Python tokenizer,
    each with an empty word cache.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    speeds: dict[str, list[float]] = {"compiled": [], "plain": []}
    for _ in range(rounds):
        fresh = tokenizer.clone()
        fresh.encode_all(["a"])  # load the library and the vocabulary
        began = time.process_time()
        fresh.encode_all(texts)
        speeds["compiled"].append(num_bytes / (time.process_time() - began) / 1e6)
        fresh = tokenizer.clone()
        began = time.process_time()
        for text in texts:
            fresh.encode(text)
        speeds["plain"].append(num_bytes / (time.process_time() - began) / 1e6)
    return {f"{name} MB/s": summary(values) for name, values in speeds.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "least": ordered[0], "most": ordered[-1]}


def loading(texts: TextSet, rounds: int, first: bool) -> dict[str, Any]:
    """Return sequences per second at full speed, and milliseconds of waiting for a batch at
    `PACE`.
    """
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for seconds in (0.0, SEQUENCES / PACE):
            if first:
                forget(texts.streams[0].folder)
            for name, value in one_pass(texts, seconds).items():
                found.setdefault(name, []).append(value)
    return {name: summary(values) for name, values in found.items()}


def one_pass(texts: TextSet, seconds: float) -> dict[str, float]:
    """Load the batches of `STEPS` steps, each at least ``seconds`` after the previous one."""
    rate = masking_rate("constant", 0.3, 0.3, STEPS)
    order: dict[str, Any] = {"shuffle": "py1s", "shuffle_seed": 1, "canonical_nodes": 2}
    source = TextSource(texts, sequences_per_step=SEQUENCES, rate=rate, seed=1, **order)
    source.open()
    source.next_step()
    waits = []
    began = time.perf_counter()
    cpu = time.process_time()
    for step in range(STEPS):
        time.sleep(max(0.0, began + step * seconds - time.perf_counter()))
        asked = time.perf_counter()
        source.next_step()
        waits.append(1e3 * (time.perf_counter() - asked))
    wall = time.perf_counter() - began
    used = time.process_time() - cpu
    source.close()
    if seconds:
        return {
            "longest wait ms": max(waits),
            "99th percentile of waits ms": float(np.quantile(waits, 0.99)),
        }
    return {"sequences/s": STEPS * SEQUENCES / wall, "sequences/CPU s": STEPS * SEQUENCES / used}


def forget(folder: Path) -> None:
    """Remove the tokenized shards."""
    for path in MdsReader(folder).cache.glob("tokens-*"):
        shutil.rmtree(path)


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure and return a JSON-able record."""
    tokenizer = load_tokenizer("bert-base-uncased")
    reader = MdsReader(folder)
    sizes = np.cumsum([len(reader[index][TEXT].encode()) for index in range(len(reader))])
    texts = [reader[index][TEXT] for index in range(int(np.searchsorted(sizes, TOKENISED_BYTES)))]
    record: dict[str, Any] = {"texts": len(reader), "shards": len(reader.shards), "rounds": rounds}
    record["MB"] = float(sizes[-1]) / 1e6
    record["tokenizing"] = tokenizing(texts, tokenizer, rounds)
    lengths = np.diff(tokenizer.encode_all(texts)[1])
    record["share of tokens that truncation drops"] = float(
        np.maximum(lengths - LENGTH + 2, 0).sum() / lengths.sum()
    )
    for mode in (TRUNCATE, SPLIT):
        several = TextSet(streams_of("", None, folder), tokenizer, LENGTH, mode)
        record[f"{mode}, first"] = loading(several, rounds, first=True)
        record[f"{mode}, tokenized"] = loading(several, rounds, first=False)
        samples = TextEvalSet(several, None, EVAL_BATCH, rate=0.15, seed=1)
        began = time.perf_counter()
        samples.open()
        record[f"{mode}, evaluation set"] = {
            "sequences": samples.num_examples,
            "seconds to open": time.perf_counter() - began,
            "tokens a sequence": sum(batch.num_tokens for batch in samples) / samples.num_examples,
        }
    record["python"] = platform.python_version()
    record["numpy"] = np.__version__
    record["compiled"] = "unavailable" not in native.status()
    return record


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=20, help="copies of the text")
    parser.add_argument("--shard-mb", type=float, default=4.0, help="size of a shard")
    parser.add_argument("--json", type=Path, help="file for the record")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = write_set(Path(scratch) / "set", given.copies, int(given.shard_mb * 1e6))
            record = run(folder, given.rounds)
        except UserError as error:
            print(f"bench_text: {error}", file=sys.stderr)
            return 2
    text = json.dumps(record, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
