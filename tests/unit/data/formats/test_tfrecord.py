"""TFRecords: framing, checksums, examples in every encoding, damage;
the compiled form against the plain one.
"""

import gzip
import os
import random
import struct
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfrecord_examples as proto
from mlbert.data.formats import tfrecord, tfrecord_native
from mlbert.data.formats import tfrecord_plain as plain
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import (
    ExampleReader,
    Widths,
    find_files,
    read_widths,
    write_examples,
)
from mlbert.data.prepare.instances import digest
from mlbert.host.native import NativeUnavailable
from random_set import any_row, random_rows
from stored_sets import assert_same_rows, flip
from tfrecord_examples import (
    SIMPLE_ROW,
    SIMPLE_WIDTHS,
    example,
    frame,
    odd_examples,
    read_examples,
    simple_lists,
)
from user_errors import user_error

ASSET = Path(__file__).resolve().parents[3] / "assets" / "tfrecord" / "benchmark.tfrecord"
WIDTHS = Widths(32, 5)
LONG = struct.pack("<Q", 1 << 50)
BAD = {
    "missing": {"segment_ids": None},
    "empty": {"masked_lm_ids": []},
    "wider": {"input_ids": [1] * 9},
    "narrower": {"masked_lm_positions": [1, 3]},
    "holes in the mask": {"input_mask": [1, 1, 0, 1, 1, 0, 0, 0]},
    "mask of two": {"input_mask": [1, 1, 1, 1, 1, 2, 0, 0]},
    "mask of zeros": {"input_mask": [0] * 8},
    "segments": {"segment_ids": [0, 1, 0, 1, 1, 0, 0, 0]},
    "segment 2": {"segment_ids": [0, 0, 0, 1, 2, 0, 0, 0]},
    "position": {"masked_lm_positions": [1, 5, 0]},
    "negative position": {"masked_lm_positions": [-1, 3, 0]},
    "id": {"input_ids": [101, 65536, 3, 3, 3, 0, 0, 0]},
    "negative id": {"input_ids": [101, -7, 3, 3, 3, 0, 0, 0]},
    "huge id": {"input_ids": [101, 1 << 62, 3, 3, 3, 0, 0, 0]},
    "label id": {"masked_lm_ids": [9, 70000, 0]},
    "weight": {"masked_lm_weights": [1.0, 0.5, 0.0]},
    "nan": {"masked_lm_weights": [1.0, float("nan"), 0.0]},
    "label": {"next_sentence_labels": [2]},
    "labels": {"next_sentence_labels": [1, 0]},
}


