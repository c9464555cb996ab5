"""Bytes read from the disk for random packs of a packed set, cold: measure.py FOLDER

Each case opens the set in a fresh process after its pages were dropped, and gathers the same 512 packs in steps of 8.
Each line is a JSON object; bytes are of a shard or a pack.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from mlbert.data.formats.prepared import ShardSet, ShardWriter
from mlbert.data.formats.ragged import Ragged, offsets_of

SHARDS, PACKS, SEQUENCES, TOKENS, MASKED = 4, 98_304, 3, 160, 24


def write(folder: Path) -> None:
    writer = ShardWriter(folder, SHARDS, "")
    count = PACKS * SEQUENCES
    numbers = np.random.default_rng(0)
    for index in range(SHARDS):
        positions = np.sort(np.argsort(numbers.random((count, TOKENS - 2)), axis=1)[:, :MASKED] + 1, axis=1)
        rows = Ragged(
            tokens=numbers.integers(5, 30_000, count * TOKENS).astype(np.uint16),
            offsets=offsets_of(np.full(count, TOKENS)),
            masked_positions=positions.ravel().astype(np.uint16),
            masked_labels=numbers.integers(5, 30_000, count * MASKED).astype(np.uint16),
            masked_offsets=offsets_of(np.full(count, MASKED)),
            first_lengths=np.full(count, 70, np.uint16),
            next_sentence=np.zeros(count, np.uint8),
        )
        writer.write_shard(index, rows, np.arange(0, count + 1, SEQUENCES))
    limits = {"max_tokens": SEQUENCES * TOKENS, "max_sequences": SEQUENCES}
    vocabulary = {"sha256": "a" * 64, "size": 30_522}
    writer.finish(vocabulary=vocabulary, max_seq_length=TOKENS, max_predictions=MASKED, provenance={}, packs=limits)


def drop(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def report(case: str, what: str, **numbers: int) -> None:
    print(json.dumps({"case": case, "what": what, **numbers}), flush=True)


def measure(folder: Path, case: str) -> None:
    store = ShardSet.open(folder, verify=False)
    if case == "random":
        store.expect_random_reads()
    before = read_bytes()
    for shard in range(SHARDS):
        store.shard(shard)
    print(
        json.dumps({"case": case, "what": "first touch of a shard", "read": (read_bytes() - before) // SHARDS}),
        flush=True,
    )
    packs = np.random.default_rng(1).permutation(SHARDS * PACKS)[:512].reshape(2, 32, 8)
    for name, part in zip(("first 256 packs", "next 256 packs"), packs, strict=True):
        before, used = read_bytes(), 0
        for step in part:
            rows, _ = store.gather_packs(step)
            used += sum(
                getattr(rows, field).nbytes for field in Ragged.__dataclass_fields__ if getattr(rows, field) is not None
            )
        read = (read_bytes() - before) / part.size
        print(
            json.dumps({"case": case, "what": name, "used": round(used / part.size), "read": round(read)}), flush=True
        )


def run(*words: str) -> None:
    subprocess.run([sys.executable, __file__, sys.argv[1], *words], check=True)


if sys.argv[2:] == ["write"]:
    write(Path(sys.argv[1]))
elif len(sys.argv) > 2:
    measure(Path(sys.argv[1]), sys.argv[2])
else:
    run("write")  # in another process, because mapped pages cannot be dropped
    for case in ("read-ahead", "random") * 3:
        drop(Path(sys.argv[1]))
        run(case)
