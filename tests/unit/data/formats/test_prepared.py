"""The shard store, its rows and its manifest give back what was written,
and name the file that is damaged.
"""

import copy
import dataclasses
import functools
import itertools
import json
import os
import resource
import shutil
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_batches import open_packed
from mlbert.data.formats import open as opening
from mlbert.data.formats import prepared
from mlbert.data.formats import ragged as ragged_module
from mlbert.data.formats.checksums import CHECKSUMS, FileChecks, FileSum, file_xxh3, sharers
from mlbert.data.formats.file_map import FileMap
from mlbert.data.formats.manifest import file_sha256, read_manifest
from mlbert.data.formats.open import check_vocabulary, describe, open_store
from mlbert.data.formats.prepared import ShardSet, ShardWriter, shard_name
from mlbert.data.formats.ragged import DTYPES, Ragged
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.verify import verify
from mlbert.host.errors import UserError
from random_set import any_row, random_rows
from stored_sets import assert_same_rows, flip, write_set
from user_errors import user_error

BITS = (0.001, 0.3, 0.6, 0.95)
MANIFEST = ("data.damaged", "manifest.json")
JUNK = [
    None,
    True,
    -1,
    0,
    1 << 70,
    1e999,
    0.5,
    "",
    "x",
    "9",
    "../x",
    "a" * 64,
    [],
    [[]],
    {},
    [-1],
    [1 << 70],
]


def first_shard(folder: Path) -> Path:
    return folder / shard_name(0, 3)


def edit_manifest(folder: Path, change) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document))


def swap(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def claim_packs(document: dict) -> None:
    shards = [shard | {"num_packs": 0} for shard in document["shards"]]
    document.update(packs={"max_tokens": 64, "num_packs": 0}, shards=shards)


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (lambda folder: first_shard(folder).unlink(), "data.incomplete", shard_name(0, 3)),
        (
            lambda folder: shutil.copy(first_shard(folder), folder / shard_name(3, 4)),
            "data.mixed",
            shard_name(3, 4),
        ),
        (
            lambda folder: edit_manifest(folder, lambda d: d["shards"].append(d["shards"][0])),
            *MANIFEST,
        ),
        (
            lambda folder: swap(first_shard(folder), folder / shard_name(1, 3)),
            "data.damaged",
            shard_name(0, 3),
        ),
        (lambda folder: edit_manifest(folder, claim_packs), "data.damaged", shard_name(0, 3)),
        *(
            (lambda folder, at=at: flip(first_shard(folder), at), "data.checksum", shard_name(0, 3))
            for at in BITS
        ),
    ],
    ids=[
        "missing",
        "of another set",
        "listed twice",
        "swapped",
        "packs",
        *(f"bit at {place}" for place in BITS),
    ],
)
def test_damage_is_named(make_set, damage, code, named):
    folder = make_set()
    damage(folder)
    with user_error(code, folder / named):
        ShardSet.open(folder)


@pytest.mark.parametrize("kept", [0, 10, 2000, 0.5, 0.99])
def test_truncated_shard(make_set, kept):
    path = first_shard(make_set())
    os.truncate(path, int(kept * path.stat().st_size) if isinstance(kept, float) else kept)
    for is_verified in (True, False):
        with user_error("data.damaged", path):
            ShardSet.open(path.parent, verify=is_verified)


def test_a_value_out_of_range_is_named(tmp_path):  # the other ones are in test_verify.py
    rows = random_rows(20)
    rows.first_lengths[3] = 40
    with user_error("data.damaged", "shard-00000-of-00001.h5"):
        ShardSet.open(write_set(tmp_path, rows, shards=1))


def test_only_the_same_fingerprint_and_content_is_kept(tmp_path):
    writer = ShardWriter(tmp_path, 2, "one")
    writer.write_shard(0, random_rows(20))
    assert writer.is_written(0)
    assert not writer.is_written(1)
    assert not ShardWriter(tmp_path, 2, "two").is_written(0)
    with h5py.File(writer.path(0)) as file:
        place = file["tokens"].id.get_offset()
    flip(writer.path(0), place)
    assert not writer.is_written(0)


def test_leftovers_are_cleared(tmp_path):
    writer = ShardWriter(tmp_path, 2, "")
    writer.write_shard(0, random_rows(5))
    for name in (
        "shard-00000-of-00002.h5.tmp",
        "shard-00001-of-00007.h5",
        "manifest.json",
        "mine.txt",
    ):
        (tmp_path / name).write_bytes(b"x")
    writer.clear_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.txt",
        "shard-00000-of-00002.h5",
    ]