@pytest.fixture(params=["plain", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return each implementation in turn; the reader uses it."""
    module = plain if request.param == "plain" else compiled()
    monkeypatch.setattr(tfrecord, "codec", lambda: module)
    return module


def compiled() -> ModuleType:
    try:
        tfrecord_native.library()
    except NativeUnavailable as error:
        pytest.skip(f"the compiled form is not to be had: {error}")
    return tfrecord_native


def parse(
    form: ModuleType, content: bytes, widths: Widths = SIMPLE_WIDTHS, vocab_size: int = 65_536
):
    data = np.frombuffer(content, np.uint8)
    starts = form.scan(data, 1000)
    assert starts[-1] == len(data)
    return form.parse(data, starts[:-1], starts[1:], widths, vocab_size)


def read(path: Path, **options) -> Ragged:
    return Ragged.concatenate(list(read_examples(path, **options)))


def checksums(content: bytes, skipped: int = 0) -> set[int]:
    """Return those of the plain form and of both compiled ones,
    from an address after some bytes.
    """
    data = np.frombuffer(bytes(skipped) + content, np.uint8)
    library = compiled().library()
    both = (library.tfrecord_crc32c, library.tfrecord_crc32c_table)
    return {plain.crc32c(content), *(one(data.ctypes.data + skipped, len(content)) for one in both)}


def test_checksums_of_known_texts():
    # RFC 3720, B.4: 32 bytes of zeros, of ones, rising, falling; and the usual check text.
    texts = [bytes(32), b"\xff" * 32, bytes(range(32)), bytes(range(31, -1, -1)), b"123456789", b""]
    expected = [0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0x113FDB5C, 0xE3069283, 0]
    assert [checksums(text) for text in texts] == [{number} for number in expected]


@settings(max_examples=50)
@given(st.binary(max_size=100), st.integers(0, 8))
def test_three_checksums_agree(content, skipped):
    assert len(checksums(content, skipped)) == 1


def test_reads_and_writes_what_the_benchmark_wrote(form, tmp_path):
    rows = read(ASSET)
    assert (
        digest(rows, 512, 76) == "b968ef7928d7a4b6a10f35b36a98d7f8e76044a41f77c9a785e85e98b2e065b7"
    )
    assert read_widths(ASSET) == (512, 76)
    write_examples(tmp_path / "copy", rows, 512, 76)
    assert (tmp_path / "copy").read_bytes() == ASSET.read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "copy"]


@settings(max_examples=60)
@given(st.lists(any_row(), min_size=1, max_size=8), st.integers(12, 200), st.integers(4, 20))
def test_written_files_are_read_back(drawn, max_seq_length, max_predictions):
    rows = Ragged.from_rows(drawn)
    widths = Widths(max_seq_length, max_predictions)
    written = plain.encode(rows, widths)
    assert bytes(compiled().encode(rows, widths)) == written
    for form in (plain, tfrecord_native):
        found, good = parse(form, written, widths)
        assert good.all()
        assert_same_rows(found, rows)


def test_batches(form, tmp_path):
    rows = random_rows(100)
    write_examples(tmp_path / "file", rows, *WIDTHS)
    parts = list(ExampleReader(tmp_path / "file", batch=7))
    assert max(len(part.rows) for part in parts) <= 7
    assert_same_rows(Ragged.concatenate([part.rows for part in parts]), rows)
    starts, ends = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "ends")
    )
    assert starts[0] == 0
    assert ends[-1] == (tmp_path / "file").stat().st_size
    np.testing.assert_array_equal(starts[1:], ends[:-1])


@pytest.mark.parametrize("name", odd_examples())
def test_odd_encodings(form, name):
    rows, good = parse(form, frame(odd_examples()[name]))
    assert good.all()
    assert_same_rows(rows, Ragged.from_rows([SIMPLE_ROW]))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_both_forms_judge_changed_records_alike(rng: random.Random, changes):
    records = []
    for content in [*odd_examples().values(), example(simple_lists())]:
        changed = bytearray(content)
        for _ in range(changes):
            byte = rng.choice([0, 1, 2, 8, 10, 18, 26, 127, 128, 255, rng.randrange(256)])
            changed[rng.randrange(len(changed))] = byte
        records.append(bytes(changed[: len(changed) - rng.choice([0, 0, 1, 5])]))
    content = frame(*records)
    plain_rows, plain_good = parse(plain, content)
    rows, good = parse(compiled(), content)
    assert good.tolist() == plain_good.tolist()
    assert_same_rows(rows, plain_rows)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 10_000), st.integers(1, 6))
def test_both_forms_find_and_check_damaged_records_alike(where, value, cut, most):
    content = bytearray(frame(*[example(simple_lists())] * 4))
    content[where % len(content)] = value
    data = np.frombuffer(bytes(content[: cut % len(content)]), np.uint8)
    starts = plain.scan(data, most)
    assert compiled().scan(data, most).tolist() == starts.tolist()
    for shift in (0, 1, -20):  # of the ends, beyond which a record is not complete
        ends = np.clip(starts[1:] + shift, starts[:-1], len(data))
        (rows, good), (plain_rows, plain_good) = (
            form.parse(data, starts[:-1], ends, SIMPLE_WIDTHS, 65_536)
            for form in (compiled(), plain)
        )
        assert good.tolist() == plain_good.tolist()
        assert_same_rows(rows, plain_rows)


@pytest.mark.parametrize("name", BAD)
def test_bad_examples_are_named(form, tmp_path, name):
    lists = {
        key: value for key, value in {**simple_lists(), **BAD[name]}.items() if value is not None
    }
    fine = example(simple_lists())
    (tmp_path / "file").write_bytes(frame(fine, fine, example(lists), fine))
    offset = 2 * len(frame(fine))
    with user_error("data.damaged", tmp_path / "file") as caught:
        read(tmp_path / "file")
    assert f"record 2 (byte {offset}) " in str(caught.value)
    reader = ExampleReader(tmp_path / "file", skip_bad=True)
    rows = Ragged.concatenate([part.rows for part in reader])
    assert_same_rows(rows, Ragged.from_rows([SIMPLE_ROW] * 3))
    ((number, place, _),) = reader.bad
    assert (number, place, reader.num_records) == (2, offset, 4)


def test_bad_first_record_does_not_set_the_widths(form, tmp_path):
    bad = example({**simple_lists(), "input_ids": [1] * 9})
    (tmp_path / "file").write_bytes(frame(bad, example(simple_lists())))
    with user_error("data.damaged", tmp_path / "file"):
        read_widths(tmp_path / "file")
    assert read_widths(tmp_path / "file", skip_bad=True) == SIMPLE_WIDTHS


def test_vocabulary(form, tmp_path):
    (tmp_path / "file").write_bytes(frame(example({**simple_lists(), "masked_lm_ids": [9, 9, 0]})))
    assert len(read(tmp_path / "file", vocab_size=30_001)) == 1
    with user_error("data.damaged", tmp_path / "file"):
        read(tmp_path / "file", vocab_size=30_000)


def test_not_examples(form, tmp_path):
    floats = proto.message(1, proto.entry("input_ids", proto.feature([1.0], kind=2)))
    cut_list = proto.message(
        1, proto.entry("input_ids", proto.message(3, proto.message(1, b"\x80")))
    )
    for content in (b"", b"\xff\xff\xff", b"hello, this is text", floats, cut_list):
        (tmp_path / "file").write_bytes(frame(content))
        with user_error("data.damaged", tmp_path / "file"):
            read(tmp_path / "file")
        with user_error("data.empty", tmp_path / "file"):
            list(ExampleReader(tmp_path / "file", skip_bad=True))


@pytest.mark.parametrize(
    ("flipped", "kept", "good"),
    [
        *((at, None, np.delete(np.arange(20), 12)) for at in (12, 300)),  # in its data
        *((at, None, np.arange(12)) for at in (0, 7, 9)),  # in its length, so the file ends there
        *((None, kept, np.arange(12)) for kept in (1, 11, 12, 200)),
    ],
)
def test_a_damaged_record_is_named(form, tmp_path, flipped, kept, good):
    path = tmp_path / "file"
    write_examples(path, random_rows(20), *WIDTHS)
    start = int(plain.scan(np.fromfile(path, np.uint8), 20)[12])
    if kept:
        os.truncate(path, start + kept)
    else:
        flip(path, start + flipped)
    with user_error("data.damaged", path) as caught:
        read(path)
    assert f"record 12 (byte {start})" in str(caught.value)
    reader = ExampleReader(path, skip_bad=True)
    assert_same_rows(Ragged.concatenate([part.rows for part in reader]), random_rows(20).take(good))
    assert [bad.number for bad in reader.bad] == [12]


def test_not_tfrecords(form, tmp_path):
    for content, code, code_skipping in (
        (b"", "data.empty", "data.empty"),
        (b"One sentence a line.\nAnother sentence.\n", "data.format", "data.format"),
        (b"short", "data.damaged", "data.empty"),
        (LONG + plain.masked_crc32c(LONG) + bytes(100), "data.damaged", "data.empty"),
        (gzip.compress(ASSET.read_bytes()), "data.encoding", "data.encoding"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "data.damaged", "data.damaged"),
    ):
        (tmp_path / "file").write_bytes(content)
        with user_error(code, tmp_path / "file"):
            list(ExampleReader(tmp_path / "file"))
        with user_error(code_skipping, tmp_path / "file"):
            list(ExampleReader(tmp_path / "file", skip_bad=True))


def test_files_that_are_found_or_not(tmp_path):
    wanted = [
        "a.tfrecord",
        "b.tfrecords",
        "c.tfrecord-00000-of-00001",
        "eval_10k",
        "part-00000-of-00001",
    ]
    for name in [
        *wanted,
        "part-00000-of-00001.md5",
        ".part-1.tfrecord",
        "a.tfrecord.tmp",
        "notes.txt",
        "part-1.hdf5",
    ]:
        (tmp_path / name).touch()
    (tmp_path / "part-folder").mkdir()
    assert [path.name for path in find_files(tmp_path)] == wanted
    assert find_files(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]
    with user_error("data.missing", tmp_path / "part-folder"):
        find_files(tmp_path / "part-folder")
    for path, code in ((tmp_path / "absent", "file.unreadable"), (tmp_path, "file.wrong-kind")):
        with user_error(code, path):
            read(path)


def test_too_long_to_write(tmp_path):
    for name, widths, code in (
        ("file", (8, 5), "data.too-long"),
        ("file", (32, 1), "data.too-long"),
        ("absent/file", (32, 5), "file.unwritable"),
    ):
        with user_error(code, tmp_path / name):
            write_examples(tmp_path / name, random_rows(20), *widths)
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler():
    tfrecord.codec.cache_clear()
    missing = NativeUnavailable("no C compiler (gcc) on PATH")
    with mock.patch.object(tfrecord_native, "library", side_effect=missing):
        assert len(read(ASSET)) == 16
        assert "slowly" in tfrecord.slowness()
    tfrecord.codec.cache_clear()
