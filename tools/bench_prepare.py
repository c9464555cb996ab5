"""Time data preparation and loading: text to instances, TFRecords to HDF5, loading, packing.

python tools/bench_prepare.py [--input PART --vocab vocab.txt] [--rounds 3] [--lengths 10000000]
[--json FILE]

The compiled generator and its Python reference alternate on the same text part, in this process, on
one core. Each round starts with an empty word cache. One-time setup (library, vocabulary) is timed
separately. Times are CPU seconds of this process unless named otherwise, so they depend little on
other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.prepared import ShardWriter
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.shard_file import content_sha256
from mlbert.data.formats.tfrecord import write_examples
from mlbert.data.formats.wordpiece import WordPieceTokenizer, load_vocabulary
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.synthetic import lengths_at
from mlbert.data.prepare import python_text
from mlbert.data.prepare.corpus import write_text
from mlbert.data.prepare.generator import Generator, NativeGenerator, PlainGenerator
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.tfrecords import tfrecords_to_hdf5
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from mlbert.host import native
from mlbert.host.errors import UserError

OWN_TEXT_BYTES = 1_000_000
OWN_VOCAB_SIZE = 8192
LOADED_SEQUENCES = 50_000
PACKED_SHARDS = 4
PACKS_PER_STEP = 64
LOADER_STEPS = 100
LIMITS = InstanceOptions()

Kind = type[NativeGenerator] | type[PlainGenerator]


def default_input(
    folder: Path, num_bytes: int = OWN_TEXT_BYTES, vocab_size: int = OWN_VOCAB_SIZE
) -> tuple[Path, Path]:
    """Write a text part of about ``num_bytes`` from this Python installation's documentation,
    and its vocabulary.
    """
    documents: list[list[str]] = []
    total = 0
    for document in python_text.documents():
        documents.append(document)
        total += sum(len(sentence) + 1 for sentence in document)
        if total >= num_bytes:
            break
    part = folder / "part.txt"
    vocab = folder / "vocab.txt"
    write_text(part, documents)
    entries = train_vocabulary(
        count_words(sentence for document in documents for sentence in document), vocab_size
    )
    vocab.write_text("\n".join(entries) + "\n", encoding="utf-8")
    return part, vocab


def run(
    part: Path | None, vocab: Path | None, rounds: int, num_lengths: int, seed: int = 12345
) -> dict[str, Any]:
    """Measure and return a JSON-able record.

    Args:
        part, vocab: text and its vocabulary; None for the default text.
        rounds: rounds per generator.
        num_lengths: number of sequences to pack.
        seed: seed of the instances.
    """
    if (part is None) != (vocab is None):
        remedy = "Give both, or none for the default text"
        raise UserError(
            "config.conflict", "--input and --vocab", "only one of them is given", remedy
        )
    with tempfile.TemporaryDirectory(prefix="mlbert-bench-") as temporary:
        folder = Path(temporary)
        text, vocab_file = default_input(folder) if part is None or vocab is None else (part, vocab)
        rows, generator = measure_generator(
            text, vocab_file, replace(LIMITS, random_seed=seed), rounds
        )
        return {
            "input": {"name": text.name, "bytes": text.stat().st_size, "own_text": part is None},
            "processor": _processor(),
            "python": platform.python_version(),
            "generator": generator,
            "tfrecord_to_hdf5": measure_tfrecords(rows, vocab_file, folder, rounds),
            "loader": measure_loader(rows, vocab_file, folder, rounds),
            "packing": measure_packing(num_lengths),
        }


def _seconds(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the CPU seconds of all threads of this process, and the result of ``work``."""
    started = time.process_time()
    result = work(*arguments)
    return time.process_time() - started, result


def measure_generator(
    part: Path, vocab_file: Path, options: InstanceOptions, rounds: int
) -> tuple[Ragged, dict[str, Any]]:
    """Time both generators in turn; also return the instances.

    Raises:
        UserError: the compiled generator is not available, or the part or vocabulary is invalid.
    """
    vocabulary = load_vocabulary(vocab_file)
    kinds: dict[str, Kind] = {"native": NativeGenerator, "plain": PlainGenerator}
    made: dict[str, Ragged] = {}
    start: dict[str, list[float]] = {name: [] for name in kinds}
    text: dict[str, list[float]] = {name: [] for name in kinds}
    rest: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            seconds, generator = _seconds(_start, kind, vocabulary)
            start[name].append(seconds)
            seconds, documents = _seconds(generator.read, part)
            text[name].append(seconds)
            seconds, made[name] = _seconds(generator.rows, documents, options)
            rest[name].append(seconds)
    rows = made["native"]
    assert content_sha256(rows) == content_sha256(made["plain"]), "the generators differ"
    size = part.stat().st_size
    record: dict[str, Any] = {"rounds": rounds, "instances": len(rows), "tokens": len(rows.tokens)}
    for name in kinds:
        seconds_of_all = [a + b for a, b in zip(text[name], rest[name], strict=True)]
        median = statistics.median(seconds_of_all)
        record[name] = {
            "seconds": seconds_of_all,
            "median_seconds": median,
            "median_tokenizer_seconds": statistics.median(text[name]),
            "median_start_seconds": statistics.median(start[name]),
            "instances_per_second": len(rows) / median,
            "tokens_per_second": len(rows.tokens) / median,
            "text_megabytes_per_second": size / median / 1e6,
        }
    pairs = zip(record["plain"]["seconds"], record["native"]["seconds"], strict=True)
    record["pair_ratios"] = [plain / ours for plain, ours in pairs]
    record["ratio"] = statistics.median(record["pair_ratios"])
    return rows, record


