"""Time one ModernBERT training step, ours against transformers, on the same texts in one run.

    python tools/bench_modernbert.py --texts FOLDER --vocab vocab.txt [--length 1024]
                                     [--tokens 8192] [--layers 6] [--json FILE]

The shape is ModernBERT-base's with few layers. Three sides train on the same sequences with the
same weights, in turn. Ours: packed tokens, as in training. "plain":
`transformers.ModernBertForMaskedLM` padded to the longest sequence, SDPA, logits at every
position, `torch.optim.AdamW`. "expert": the same class with the sequences sorted by length and run
in the fastest number of groups, each padded to its own longest one, with the fastest attention,
logits at masked tokens only and fused AdamW.

Documents are cut into pieces of at most ``--length`` tokens, as long documents are in pre-training.
``--full`` takes only pieces of that length, so that no side pads.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.distributed.sharding import ShardLayout
from mlbert.host.provenance import shipped
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.huggingface import padded_inputs, to_huggingface
from mlbert.models.weights.modernbert import modernbert_config, modernbert_state
from mlbert.ops import api as ops
from mlbert.ops.precision import compute_dtype
from mlbert.optim.adamw import DecoupledStableAdamW
from mlbert.optim.flat import FlatParameters
from mlbert.programs.bench.expert import make_groups
from mlbert.programs.bench.sides import LEARNING_RATE, Side, alternate, trained_side
from mlbert.programs.bench.step_time import common_record, pair_ratios

# Settings of all sides, besides LEARNING_RATE: ModernBERT's.
ADAMW: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 1e-5}
MASKED_SHARE = 0.3
GROUPS = (1, 2, 4, 8)  # numbers of groups that are tried
TRIALS = 1  # measured steps of each choice
LONGEST_EAGER = 2048  # tokens; at 8,192 one layer keeps several matrices of 3 GB
FEWEST_TOKENS = 8  # of a piece
GELU = "gelu"
MIN_PAIRS = 3
# Largest difference of the sides' losses of the first step.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# In which the benchmark differs from configs/modernbert_base.json, besides the number of layers.
SHAPE_OPTIONS = "attention_output_dropout_prob=0 vocab_size_multiple=64"


def base_shape(layers: int) -> BertConfig:
    """Return ModernBERT-base's shape with this number of layers."""
    base = BertConfig.from_json(shipped("configs") / "modernbert_base.json")
    return base.with_options(f"num_hidden_layers={layers} {SHAPE_OPTIONS}")


@dataclass(frozen=True)
class Choice:
    """One form of the expert's step: groups of similar length, and transformers' attention."""

    groups: int
    attention: str = "sdpa"


def pieces_of(
    folder: Path, tokenizer: Tokenizer, length: int, num_tokens: int, full: bool, seed: int
) -> list[list[int]]:
    """Return pieces of the shuffled documents, about ``num_tokens`` tokens in total.

    Args:
        folder: text files with a blank line between documents.
        tokenizer: a WordPiece vocabulary.
        length: most tokens of a piece, with [CLS] and [SEP].
        num_tokens: pieces are taken while they have fewer.
        full: take only pieces of ``length``.
        seed: of the order.
    """
    documents = [
        document
        for path in sorted(folder.iterdir())
        for document in path.read_text(encoding="utf-8").split("\n\n")
        if document.strip()
    ]
    pieces = []
    for document in documents:
        ids = tokenizer.encode(document)
        for first in range(0, len(ids), length - 2):
            words = ids[first : first + length - 2]
            piece = [tokenizer.cls_id, *words, tokenizer.sep_id]
            if len(piece) == length or (not full and len(piece) >= FEWEST_TOKENS):
                pieces.append(piece)
    order = np.random.default_rng(seed).permutation(len(pieces))
    taken = list[list[int]]()
    total = 0
    for number in order:
        if total >= num_tokens:
            break
        taken.append(pieces[number])
        total += len(pieces[number])
    return taken


def masked_batch(pieces: Sequence[list[int]], tokenizer: Tokenizer, seed: int) -> HostBatch:
    """Return the pieces with `MASKED_SHARE` of their tokens replaced by [MASK]."""
    generator = np.random.default_rng(seed)
    rows = []
    for piece in pieces:
        count = max(1, round(MASKED_SHARE * len(piece)))
        inner = np.arange(1, len(piece) - 1)
        places = np.sort(generator.choice(inner, min(count, len(inner)), replace=False)).tolist()
        labels = [piece[place] for place in places]
        tokens = list(piece)
        for place in places:
            tokens[place] = tokenizer.mask_id
        rows.append((tokens, len(tokens), False, places, labels))
    longest = max(len(piece) for piece in pieces)
    return HostBatch.of_sequences(Ragged.from_rows(rows), np.arange(len(rows)), longest)


def peer_model(start: BertForMaskedLM, attention: str) -> Any:
    """Return transformers' model with the weights of ``start``."""
    import transformers

    values: dict[str, Any] = modernbert_config(start.config, start.architecture, GELU)
    del values["architectures"], values["model_type"]
    values["attn_implementation"] = attention
    config = transformers.ModernBertConfig(**values)
    model = transformers.ModernBertForMaskedLM(config)
    state = modernbert_state(to_huggingface(start), start.config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"decoder.weight"}, missing
    assert not unexpected, unexpected
    return model.train()


def our_optimizer(
    model: BertForMaskedLM, copy_dtype: torch.dtype | None = None
) -> DecoupledStableAdamW:
    """Return ModernBERT's optimizer; moves the model's weights into a flat buffer.

    ``copy_dtype`` as for `mlbert.optim.optimizer.FlatOptimizer`.
    """
    flat = FlatParameters(model.ordered_parameters())
    return DecoupledStableAdamW(
        flat,
        ShardLayout.whole(flat.numel),
        base_lr=LEARNING_RATE,
        max_grad_norm=None,
        copy_dtype=copy_dtype,
        **ADAMW,
    )