@given(count=st.integers(1, 120), shards=st.integers(1, 5), data=st.data())
@settings(max_examples=15)
def test_any_selection_from_any_number_of_shards(tmp_path_factory, count, shards, data):
    folder = tmp_path_factory.mktemp("set")
    rows = random_rows(count)
    borders = np.sort(
        np.asarray(
            data.draw(st.lists(st.integers(0, count), min_size=shards - 1, max_size=shards - 1))
        )
    )
    writer = ShardWriter(folder, shards, "")
    every = []
    for index, chosen in enumerate(np.split(np.arange(count), borders.astype(int))):
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=len(chosen), max_size=len(chosen)))
        offsets = np.unique(np.minimum(np.cumsum([0, *sizes]), len(chosen)))
        every += [chosen[low:high] for low, high in itertools.pairwise(offsets)]
        writer.write_shard(index, rows.take(chosen), offsets)
    limits = {"max_tokens": 96, "max_sequences": 3}
    vocabulary = {"sha256": "a" * 64, "size": 500}
    writer.finish(
        vocabulary=vocabulary, max_seq_length=32, max_predictions=5, provenance={}, packs=limits
    )
    indices = np.asarray(data.draw(st.lists(st.integers(0, count - 1), max_size=80)), np.int64)
    packs = np.asarray(data.draw(st.lists(st.integers(0, len(every) - 1), max_size=40)), np.int64)
    wanted = np.concatenate([np.empty(0, np.int64), *(every[pack] for pack in packs)])
    for store in (ShardSet.open(folder, verify=False), ShardSet.open(folder, verify=True).load()):
        assert store.num_packs == len(every)
        assert np.array_equal(store.lengths, rows.lengths)
        assert_same_rows(store.gather(indices), rows.take(indices))
        gathered, counts = store.gather_packs(packs)
        assert_same_rows(gathered, rows.take(wanted))
        assert counts.tolist() == [len(every[pack]) for pack in packs]
        assert store.pack_lengths(packs).tolist() == [
            rows.lengths[every[pack]].sum() for pack in packs
        ]


def test_shards_are_mapped_when_they_are_touched_and_closed(make_set):
    folder = make_set(300)
    open_files = len(os.listdir("/proc/self/fd"))
    store = ShardSet.open(folder, verify=False)
    first_shard(folder).write_bytes(b"x")
    assert len(store.gather(np.arange(150, 250))) == 100
    with user_error("data.damaged", "set"):
        store.gather(np.arange(3))
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_processes_share_the_look_at_the_files(make_set):
    folder = make_set(30)
    first_shard(folder).unlink()
    for part in (1, 2):
        ShardSet.open(folder, verify=False, checks=FileChecks(part, 3))
    with user_error("data.incomplete", first_shard(folder)):
        ShardSet.open(folder, verify=False, checks=FileChecks(0, 3))


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def test_random_reads_read_little(tmp_path):
    path = tmp_path / "file"
    touched = np.arange(12) * (1 << 20) + 99
    path.write_bytes(bytes(12 << 20))
    counted = []
    for is_random in (False, True):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        files = FileMap([path])
        before = read_bytes()
        if is_random:
            files.expect_random_reads()
        assert not files.bytes[touched].any()
        counted.append(read_bytes() - before)
        del files
    if not counted[0]:
        pytest.skip("the temporary folder is in memory")
    assert counted[1] <= len(touched) * resource.getpagesize() < counted[0]


def harmless_flip(folder: Path, shard: int) -> Path:
    """Change a token of the last sequence to another one of the vocabulary."""
    path = folder / shard_name(shard, 3)
    tokens = ShardSet.open(folder, verify=False).shard(shard).rows.tokens
    data = bytearray(path.read_bytes())
    data[data.index(tokens.tobytes()) + tokens.nbytes - 2] ^= 1
    path.write_bytes(data)
    return path


def trained(folder: Path, steps: int = 3) -> None:
    """Open, run some steps, and finish, as the training loop does."""
    with closing(open_packed(folder, 40, max_sequences_per_pack=1)) as source:
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
        (folder / CHECKSUMS).write_text(
            "\n".join(f"{index:032x}{line[32:]}" for index, line in enumerate(lines))
        )
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
    swap(*shards)
    for use in (trained, open_store):
        with user_error("data.checksum", shards[0]):
            use(tmp_path / "theirs")


def test_the_list_has_xxhsums_form_and_must_fit(make_set):
    folder = make_set(100)
    listed = (folder / CHECKSUMS).read_bytes()
    lines = [f"{file_xxh3(path)}  {path.name}" for path in sorted(folder.glob("*.h5"))]
    assert listed.decode().splitlines() == lines
    for edited, code in (
        (listed.replace(b"00001", b"0000\0"), "data.damaged"),
        (listed[:-5], "data.incomplete"),
        (b"", "data.damaged"),
    ):
        (folder / CHECKSUMS).write_bytes(edited)
        with user_error(code, folder / CHECKSUMS):
            trained(folder, 1)


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