def _start(kind: Kind, vocabulary: dict[str, int]) -> Generator:
    try:
        return kind(WordPieceTokenizer(vocabulary))
    except native.NativeUnavailable as error:
        problem = f"cannot be used here ({error})"
        raise UserError(
            "ops.unavailable", "the compiled generator", problem, "Install gcc"
        ) from None


def measure_tfrecords(rows: Ragged, vocab_file: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Time converting a TFRecord file to a prepared set in one process, in MB/s of the file."""
    file = folder / "part-00000-of-00001.tfrecord"
    write_examples(file, rows, LIMITS.max_seq_length, LIMITS.max_predictions_per_seq)
    seconds = []
    for turn in range(rounds + 1):
        out = folder / f"imported-{turn}"
        seconds.append(_seconds(tfrecords_to_hdf5, [file], vocab_file, out)[0])
    del seconds[0]  # also loads the library
    size = file.stat().st_size
    return {
        "bytes": size,
        "seconds": seconds,
        "megabytes_per_second": size / statistics.median(seconds) / 1e6,
    }


def measure_loader(rows: Ragged, vocab_file: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Time loading a packed set in one process, as training does; the set repeats the instances."""
    copies = -(-LOADED_SEQUENCES // len(rows))
    writer = ShardWriter(folder / "plain", 1, "")
    writer.write_shard(0, Ragged.concatenate([rows] * copies))
    writer.finish(
        vocabulary={"sha256": file_sha256(vocab_file), "size": len(load_vocabulary(vocab_file))},
        max_seq_length=LIMITS.max_seq_length,
        max_predictions=LIMITS.max_predictions_per_seq,
        provenance={"tool": "tools/bench_prepare.py"},
    )
    packing = Packing()
    packed = shuffle_set(
        folder / "plain", folder / "packed", packing=packing, num_shards=PACKED_SHARDS
    )
    source = PackedSource(
        folder / "packed",
        packs_per_step=PACKS_PER_STEP,
        max_sequences_per_pack=packing.max_sequences,
        seed=1,
        partition=contiguous,
    )
    source.open()
    seconds = []
    wall = []
    sequences = []
    for turn in range(rounds):
        steps = range(turn * LOADER_STEPS, (turn + 1) * LOADER_STEPS)
        started = time.perf_counter()
        of_turn, count = _seconds(
            lambda steps: sum(source.batches_of(step)[0].num_samples for step in steps), steps
        )
        wall.append(time.perf_counter() - started)
        seconds.append(of_turn)
        sequences.append(count)
    return {
        "set_sequences": packed.num_sequences,
        "packs_per_step": PACKS_PER_STEP,
        "sequences": sequences,
        "seconds": seconds,
        "wall_seconds": wall,
        "sequences_per_second": statistics.median(
            n / t for n, t in zip(sequences, seconds, strict=True)
        ),
        "sequences_per_wall_second": statistics.median(
            n / t for n, t in zip(sequences, wall, strict=True)
        ),
    }


def measure_packing(num_lengths: int) -> dict[str, Any]:
    """Time packing of lengths from Wikipedia's distribution,
    at most three sequences in 512 tokens.
    """
    shares = np.random.default_rng(0).random(num_lengths)
    lengths = lengths_at(shares, 512).astype(np.uint16)
    started = time.perf_counter()
    seconds, packs = _seconds(pack_lengths, lengths, 512, 3)
    wall = time.perf_counter() - started
    filled = packs.filled(lengths, 512)
    return {
        "lengths": num_lengths,
        "seconds": seconds,
        "wall_seconds": wall,
        "packs": packs.num_packs,
        "filled": filled,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def lines(record: dict[str, Any]) -> list[str]:
    """Return a record as readable lines."""
    generator = record["generator"]
    loader = record["loader"]
    packing = record["packing"]
    found = [
        f"{generator['instances']:,} instances of {record['input']['name']}, one core, CPU seconds:"
    ]
    for name in ("native", "plain"):
        side = generator[name]
        found.append(
            f"  {name}: {side['median_seconds']:.3f} s (tokenizer "
            f"{side['median_tokenizer_seconds']:.3f} s; start"
            f" {side['median_start_seconds']:.3f} s "
            f"more), {side['instances_per_second']:,.0f} instances/s,"
            f" {side['tokens_per_second']:,.0f} tokens/s, "
            f"{side['text_megabytes_per_second']:.2f} MB/s of text"
        )
    return [
        *found,
        f"ratio (median of {generator['rounds']} pairs): {generator['ratio']:.1f}",
        f"TFRecords to HDF5: {record['tfrecord_to_hdf5']['megabytes_per_second']:.0f} MB/s",
        f"batches from packed shards: {loader['sequences_per_second']:,.0f} sequences/s",
        f"packing {packing['lengths']:,} lengths: {packing['seconds']:.1f} s, "
        f"{100 * packing['filled']:.2f} % filled",
    ]


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Time data preparation and loading on one core.")
    parser.add_argument(
        "--input", type=Path, help="text part (default: documentation of this Python installation)"
    )
    parser.add_argument("--vocab", type=Path, help="vocabulary of the text part, vocab.txt")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per generator")
    parser.add_argument(
        "--lengths", type=int, default=10_000_000, help="number of sequences to pack"
    )
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args(words)
    try:
        record = run(options.input, options.vocab, options.rounds, options.lengths)
    except UserError as error:
        print(f"bench_prepare: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("\n".join(lines(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
