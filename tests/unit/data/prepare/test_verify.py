"""Verification counts the good samples and names everything that is wrong."""

import hashlib
import shutil

import numpy as np
import pytest

from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from mlbert.data.prepare.verify import Md5List, verify
from nvidia_shards import write_variable
from stored_sets import VOCAB_SIZE, flip, make_rows, random_lengths, write_set
from tfrecord_examples import write_parts
from user_errors import user_error

COUNT = 300


@pytest.fixture
def rows():
    return make_rows(random_lengths(COUNT))


def only(folder, **options):
    (report,) = verify([folder], **options)
    return report


def test_good_sets_of_every_kind(tmp_path, rows, source):
    shuffle_set(source, tmp_path / "packed", num_shards=2, packing=Packing(40))
    make_bins(source, tmp_path / "bins", edges=(16, 32), num_shards=2)
    write_parts(tmp_path / "records", rows)
    (tmp_path / "nvidia").mkdir()
    for part in range(2):
        write_variable(
            tmp_path / "nvidia" / f"part_0000{part}_of_00002.hdf5",
            rows.slice(part * 150, part * 150 + 150),
        )
    names = ("source", "packed", "bins", "records", "nvidia")
    reports = verify([tmp_path / name for name in names], executor=Executor(workers=2))
    assert [report.info.kind for report in reports] == [
        "mlbert",
        "mlbert",
        "bins",
        "tfrecord",
        "nvidia-variable",
    ]
    for report in reports:
        assert report.problems == []
        assert report.total("sequences") == report.total("good") == COUNT
        totals = [report.total(name) for name in ("tokens", "masked", "random_next")]
        assert totals == [len(rows.tokens), len(rows.masked_labels), rows.next_sentence.sum()]
    assert [report.total("packs") > 0 for report in reports] == [False, True, False, False, False]


def test_exchanged_flipped_missing_and_truncated_shards(tmp_path, source):
    make_bins(source, tmp_path / "bins", edges=(16, 32), num_shards=1)
    shutil.copy(
        tmp_path / "bins" / "bin-001-016" / "shard-00000-of-00001.h5",
        tmp_path / "bins" / "bin-017-032",
    )
    assert only(tmp_path / "bins").problems
    (tmp_path / "bins" / "bin-001-016" / "manifest.json").unlink()
    assert "bin-001-016" in only(tmp_path / "bins").problems[0]
    shards = [source / f"shard-0000{number}-of-00003.h5" for number in range(3)]
    flip(shards[1])
    report = only(source)
    assert len(report.problems) == 1
    assert "shard-00001-of-00003.h5: its checksum differs" in report.problems[0]
    assert (report.total("sequences"), report.total("good")) == (COUNT, 200)
    flip(shards[1])
    shards[0].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-500])
    report = only(source)
    text = "\n".join(report.problems)
    assert all(shards[number].name in text for number in (0, 2)), text
    assert (report.total("sequences"), report.total("good")) == (COUNT, 100)


def test_values_out_of_range_are_counted(tmp_path, rows):
    rows.tokens[rows.offsets[[7, 9]]] = VOCAB_SIZE
    rows.masked_positions[rows.masked_offsets[3]] = 60
    rows.next_sentence[5] = 2
    rows.first_lengths[9] = 99
    rows.masked_positions[rows.masked_offsets[20]] = 0
    rows.masked_labels[rows.masked_offsets[30]] = 60_000
    rows.masked_positions[rows.masked_offsets[1] + 1] = rows.masked_positions[
        rows.masked_offsets[1]
    ]
    report = only(write_set(tmp_path / "bad", rows, shards=1))
    assert report.total("good") == COUNT - 7
    text = "\n".join(report.problems)
    for number, problem in {
        7: "a token outside the vocabulary (and 1 more)",
        3: "a masked position after its end",
        5: "a next-sentence label other than 0 or 1",
        9: "a first segment longer than the whole sequence",
        20: "its first token masked",
        30: "a label outside the vocabulary",
        1: "masked positions that do not ascend",
    }.items():
        assert f"sequence {number} has {problem}" in text


def test_a_shard_twice_a_damaged_record_and_packs_over_their_limit_or_in_disorder(tmp_path, rows):
    report = only(write_set(tmp_path / "twice", Ragged.concatenate([rows, rows]), shards=2))
    assert "shard-00001-of-00002.h5: contains the same samples as" in report.problems[0]
    (path,) = write_parts(tmp_path / "records", rows).iterdir()
    flip(path)
    report = only(tmp_path / "records")
    assert (report.total("sequences"), report.total("good")) == (COUNT, COUNT - 1)
    assert f"{path.name}: record" in report.problems[0]
    for number, packs in enumerate(([0, 2, COUNT], [0, 5, 5, COUNT], [0, 4, COUNT - 1])):
        report = only(write_set(tmp_path / f"bad{number}", rows, shards=1, packs=packs))
        assert report.problems
        assert report.total("good") == (2 if number == 0 else 0)


def test_published_lists_of_files_and_of_rows(tmp_path, rows):
    folder = tmp_path / "nvidia"
    folder.mkdir()
    path = folder / "part_00000_of_00001.hdf5"
    write_variable(path, rows)
    by_bytes = hashlib.md5(path.read_bytes()).hexdigest()
    sums = [
        hashlib.md5(str(row.tolist()).encode()).hexdigest()
        for row in np.split(rows.tokens, rows.offsets[1:-1])
    ]
    by_rows = hashlib.md5(str(sums).encode()).hexdigest()
    for text in (
        f"{by_bytes}  {path.name}\n",
        f"{by_bytes} *./{path.name}\n",
        f"{path.name}\t{by_rows}\n",
    ):
        (tmp_path / "list").write_text(text)
        assert only(folder, md5=Md5List.read(tmp_path / "list")).problems == []
    for text in (
        f"{by_rows}  {path.name}\n",
        f"{path.name}\t{by_bytes}\n",
        f"{by_bytes}  absent.hdf5\n",
    ):
        (tmp_path / "list").write_text(text)
        assert "list" in only(folder, md5=Md5List.read(tmp_path / "list")).problems[0]
    (tmp_path / "list").write_text("hello\n")
    with user_error("data.row", tmp_path / "list"):
        Md5List.read(tmp_path / "list")


def test_an_empty_folder_is_a_mistake_and_a_broken_manifest_is_a_finding(source, tmp_path):
    (tmp_path / "empty").mkdir()
    with user_error("data.missing", tmp_path / "empty"):
        verify([tmp_path / "empty"])
    (source / "manifest.json").write_text("{")
    report = only(source)
    assert report.info is None
    assert "manifest.json: is not JSON" in report.problems[0]