def our_side(batch: HostBatch, model: BertForMaskedLM, seed: int) -> Side:
    """Return our step; moves the model's weights into a flat buffer."""
    return trained_side(batch, model, seed, our_optimizer(model), MaskedLM("step"))


def plain_side(batch: HostBatch, start: BertForMaskedLM) -> Side:
    """Return transformers' model as most people use it."""
    model = peer_model(start, "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **ADAMW)
    inputs = padded_inputs(batch.to("cpu"))
    del inputs["token_type_ids"], inputs["next_sentence_label"]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=start.dtype == torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Side("plain", step)


def expert_side(batch: HostBatch, start: BertForMaskedLM, choice: Choice) -> Side:
    """Return the expert's step in one form."""
    model = peer_model(start, choice.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, **ADAMW)
    groups = make_groups(batch, choice.groups, torch.device("cpu"))
    for group in groups:
        del group.encoder["token_type_ids"]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for group in groups:
            with torch.autocast("cpu", torch.bfloat16, enabled=start.dtype == torch.bfloat16):
                hidden = model.model(**group.encoder).last_hidden_state
                logits = model.decoder(model.head(hidden.flatten(0, 1)[group.places]))
                loss = F.cross_entropy(logits.float(), group.labels, reduction="sum")
                loss = loss / batch.num_masked
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return Side("expert", step)


def fastest_expert(batch: HostBatch, start: BertForMaskedLM) -> tuple[Side, dict[str, object]]:
    """Return the fastest form of the expert's step, and a JSON-able record of all trials."""
    trials = dict[Choice, float]()

    def seconds(choice: Choice) -> float:
        if choice not in trials:
            side = expert_side(batch, start, choice)
            trials[choice] = statistics.median(alternate([side], TRIALS)[side.name])
        return trials[choice]

    numbers = sorted({min(number, batch.num_samples) for number in GROUPS})
    best = min((Choice(number) for number in numbers), key=seconds)
    if batch.max_seqlen <= LONGEST_EAGER:
        best = min((replace(best, attention=kind) for kind in ("sdpa", "eager")), key=seconds)
    measured = [{**asdict(tried), "seconds": median} for tried, median in trials.items()]
    return expert_side(batch, start, best), {"choice": asdict(best), "trials": measured}


def run(
    shape: BertConfig,
    batch: HostBatch,
    pairs: int,
    dtype: torch.dtype,
    seed: int,
    with_plain: bool = True,
) -> dict[str, Any]:
    """Run the benchmark and return a JSON-able record; times in seconds.

    Args:
        shape: of a ModernBERT.
        batch: the sequences of all sides.
        pairs: measured steps per side, in turn.
        dtype: of the matrix products on all sides.
        seed: of weights and dropout.
        with_plain: measure the plain side too.
    """
    implementations = ops.select("auto", "cpu")
    model = BertForMaskedLM(shape, dtype)
    model.initialize(seed)
    expert, choices = fastest_expert(batch, model)
    # Ours last: it moves the weights that the others copy.
    sides = [expert]
    if with_plain:
        sides.append(plain_side(batch, model))
    sides.append(our_side(batch, model, seed))
    first_losses = {side.name: side.step() for side in sides}
    spread = max(first_losses.values()) - min(first_losses.values())
    assert spread < LOSS_TOLERANCE[dtype], f"the sides compute different losses: {first_losses}"
    seconds = alternate(sides, pairs)
    lengths = np.diff(batch.cu_seqlens.numpy())
    return {
        **common_record(shape, batch, dtype, torch.device("cpu"), implementations),
        "lengths": lengths.tolist(),
        "padded_tokens": len(lengths) * int(lengths.max()),
        "first_losses": first_losses,
        "expert": choices,
        "ratios": {
            side.name: pair_ratios(seconds["mlbert"], seconds[side.name]) for side in sides[:-1]
        },
        "sides": {
            name: {"seconds": times, "median_seconds": statistics.median(times)}
            for name, times in seconds.items()
        },
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description="Time a ModernBERT step, ours against transformers."
    )
    parser.add_argument("--texts", type=Path, required=True, help="folder of text files")
    parser.add_argument("--vocab", type=Path, required=True, help="a vocab.txt")
    parser.add_argument("--length", type=int, default=1024, help="most tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a batch, about")
    parser.add_argument("--full", action="store_true", help="only sequences of the full length")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain side out")
    parser.add_argument("--layers", type=int, default=6, help="every third is global")
    parser.add_argument("--pairs", type=int, default=5, help="timed steps per side")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, texts and masks")
    parser.add_argument("--json", type=Path, help="file for the record")
    given = parser.parse_args()
    if given.pairs < MIN_PAIRS:
        parser.error(f"--pairs {given.pairs} is less than {MIN_PAIRS}.")
    if given.threads:
        torch.set_num_threads(given.threads)
    tokenizer = load_tokenizer(given.vocab)
    pieces = pieces_of(given.texts, tokenizer, given.length, given.tokens, given.full, given.seed)
    batch = masked_batch(pieces, tokenizer, given.seed)
    dtype = compute_dtype(given.precision, torch.device("cpu"))
    shape = base_shape(given.layers)
    record = run(shape, batch, given.pairs, dtype, given.seed, with_plain=not given.no_plain)
    record["length"] = given.length
    record["full"] = given.full
    print(json.dumps({name: record[name] for name in ("lengths", "first_losses", "expert")}))
    for name, ratio in record["ratios"].items():
        print(f"length {given.length}: {name} takes {ratio['ratio']:.2f} times as long as ours")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
