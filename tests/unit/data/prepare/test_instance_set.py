"""Sets of instances: both formats, resumed, with bad parts, with nothing half-made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from file_limits import largest_file
from mlbert.data.formats.manifest import SetDescription, read_manifest
from mlbert.data.formats.open import describe
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.tfrecord import read_widths
from mlbert.data.prepare import instance_set
from mlbert.data.prepare.instance_set import InstanceJob, SetFormat, prepare_instances, set_digests
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.jobs import Executor
from mlbert.data.prepare.shuffle import shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from mlbert.host import native
from stored_sets import tree
from user_errors import user_error

OPTIONS = InstanceOptions(max_seq_length=32, max_predictions_per_seq=5, dupe_factor=3)
FORMATS = list(SetFormat)


@pytest.fixture(scope="module")
def parts(assets, tmp_path_factory) -> tuple[Path, ...]:
    """Three different parts of two documents each."""
    folder = tmp_path_factory.mktemp("text")
    sentences = [line for line in (assets / "text.txt").read_text().splitlines() if line]
    paths = tuple(folder / f"part-{index:05d}-of-00003" for index in range(3))
    for index, path in enumerate(paths):
        mine = sentences[index::3]
        path.write_text("\n".join([*mine[:8], "", *mine[8:]]) + "\n")
    return paths


@pytest.fixture
def job(parts, assets, tmp_path) -> InstanceJob:
    return InstanceJob(parts, assets / "vocab.txt", tmp_path / "set", OPTIONS)


def sha256s(folder: Path) -> list[tuple[int, str]]:
    return [(count, sha256) for _, count, sha256 in set_digests(folder)]


def counts(made: SetDescription) -> tuple[object, ...]:
    return made.num_sequences, made.num_tokens, made.vocab_size, made.provenance["skipped"]


@pytest.fixture
def bad(tmp_path) -> Path:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"fine\n\xff\n")
    return path


@pytest.mark.parametrize("set_format", FORMATS)
def test_workers_do_not_matter_and_a_second_run_does_nothing(job, tmp_path, said, set_format):
    job = replace(job, set_format=set_format)
    made = prepare_instances(job)
    other = replace(job, out=tmp_path / "other")
    assert counts(prepare_instances(other, executor=Executor(workers=2))) == counts(made)
    assert tree(other.out) == tree(job.out)
    assert sum(count for count, _ in sha256s(job.out)) == made.num_sequences
    before = {path: path.stat().st_mtime_ns for path in job.out.iterdir()}
    assert counts(prepare_instances(job, executor=Executor(progress=said))) == counts(made)
    assert "nothing to do" in said.lines[0]
    assert {path: path.stat().st_mtime_ns for path in job.out.iterdir()} == before


def test_both_formats_hold_the_same(job, tmp_path):
    tfrecords = replace(job, out=tmp_path / "tfrecords", set_format=SetFormat.tfrecord)
    made = prepare_instances(job)
    assert counts(prepare_instances(tfrecords)) == counts(made)
    assert sha256s(tfrecords.out) == sha256s(job.out)
    names = [f"part-{index:05d}-of-00003.tfrecord" for index in range(3)]
    assert sorted(tree(tfrecords.out)) == ["checksums.xxh3", "instances.json", *names]
    assert set_digests(tfrecords.out / names[1]) == set_digests(tfrecords.out)[1:2]
    assert set_digests(job.out / "shard-00001-of-00003.h5") == set_digests(job.out)[1:2]
    assert read_widths(tfrecords.out / names[0]) == (32, 5)
    assert json.loads((tfrecords.out / "instances.json").read_text())["num_tokens"] == made.num_tokens


@pytest.mark.parametrize("set_format", FORMATS)
def test_a_finished_set_is_not_overwritten(job, parts, bad, set_format):
    job = replace(job, set_format=set_format)
    prepare_instances(job)
    before = tree(job.out)
    changes = [
        {"options": replace(OPTIONS, random_seed=1)},
        {"lower_case": False},
        {"parts": parts[:2]},
        {"parts": (parts[1], parts[0], parts[2])},
        {"set_format": FORMATS[1 - FORMATS.index(set_format)]},
    ]
    for change in changes:
        with user_error("prepare.other-options", "set"):
            prepare_instances(replace(job, **change))
    assert tree(job.out) == before


@pytest.mark.parametrize("set_format", FORMATS)
def test_finished_parts_of_an_interrupted_run_are_kept(job, tmp_path, monkeypatch, said, set_format):
    job = replace(job, set_format=set_format)
    straight = replace(job, out=tmp_path / "straight")
    prepare_instances(straight)
    calls = []

    def interrupted(self, index):
        calls.append(index)
        if index == 2:
            raise KeyboardInterrupt
        return make_part(self, index)

    make_part = instance_set._Work.make_part
    with monkeypatch.context() as patch:
        patch.setattr(instance_set._Work, "make_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_instances(job)
    assert calls == [0, 1, 2]
    prepare_instances(job, executor=Executor(progress=said))
    assert "2 of 3 parts kept from an earlier run" in said.lines
    assert tree(job.out) == tree(straight.out)


@pytest.mark.parametrize("set_format", FORMATS)
def test_other_options_after_an_interruption(job, tmp_path, monkeypatch, set_format):
    job = replace(job, set_format=set_format)
    other = replace(job, options=replace(OPTIONS, random_seed=5), parts=job.parts[:2])
    with monkeypatch.context() as patch:
        patch.setattr(instance_set, "_report", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        for unfinished in (other, replace(other, parts=job.parts)):
            with pytest.raises(KeyboardInterrupt):
                prepare_instances(unfinished)
    prepare_instances(job)
    prepare_instances(replace(job, out=tmp_path / "straight"))
    assert tree(job.out) == tree(tmp_path / "straight")


@pytest.mark.parametrize("set_format", FORMATS)
def test_a_full_disk_leaves_nothing_that_looks_finished(job, tmp_path, set_format):
    job = replace(job, set_format=set_format, options=replace(OPTIONS, dupe_factor=40))
    with user_error("file.unwritable"), largest_file(20_000):
        prepare_instances(job)
    assert list(tree(job.out)) == [".tasks/plan.json"]
    prepare_instances(job)
    prepare_instances(replace(job, out=tmp_path / "straight"))
    assert tree(job.out) == tree(tmp_path / "straight")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("set_format", FORMATS)
def test_a_bad_part_ends_the_step(job, bad, workers, set_format):
    job = replace(job, parts=(job.parts[0], bad), set_format=set_format)
    with user_error("data.encoding", bad):
        prepare_instances(job, executor=Executor(workers=workers))
    assert not {"manifest.json", "instances.json"} & set(tree(job.out))


@pytest.mark.parametrize("set_format", FORMATS)
def test_bad_parts_are_left_out_on_request(job, bad, tmp_path, said, set_format):
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n\n")
    listed = (job.parts[0], bad, job.parts[1], blank, tmp_path / "absent", job.parts[0])
    job = replace(job, parts=listed, set_format=set_format, skip_bad=True)
    made = prepare_instances(job, executor=Executor(progress=said))
    good = replace(job, parts=job.parts[0:3:2], out=tmp_path / "good")
    expected = prepare_instances(good)
    assert (made.num_sequences, made.num_tokens) == (expected.num_sequences, expected.num_tokens)
    assert [row for row in sha256s(job.out) if row[0]] == sha256s(good.out)
    skipped = made.provenance["skipped"]
    assert [left["part"] for left in skipped] == ["bad.txt", "blank.txt", "absent", job.parts[0].name]
    assert skipped[0]["reason"] == "line 2 is not UTF-8 (byte 1 of the line)"
    assert said.lines[0] == "4 of 6 parts skipped:"
    assert "same content" in said.lines[4]
    assert counts(prepare_instances(job)) == counts(made)
    if set_format == SetFormat.hdf5:
        assert read_manifest(job.out).provenance["skipped"] == skipped
        assert len(ShardSet.open(job.out, verify=True)) == made.num_sequences
        with user_error("data.damaged", "--input"):
            prepare_instances(replace(job, parts=(bad,), out=tmp_path / "none"))


def test_a_part_that_became_bad_leaves_nothing_old(job, tmp_path):
    job = replace(job, set_format=SetFormat.tfrecord, skip_bad=True)
    prepare_instances(job)
    (job.out / "instances.json").unlink()
    prepare_instances(replace(job, parts=(job.parts[0], tmp_path / "absent", job.parts[2])))
    assert sorted(tree(job.out)) == [
        "checksums.xxh3",
        "instances.json",
        *(f"part-0000{index}-of-00003.tfrecord" for index in (0, 2)),
    ]


def test_one_document_is_accepted_with_a_warning(job, tmp_path, said):
    part = tmp_path / "one.txt"
    part.write_text("The lamp was lit.\nThe cat slept.\n")
    made = prepare_instances(replace(job, parts=(part, job.parts[0])), executor=Executor(progress=said))
    assert made.num_sequences
    assert said.lines == [f"warning: {part} is one document (no blank line): random second sentences come from it too"]


def test_output_that_cannot_be_made(job, tmp_path):
    (tmp_path / "file").write_text("")
    for set_format in FORMATS:
        with user_error("file.unwritable", tmp_path / "file/set"):
            prepare_instances(replace(job, out=tmp_path / "file" / "set", set_format=set_format))


def test_without_a_compiler_the_result_is_the_same_and_it_is_reported(job, tmp_path, said, monkeypatch):
    prepare_instances(replace(job, out=tmp_path / "native"))

    def unavailable(*_: object, **__: object) -> None:
        raise native.NativeUnavailable("no C compiler")

    monkeypatch.setattr(native, "load", unavailable)
    instance_set._generator.cache_clear()
    try:
        prepare_instances(job, executor=Executor(progress=said))
    finally:
        instance_set._generator.cache_clear()
    assert said.lines[0].startswith("the compiled generator cannot run (")
    assert tree(job.out) == tree(tmp_path / "native")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"not json"])
def test_a_damaged_mark(job, content):
    job.out.mkdir()
    (job.out / "instances.json").write_bytes(content)
    with user_error("file.json", "instances.json"):
        prepare_instances(job)


@pytest.mark.parametrize("set_format", FORMATS)
def test_the_set_and_those_made_of_it_record_the_case(job, tmp_path, set_format):
    """The folder of the vocabulary, which may be an input, stays as it was: nothing is written outside the output."""
    data = tmp_path / "data"
    data.mkdir()
    vocabulary = data / "vocab.txt"
    vocabulary.write_bytes(job.vocab_file.read_bytes())
    job = replace(job, vocab_file=vocabulary, lower_case=False, out=data / "train", set_format=set_format)
    prepare_instances(job)
    assert sorted(path.name for path in data.iterdir()) == ["train", "vocab.txt"]
    sets = [job.out]
    if set_format == SetFormat.tfrecord:
        sets.append(data / "shards")
        tfrecords_to_hdf5([job.out], vocabulary, sets[-1])
    else:
        sets.append(data / "records")
        hdf5_to_tfrecords(job.out, sets[-1])
    for name, prepare in (("shuffled", shuffle_set), ("bins", make_bins)):
        prepare(job.out, data / name)
        sets.append(data / name)
    assert {path.name: describe(path).lower_case for path in sets} == dict.fromkeys((path.name for path in sets), False)
    prepare_instances(replace(job, lower_case=True, out=data / "uncased"))
    assert describe(data / "uncased").lower_case is True


@pytest.mark.parametrize("lower_case", [True, False])
def test_the_configuration_next_to_the_vocabulary_must_agree(job, tmp_path, lower_case):
    folder = tmp_path / "data"
    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_bytes(job.vocab_file.read_bytes())
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"do_lower_case": not lower_case}))
    with user_error("config.conflict", config):
        prepare_instances(replace(job, vocab_file=vocabulary, lower_case=lower_case))


@pytest.mark.parametrize(
    ("provenance", "expected"),
    [
        ({}, None),
        ({"options": {"lower_case": True}, "input": {"options": {"lower_case": False}}}, True),
        ({"options": {}, "input": {"options": [], "input": {"lower_case": False}}}, False),
        ({"options": {"lower_case": "yes"}, "input": [1]}, None),
    ],
)
def test_the_case_is_that_of_the_nearest_step_that_records_one(job, provenance, expected):
    prepare_instances(job)
    assert read_manifest(job.out).model_copy(update={"provenance": provenance}).lower_case is expected
