"""What checking shards beside training costs: pairs of runs of the same steps, with checks and without, in turn.

python measure.py FOLDER PAIRS > raw.jsonl     FOLDER gets a prepared set of about 2.4 GB in 24 shards
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from mlbert.feed.packed import PackedSource
from mlbert.store import open as opening
from mlbert.store import prepared
from mlbert.store.checksums import FileChecks, file_sums, file_xxh3
from mlbert.store.deals import contiguous
from mlbert.store.manifest import file_sha256, read_manifest
from mlbert.store.prepared import ShardWriter
from mlbert.store.ragged import Ragged, offsets_of

SHARDS, ROWS, TOKENS, MASKED, STEPS = 24, 85_000, 512, 76, 300


class NoChecks(FileChecks):
    """Takes files and forgets them."""

    def add(self, number: int, file: object) -> None:
        """Nothing."""


def make(folder: Path) -> None:
    """A set of full sequences."""
    rng = np.random.default_rng(0)
    for shard in range(SHARDS):
        positions = np.tile(np.arange(1, MASKED + 1, dtype=np.uint16), ROWS)
        rows = Ragged(
            tokens=rng.integers(5, 30_000, ROWS * TOKENS).astype(np.uint16),
            offsets=offsets_of(np.full(ROWS, TOKENS)),
            masked_positions=positions,
            masked_labels=rng.integers(5, 30_000, len(positions)).astype(np.uint16),
            masked_offsets=offsets_of(np.full(ROWS, MASKED)),
            first_lengths=np.full(ROWS, 200, np.uint16),
            next_sentence=np.zeros(ROWS, np.uint8),
        )
        ShardWriter(folder, SHARDS, "x").write_shard(shard, rows)
    vocabulary = {"sha256": "0" * 64, "size": 30_000}
    ShardWriter(folder, SHARDS, "x").finish(
        vocabulary=vocabulary, max_seq_length=TOKENS, max_predictions=MASKED, provenance={}
    )


def run(folder: Path, checks: FileChecks) -> dict[str, float]:
    """Steps of 16 sequences and a small model's matrix products; seconds of the steps, and of `finish` after them."""
    source = PackedSource(
        folder, packs_per_step=16, max_sequences_per_pack=1, seed=1, deal=contiguous, vocab_size=30_000, checks=checks
    )
    source.open()
    weights, total = torch.randn(768, 768), 0.0
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        (batch,) = source.next_step()
        total += float((torch.randn(batch.num_tokens // 8, 768) @ weights @ weights).sum())
    steps = time.perf_counter() - began
    source.finish()
    finish = time.perf_counter() - began - steps
    result = {"steps": steps, "finish": finish, "cpu": time.process_time() - cpu}
    source.close()
    return result


def main() -> None:
    """One line of JSON for the hashes alone, one for each pair."""
    folder, pairs = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    if not (folder / "manifest.json").exists():
        make(folder)
    prepared.VERIFY_BYTES = opening.IN_MEMORY_BYTES = 0
    manifest = read_manifest(folder)
    paths = [file.path for file in file_sums(manifest)]
    for name, digest in (("xxh3", file_xxh3), ("sha256", file_sha256)):
        began = time.process_time()
        for path in paths:
            digest(path)
        print(json.dumps({"hash": name, "bytes": manifest.num_bytes, "cpu_seconds": time.process_time() - began}))
    run(folder, NoChecks())
    for pair in range(pairs):
        both = {}
        for name in ("without", "with") if pair % 2 else ("with", "without"):
            both[name] = run(folder, FileChecks() if name == "with" else NoChecks())
        print(json.dumps({"pair": pair, "load": os.getloadavg()[0], **both}), flush=True)


if __name__ == "__main__":
    main()
