"""Sets of instances: both formats, resumed, with bad parts, with nothing half-made."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from file_limits import largest_file
from mlbert.data.formats.manifest import SetDescription, read_manifest
from mlbert.data.formats.open import describe
from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import read_widths
from mlbert.data.formats.wordpiece import WordPieceTokenizer, load_vocabulary
from mlbert.data.prepare import instance_set
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.instance_set import InstanceJob, SetFormat, prepare_instances, set_digests
from mlbert.data.prepare.instances import InstanceOptions, create_instances, digest, read_documents
from mlbert.data.prepare.shuffle import shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from mlbert.host import native
from programs import write_files
from stored_sets import tree
from user_errors import user_error

OPTIONS = InstanceOptions(max_seq_length=32, max_predictions_per_seq=5, dupe_factor=3)
FORMATS = list(SetFormat)
GOLDEN = json.loads(
    (Path(__file__).resolve().parents[3] / "assets" / "instances" / "digests.json").read_text()
)
PUBLISHED = {
    0: (6804, "37b4c76d10e6ea4e706078ed34ccaf15deb3836b35224619862927d0ee29eee0"),
    1: (6881, "d1bd463a972686eaf9f20e00d2beae8edaf4968d0955c97635f37d30fe769be6"),
}


@pytest.fixture(scope="module")
def parts(assets, tmp_path_factory) -> tuple[Path, ...]:
    """Write three different parts of two documents each."""
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


@pytest.fixture(params=FORMATS)
def any_job(job, request) -> InstanceJob:
    return replace(job, set_format=request.param)


def straight(job: InstanceJob) -> dict[str, str]:
    """Run a job elsewhere, without interruption; return its files."""
    prepare_instances(replace(job, out=job.out.with_name("straight")))
    return tree(job.out.with_name("straight"))


def sha256s(folder: Path) -> list[tuple[int, str]]:
    return [(count, sha256) for _, count, sha256 in set_digests(folder)]


def counts(made: SetDescription) -> tuple[object, ...]:
    return made.num_sequences, made.num_tokens, made.vocab_size, made.provenance["skipped"]


def test_workers_do_not_matter_and_a_second_run_does_nothing(any_job, said):
    made = prepare_instances(any_job, executor=Executor(workers=2))
    assert tree(any_job.out) == straight(any_job)
    assert sum(count for count, _ in sha256s(any_job.out)) == made.num_sequences
    before = {path: path.stat().st_mtime_ns for path in any_job.out.iterdir()}
    assert counts(prepare_instances(any_job, executor=Executor(progress=said))) == counts(made)
    assert "nothing to do" in said.lines[0]
    assert {path: path.stat().st_mtime_ns for path in any_job.out.iterdir()} == before


def test_both_formats_hold_the_same(job, tmp_path):
    tfrecords = replace(job, out=tmp_path / "tfrecords", set_format=SetFormat.tfrecord)
    made = prepare_instances(job)
    assert counts(prepare_instances(tfrecords)) == counts(made)
    assert sha256s(tfrecords.out) == sha256s(job.out)
    names = [f"part-{index:05d}-of-00003.tfrecord" for index in range(3)]
    assert sorted(tree(tfrecords.out)) == ["checksums.xxh3", "instances.json", *names]
    assert read_widths(tfrecords.out / names[0]) == (32, 5)
    assert (
        json.loads((tfrecords.out / "instances.json").read_text())["num_tokens"] == made.num_tokens
    )


def test_a_finished_set_is_not_overwritten(any_job, parts):
    prepare_instances(any_job)
    before = tree(any_job.out)
    changes = [{"options": replace(OPTIONS, random_seed=1)}, {"lower_case": False}]
    changes += [{"parts": parts[:2]}, {"parts": (parts[1], parts[0], parts[2])}]
    changes += [{"set_format": FORMATS[1 - FORMATS.index(any_job.set_format)]}]
    for change in changes:
        with user_error("prepare.other-options", "set"):
            prepare_instances(replace(any_job, **change))
    assert tree(any_job.out) == before


def test_finished_parts_of_an_interrupted_run_are_kept(any_job, said):
    ends = [mock.DEFAULT, mock.DEFAULT, KeyboardInterrupt]
    interrupted = mock.Mock(wraps=instance_set._Work.make_part, side_effect=ends)
    patch = mock.patch.object(
        instance_set._Work, "make_part", lambda work, index: interrupted(work, index)
    )
    with patch, pytest.raises(KeyboardInterrupt):
        prepare_instances(any_job)
    prepare_instances(any_job, executor=Executor(progress=said))
    assert "2 of 3 parts kept from an earlier run" in said.lines
    assert tree(any_job.out) == straight(any_job)


def test_other_options_after_an_interruption(any_job):
    other = replace(any_job, options=replace(OPTIONS, random_seed=5), parts=any_job.parts[:2])
    with mock.patch.object(instance_set, "_report", side_effect=KeyboardInterrupt):
        for unfinished in (other, replace(other, parts=any_job.parts)):
            with pytest.raises(KeyboardInterrupt):
                prepare_instances(unfinished)
    prepare_instances(any_job)
    assert tree(any_job.out) == straight(any_job)


def test_an_output_that_cannot_be_made_or_a_full_disk_leaves_nothing_that_looks_finished(
    any_job, tmp_path
):
    (tmp_path / "file").write_text("")
    with user_error("file.unwritable", tmp_path / "file/set"):
        prepare_instances(replace(any_job, out=tmp_path / "file/set"))
    job = replace(any_job, options=replace(OPTIONS, dupe_factor=40))
    with user_error("file.unwritable"), largest_file(20_000):
        prepare_instances(job)
    assert list(tree(job.out)) == [".tasks/plan.json"]
    prepare_instances(job)
    assert tree(job.out) == straight(job)


def test_bad_parts_are_left_out_on_request(any_job, tmp_path, said):
    bad = tmp_path / "bad.txt"
    blank = tmp_path / "blank.txt"
    bad.write_bytes(b"fine\n\xff\n")
    blank.write_text(" \n\n")
    first, second, _ = any_job.parts
    job = replace(
        any_job, parts=(first, bad, second, blank, tmp_path / "absent", first), skip_bad=True
    )
    with user_error("data.encoding", bad):
        prepare_instances(replace(job, parts=(first, bad), skip_bad=False))
    assert not {"manifest.json", "instances.json"} & set(tree(job.out))
    made = prepare_instances(job, executor=Executor(progress=said))
    good = replace(job, parts=(first, second), out=tmp_path / "good")
    expected = prepare_instances(good)
    assert (made.num_sequences, made.num_tokens) == (expected.num_sequences, expected.num_tokens)
    assert [row for row in sha256s(job.out) if row[0]] == sha256s(good.out)
    skipped = made.provenance["skipped"]
    assert [left["part"] for left in skipped] == ["bad.txt", "blank.txt", "absent", first.name]
    assert skipped[0]["reason"] == "line 2 is not UTF-8 (byte 1 of the line)"
    assert said.lines[-5] == "4 of 6 parts skipped:"
    assert "same content" in said.lines[-1]
    assert counts(prepare_instances(job)) == counts(made)
    if job.set_format == SetFormat.hdf5:
        assert read_manifest(job.out).provenance["skipped"] == skipped
        assert len(ShardSet.open(job.out, verify=True)) == made.num_sequences
        with user_error("data.damaged", "--input"):
            prepare_instances(replace(job, parts=(bad,), out=tmp_path / "none"))


def test_a_part_that_became_bad_leaves_nothing_old(job, tmp_path):
    job = replace(job, set_format=SetFormat.tfrecord, skip_bad=True)
    prepare_instances(job)
    (job.out / "instances.json").unlink()
    prepare_instances(replace(job, parts=(job.parts[0], tmp_path / "absent", job.parts[2])))
    parts = [f"part-0000{index}-of-00003.tfrecord" for index in (0, 2)]
    assert sorted(tree(job.out)) == ["checksums.xxh3", "instances.json", *parts]


def test_one_document_is_accepted_with_a_warning(job, tmp_path, said):
    part = tmp_path / "one.txt"
    part.write_text("The lamp was lit.\nThe cat slept.\n")
    prepare_instances(replace(job, parts=(part, job.parts[0])), executor=Executor(1, said))
    assert said.lines == [
        f"warning: {part} is one document (no blank line): random second sentences come from it too"
    ]


def test_without_a_compiler_the_result_is_the_same_and_it_is_reported(job, said, monkeypatch):
    expected = straight(job)
    # Without its cache.
    monkeypatch.setattr(instance_set, "_generator", instance_set._generator.__wrapped__)
    with mock.patch.object(native, "load", side_effect=native.NativeUnavailable("no C compiler")):
        prepare_instances(job, executor=Executor(progress=said))
    assert said.lines[0].startswith("the compiled generator cannot run (")
    assert tree(job.out) == expected


def test_a_damaged_mark(job):
    for content in ("", "{}", "[1]", "not json"):
        write_files(job.out, {"instances.json": content})
        with user_error("file.json", "instances.json"):
            prepare_instances(job)


@pytest.fixture
def vocabulary(job, tmp_path) -> Path:
    """Return a copy of the vocabulary in a separate folder."""
    (tmp_path / "data").mkdir()
    return Path(shutil.copy(job.vocab_file, tmp_path / "data"))


def test_the_set_and_those_made_of_it_record_the_case(any_job, vocabulary):
    """The folder of the vocabulary, which may be an input, stays as it was:
    nothing is written outside the output.
    """
    data = vocabulary.parent
    job = replace(any_job, vocab_file=vocabulary, lower_case=False, out=data / "train")
    prepare_instances(job)
    assert sorted(path.name for path in data.iterdir()) == ["train", "vocab.txt"]
    if job.set_format == SetFormat.tfrecord:
        tfrecords_to_hdf5([job.out], vocabulary, data / "converted")
    else:
        hdf5_to_tfrecords(job.out, data / "converted")
    shuffle_set(job.out, data / "shuffled")
    make_bins(job.out, data / "bins")
    names = ("train", "converted", "shuffled", "bins")
    assert {name: describe(data / name).lower_case for name in names} == dict.fromkeys(names, False)
    prepare_instances(replace(job, lower_case=True, out=data / "uncased"))
    assert describe(data / "uncased").lower_case is True


def test_the_configuration_next_to_the_vocabulary_must_agree(job, vocabulary):
    config = vocabulary.with_name("tokenizer_config.json")
    for lower_case in (True, False):
        config.write_text(json.dumps({"do_lower_case": not lower_case}))
        with user_error("config.conflict", config):
            prepare_instances(replace(job, vocab_file=vocabulary, lower_case=lower_case))


def test_the_case_is_that_of_the_nearest_step_that_records_one(source):
    for provenance, expected in (
        ({}, None),
        ({"options": {"lower_case": True}, "input": {"options": {"lower_case": False}}}, True),
        ({"options": {}, "input": {"options": [], "input": {"lower_case": False}}}, False),
        ({"options": {"lower_case": "yes"}, "input": [1]}, None),
    ):
        assert (
            read_manifest(source).model_copy(update={"provenance": provenance}).lower_case
            is expected
        )


def make(text: Path, vocab: Path, options: InstanceOptions) -> Ragged:
    tokenizer = WordPieceTokenizer(load_vocabulary(vocab))
    return Ragged.from_rows(create_instances(read_documents(text, tokenizer), tokenizer, options))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: str(golden["options"]))
def test_digests_of_our_own_text(assets, golden):
    options = InstanceOptions(**golden["options"])
    rows = make(assets / "text.txt", assets / "vocab.txt", options)
    assert len(rows) == golden["instances"]
    assert digest(rows, options.max_seq_length, options.max_predictions_per_seq) == golden["sha256"]


@pytest.mark.parametrize("part", [0, 1])
def test_published_generators_digests(shared_data, part):
    text = shared_data / "text" / f"part-{part:05d}-of-00002"
    rows = make(text, shared_data / "vocab.txt", InstanceOptions())
    assert (len(rows), digest(rows, 512, 76)) == PUBLISHED[part]
    with np.load(shared_data / "reference" / f"part-{part:05d}.npz") as reference:
        for name in NAMES:
            ours = padded(rows, name, Widths(512, 76))[: len(reference[name])]
            assert np.array_equal(ours, reference[name].reshape(ours.shape)), name


def test_blank_lines_and_carriage_returns(tmp_path, assets):
    """Blank means blank after stripping; carriage returns are dropped as TensorFlow drops them."""
    tokenizer = WordPieceTokenizer(load_vocabulary(assets / "vocab.txt"))
    text = tmp_path / "part"
    text.write_bytes("one\r\ntwo\n\u00a0\u2003\nthree\rfour\n\n\nfive".encode())
    assert [len(document) for document in read_documents(text, tokenizer)] == [2, 1, 1]
    text.write_bytes(b"the la\rmp\r\r\n\r\r\ncaf\xc3\r\xa9\n")
    assert read_documents(text, tokenizer) == [
        [tokenizer.encode("the lamp")],
        [tokenizer.encode("caf\u00e9")],
    ]


def test_options_out_of_range():
    for name, value in (
        ("max_seq_length", 4),
        ("max_seq_length", 70_000),
        ("max_predictions_per_seq", 0),
        ("dupe_factor", 0),
        ("masked_lm_prob", 0.0),
        ("short_seq_prob", 1.5),
    ):
        options = {name: value}
        with user_error("config.range", name):
            InstanceOptions(**options)
