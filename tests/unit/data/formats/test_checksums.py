"""A flipped bit in a set too large to be hashed when it is opened: found beside training, by either checksum."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from mlbert.data.formats import open as opening
from mlbert.data.formats import prepared
from mlbert.data.formats.checksums import CHECKSUMS, FileChecks, FileSum, file_xxh3, sharers
from mlbert.data.formats.open import open_store
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.prepared import ShardSet, shard_name
from mlbert.data.loading.packed import PackedSource
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.verify import verify
from user_errors import user_error


def harmless_flip(folder: Path, shard: int) -> Path:
    """Change a token of the last sequence to another one of the vocabulary."""
    path = folder / shard_name(shard, 3)
    tokens = ShardSet.open(folder, verify=False).shard(shard).rows.tokens
    data = bytearray(path.read_bytes())
    data[data.index(tokens.tobytes()) + tokens.nbytes - 2] ^= 1
    path.write_bytes(data)
    return path


def trained(folder: Path, steps: int = 3) -> None:
    """As the loop does: open, some steps, finish."""
    source = PackedSource(folder, packs_per_step=40, max_sequences_per_pack=1, seed=1, partition=contiguous)
    with closing(source):
        source.open()
        for _ in range(steps):
            source.next_step()
        source.finish()


@pytest.mark.parametrize("listed", [True, False, "stale"])
def test_a_flipped_bit_ends_the_run_of_a_large_set(make_set, monkeypatch, listed):
    monkeypatch.setattr(prepared, "VERIFY_BYTES", 0)
    monkeypatch.setattr(opening, "IN_MEMORY_BYTES", 0)
    folder = make_set(300)
    if listed is False:
        (folder / CHECKSUMS).unlink()
    elif listed == "stale":  # says otherwise of a good shard: SHA-256 decides
        lines = (folder / CHECKSUMS).read_text().splitlines()
        (folder / CHECKSUMS).write_text("\n".join(f"{index:032x}{line[32:]}" for index, line in enumerate(lines)))
    trained(folder)
    bad = harmless_flip(folder, 1)
    with user_error("data.checksum", bad):
        trained(folder)
    with user_error("data.damaged", folder):  # what prepares: before it is used
        ShardSet.open(folder).load()


def test_other_peoples_files_after_a_verification(make_set, tmp_path):
    shards = export_nvidia(make_set(100), tmp_path / "theirs", "fixed", num_files=2)
    assert verify([tmp_path / "theirs"])[0].problems == []
    trained(tmp_path / "theirs")
    first = shards[0].read_bytes()
    shards[0].write_bytes(shards[1].read_bytes())
    shards[1].write_bytes(first)
    for use in (trained, open_store):
        with user_error("data.checksum", shards[0]):
            use(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda text: text.replace(b"00001", b"0000\0"), "data.damaged"),
        (lambda text: text[:-5], "data.incomplete"),
        (lambda _: b"", "data.damaged"),
    ],
    ids=["no name", "cut", "empty"],
)
def test_a_list_that_does_not_fit(make_set, edit, code):
    folder = make_set(100)
    (folder / CHECKSUMS).write_bytes(edit((folder / CHECKSUMS).read_bytes()))
    with user_error(code, folder / CHECKSUMS):
        trained(folder, 1)


def test_the_list_has_xxhsums_form(make_set):
    folder = make_set(30)
    lines = (folder / CHECKSUMS).read_text().splitlines()
    assert lines == [f"{file_xxh3(path)}  {path.name}" for path in sorted(folder.glob("*.h5"))]


def test_ranks_share_the_work_and_closing_does_not_end_it(make_set):
    folder = make_set(30)
    sums = [FileSum(path, "0" * 32, "0" * 64) for path in sorted(folder.glob("*.h5"))]
    for part in range(2):
        checks = FileChecks(part, 2)
        checks.close()
        for number, file in enumerate(sums[:2]):
            checks.add(number, file)
        checks.close()
        with user_error("data.checksum", sums[part].path):
            checks.finish()
    assert sharers(Path("/proc"), 5, 8, 1, 4) == (1, 4)


def test_a_shard_damaged_while_it_was_written(make_set, monkeypatch):
    folder = make_set(30)
    harmless_flip(folder, 0)
    with user_error("data.checksum", folder / "shard-00000-of-00003.h5"):
        prepared.ShardWriter(folder, 3, "test").entry(0)