def test_bad_manifest(tmp_path):
    path = tmp_path / "manifest.json"
    no_more = b'{"format": "mlbert-ragged", "version": 1}'
    for content in (b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", no_more):
        path.write_bytes(content)
        with user_error("file.json", path):
            read_manifest(tmp_path)
    path.write_bytes(b'{"format": "other", "version": 3}')
    with user_error("data.format", path):
        read_manifest(tmp_path)
    path.unlink()
    with user_error("data.incomplete", tmp_path):
        read_manifest(tmp_path)
    os.mkfifo(path)
    absent = tmp_path / "absent"
    for folder, code, subject in (
        (tmp_path, "file.unreadable", path),
        (absent, "file.missing", absent),
    ):
        with user_error(code, subject):  # and does not wait for a writer
            read_manifest(folder)


def test_vocabulary_must_be_the_one_prepared_with(make_set, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n")
    check_vocabulary(describe(make_set(vocabulary=file_sha256(vocab), name="good")), vocab)
    with user_error("vocabulary.mismatch", vocab):
        check_vocabulary(describe(make_set(name="bad")), vocab)


def places(document: object) -> list[tuple]:
    """Return the keys that lead to each value."""
    if not isinstance(document, (dict, list)):
        return []
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    return [(key, *way) for key, value in inside for way in [(), *places(value)]]


@given(data=st.data())
@settings(max_examples=150)
def test_an_edited_manifest_is_refused_or_equivalent(make_set, tmp_path, data):
    folder = tmp_path / "set"
    if not folder.exists():
        (make_set(20) / "manifest.json").rename(tmp_path / "right.json")
    right = json.loads((tmp_path / "right.json").read_text())
    *way, last = data.draw(st.sampled_from(places(right)))
    edited = copy.deepcopy(right)
    inner = functools.reduce(lambda value, key: value[key], way, edited)
    if data.draw(st.booleans()):
        inner[last] = data.draw(st.sampled_from(JUNK))
    else:
        del inner[last]
    (folder / "manifest.json").write_text(json.dumps(edited))
    try:
        store = ShardSet.open(folder, verify=True)
    except UserError:
        return
    may_differ = (
        "provenance",
        "content_sha256",
        "max_seq_length",
        "max_predictions",
        "size",
        "sha256",
    )
    assert "provenance" in way or last in may_differ or edited == right
    assert store.gather(np.arange(20)).lengths.max() <= store.info.max_seq_length
    assert store.info.vocab_size > int(store.gather(np.arange(20)).tokens.max())


def unpacked(rows: Ragged) -> list[tuple]:
    result = []
    for s in range(len(rows)):
        part = slice(rows.offsets[s], rows.offsets[s + 1])
        mask = slice(rows.masked_offsets[s], rows.masked_offsets[s + 1])
        masked = [column[mask].tolist() for column in (rows.masked_positions, rows.masked_labels)]
        result.append(
            (
                rows.tokens[part].tolist(),
                int(rows.first_lengths[s]),
                bool(rows.next_sentence[s]),
                *masked,
            )
        )
    return result


@given(st.lists(any_row(), max_size=20))
@settings(max_examples=40)
def test_rows_come_back(rows):
    ragged = Ragged.from_rows(rows)
    assert unpacked(ragged) == rows
    assert {name: getattr(ragged, name).dtype for name in DTYPES} == DTYPES


@given(st.lists(any_row(), min_size=1, max_size=20), st.data(), st.integers(1, 9))
@settings(max_examples=40)
def test_taking_in_blocks_is_plain_taking(monkeypatch, rows, data, block):
    ragged = Ragged.from_rows(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30))
    monkeypatch.setattr(ragged_module, "BLOCK", block)
    assert unpacked(ragged.take(np.asarray(chosen, np.int64))) == [rows[i] for i in chosen]


def test_labels_go_with_their_sequences():
    plain = Ragged.from_rows([([n, n + 1], 1, False, [], []) for n in range(6)])
    assert plain.labels is plain.take(np.asarray([1])).labels is plain.slice(0, 3).labels is None
    rows = dataclasses.replace(plain, labels=np.arange(6, dtype=np.float32))
    assert rows.take(np.asarray([4, 0, 4])).labels.tolist() == [4, 0, 4]
    assert rows.slice(2, 5).labels.tolist() == [2, 3, 4]
    joined = Ragged.concatenate([rows.slice(4, 6), rows.slice(0, 1)])
    assert (joined.labels.tolist(), joined.labels.dtype) == ([4, 5, 0], np.float32)
    with pytest.raises(AssertionError, match="some sequences have task labels"):
        Ragged.concatenate([plain, rows])


@given(st.lists(any_row(), min_size=1, max_size=12), st.data())
@settings(max_examples=40)
def test_ranges_are_slices_joined_in_order(rows, data):
    ragged = Ragged.from_rows(rows)
    places = st.integers(0, len(rows))
    ranges = [sorted(pair) for pair in data.draw(st.lists(st.tuples(places, places), max_size=6))]
    of_ranges = Ragged.of_ranges((ragged, first, end) for first, end in ranges)
    for found in (
        of_ranges,
        Ragged.concatenate([ragged.slice(first, end) for first, end in ranges]),
    ):
        assert unpacked(found) == [each for first, end in ranges for each in rows[first:end]]
        assert {name: getattr(found, name).dtype for name in DTYPES} == DTYPES
