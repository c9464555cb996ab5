"""Small prepared sets made of random sequences. Puts this folder on the path for `random_set`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlbert.data.shards import ShardWriter

sys.path.insert(0, str(Path(__file__).parent))

from random_set import MAX_SEQ_LENGTH, VOCAB_SIZE, random_rows


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., Path]:
    """make_set(count, shards=..) -> folder of a prepared set."""

    def make(count: int = 300, shards: int = 3, name: str = "set", seed: int = 0, vocabulary: str = "v" * 64) -> Path:
        folder = tmp_path / name
        rows = random_rows(count, seed)
        writer = ShardWriter(folder, shards, "test")
        for index, chosen in enumerate(np.array_split(np.arange(count), shards)):
            writer.write_shard(index, rows.take(chosen))
        writer.finish(
            vocabulary={"sha256": vocabulary, "size": VOCAB_SIZE},
            max_seq_length=MAX_SEQ_LENGTH,
            max_predictions=5,
            provenance={"options": {"seed": seed}},
        )
        return folder

    return make
