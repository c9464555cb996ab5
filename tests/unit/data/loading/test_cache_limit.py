"""Local copies of a set stay within a limit while the run reads the same sequences."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlbert.data.formats import cache_limit
from mlbert.data.formats.cache_limit import CacheLimit, files_below
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.token_shards import TokenShards, open_texts
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.masked_text import TextSet, TextSource
from text_sets import random_texts, rows, write_texts

SHARDS = 40
STEPS = 45  # of 20 texts
LIMIT = 30 * 4096  # bytes on the disk: each shard and its tokens take a block or two


@pytest.fixture(autouse=True)
def _nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_limit, "_FRESH_SECONDS", 0.0)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    folder = write_texts(tmp_path / "remote", random_texts(SHARDS * 17, empty=0.0))
    assert len(list(folder.glob("shard*"))) >= SHARDS
    return folder


def read_steps(remote: Path, copy: Path, limit: int | None, shuffle: str) -> list[list[object]]:
    """Return the rows of more than an epoch, and check the limit after each step."""
    tokenizer = load_tokenizer("bert-base-uncased")
    texts = TextSet(streams_of("", None, copy, str(remote)), tokenizer, 16, "truncate", limit)
    source = TextSource(
        texts,
        sequences_per_step=20,
        shuffle=shuffle,
        shuffle_seed=3,
        canonical_nodes=2,
        rate=lambda step: 0.3,
        seed=1,
    )
    source.open()
    found = []
    try:
        for _ in range(STEPS):
            found.append([row for batch in source.next_step() for row in rows(batch)])
            if limit is not None:
                assert used(copy) <= limit + 4 * 4096, "another thread may be making a file"
    finally:
        source.close()
    return found


def used(folder: Path) -> int:
    return sum(
        file.num_bytes for file in files_below(folder) if file.path.suffix in (".mds", ".ids")
    )


@pytest.mark.parametrize("shuffle", ["py1s", "py1br"])
def test_the_limit_changes_no_batch(remote: Path, tmp_path: Path, shuffle: str) -> None:
    free = read_steps(remote, tmp_path / "free", None, shuffle)
    assert used(tmp_path / "free") > 2 * LIMIT
    assert read_steps(remote, tmp_path / "bound", LIMIT, shuffle) == free


def make_files(folder: Path, count: int) -> list[Path]:
    """Make shards, the first ones used longest ago, and a file that is none."""
    folder.mkdir()
    paths = [folder / f"shard.{number:05}.mds" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - 1000 + number,) * 2)
    (folder / "notes.mds").write_bytes(bytes(4096))
    return paths


def test_what_a_process_holds_and_foreign_files_stay(tmp_path: Path) -> None:
    paths = make_files(tmp_path / "cache", 10)
    program = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, "
    program += "access=mmap.ACCESS_READ); f.close(); print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(paths[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"1\n"
    limit = CacheLimit(3 * 4096, [(tmp_path / "cache", {path.name for path in paths}.__contains__)])
    limit.trim()
    left = sorted(path.name for path in (tmp_path / "cache").glob("*.mds"))
    assert left == ["notes.mds", *(paths[number].name for number in (1, 8, 9))]
    holder.communicate()
    CacheLimit(2 * 4096, [(tmp_path / "cache", {path.name for path in paths}.__contains__)]).trim()
    assert sorted(path.name for path in (tmp_path / "cache").glob("shard*")) == [
        paths[8].name,
        paths[9].name,
    ]


def test_a_set_that_is_read_in_place_is_not_touched(remote: Path) -> None:
    """Only its tokens are in the cache."""
    tokenizer = load_tokenizer("bert-base-uncased")
    before = {path: path.stat().st_mtime_ns for path in remote.iterdir()}
    readers = open_texts(streams_of("", None, remote, None), tokenizer)
    shards = TokenShards(readers, tokenizer, most_bytes=10 * 4096)
    for number in itertools.chain(range(SHARDS), range(SHARDS)):
        assert len(shards.shard(number).lengths)
    assert used(readers[0].cache) <= 12 * 4096
    assert {path: path.stat().st_mtime_ns for path in remote.iterdir()} == before
