"""TFRecords read by tf.data: the same sequences as from a store, division among hosts,
and damage reports.
"""

import glob
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from mlbert.data.formats.open import describe, open_store
from mlbert.data.formats.padded import NAMES
from mlbert.data.formats.tfrecord import read_widths, write_examples
from mlbert.data.formats.tfrecord_plain import Widths
from mlbert.data.prepare.tfrecords import TfrecordFolder
from stored_sets import (
    MAX_PREDICTIONS,
    VOCAB_SIZE,
    flip,
    make_rows,
    names,
    random_lengths,
    same_sequences,
)
from tf2_bert.tfrecords import Files, TFRecordEvaluation, TFRecordTraining, match_files
from tfrecord_examples import SIMPLE_ROW, example, frame, odd_examples, simple_lists
from unit.tensorflow2.cases import assert_evaluated_once, batches, context, joined, read_error
from user_errors import user_error

COUNT = 230
LONGEST = 32
WIDTHS = Widths(LONGEST, MAX_PREDICTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 230 sequences in five files of different sizes."""
    folder = tmp_path_factory.mktemp("records")
    rows = make_rows(random_lengths(COUNT))
    for index, chosen in enumerate(np.split(np.arange(COUNT), [20, 75, 120, 160])):
        write_examples(
            folder / f"part-0000{index}-of-00005", rows.take(chosen), LONGEST, MAX_PREDICTIONS
        )
    return folder


def matched(patterns: Any, tokens: int | None = None, predictions: int | None = None) -> Files:
    """Match files, with the given widths, those of the first file, or those of `folder`."""
    paths = map(Path, sorted(glob.glob(str(patterns))))
    first = next((path for path in paths if path.is_file() and path.stat().st_size > 16), None)
    own = read_widths(first, skip_bad=True) if first and tokens is None else WIDTHS
    return match_files(
        str(patterns), "INPUT_FILES", Widths(tokens or own[0], predictions or own[1])
    )


def training(files: Files, rows: int = 8, seed: int = 3, **options: Any) -> TFRecordTraining:
    options = {"seed": seed, "deterministic": True, "vocab_size": VOCAB_SIZE} | options
    return TFRecordTraining(files, rows, **options)


def test_files_have_the_identity_of_the_store(folder: Path) -> None:
    files = matched(folder / "part-*")
    info = describe(folder)
    assert files.identity == info.identity
    assert files.shape == (info.max_seq_length, info.max_predictions, 1)
    parts = f"{folder}/part-0000[34]*, {folder}/part-0000[0-3]*"
    assert matched(parts).identity == info.identity
    assert matched(folder / "part-00000*").identity != info.identity


def test_files_must_match_their_manifest(tmp_path: Path) -> None:
    made = TfrecordFolder(tmp_path, 2, LONGEST, MAX_PREDICTIONS)
    rows = make_rows(random_lengths(20))
    written = [made.write(index, rows.slice(10 * index, 10 * index + 10), "") for index in range(2)]
    made.finish(written, {"sha256": "0" * 64, "size": VOCAB_SIZE}, {})
    file = made.path(1)
    whole = file.read_bytes()
    files = matched(tmp_path / "part-*")
    assert [info.vocabulary_sha256 for info in files.listed] == ["0" * 64]
    assert [one.problem() for one in files.sums] == [None, None]
    file.write_bytes(whole[: len(whole) // 2])
    with user_error("data.incomplete", file):
        matched(tmp_path / "part-*")
    file.write_bytes(whole[::-1])
    assert [
        one.path for one in matched(tmp_path / "part-00001*", *files.widths).sums if one.problem()
    ] == [file]
    file.unlink()
    with user_error("data.incomplete", tmp_path):
        matched(tmp_path / "part-*")


@pytest.mark.parametrize(("hosts", "replicas", "count"), [(1, 3, 50), (2, 4, None)])
def test_evaluation_uses_the_first_samples_once(
    folder: Path, hosts: int, replicas: int, count: int | None
) -> None:
    data = TFRecordEvaluation(matched(folder / "part-*"), 4, count, vocab_size=VOCAB_SIZE)
    data.open()
    assert data.shape.tokens == LONGEST
    assert_evaluated_once(data, hosts, replicas, folder, count or COUNT)


def test_training_uses_all_sequences(folder: Path) -> None:
    """Even if a batch is the entire set, since files are repeated before they are read."""
    data = training(matched(folder / "part-*"), rows=COUNT)
    assert set(names(joined(batches(data.pipeline(context()), 40)))) == set(
        names(open_store(folder).gather(np.arange(COUNT)))
    )
    assert batches(data.pipeline(context()), 1)[0].input_ids.shape == (COUNT, LONGEST)


def test_files_are_divided_among_hosts(folder: Path) -> None:
    data = training(matched(folder / "part-*"))
    parts = [
        set(names(joined(batches(data.pipeline(context(2, 2, host)), 150)))) for host in range(2)
    ]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(names(open_store(folder).gather(np.arange(COUNT))))
    with user_error("data.too-small", folder / "part-*"):
        data.pipeline(context(6, 6, 0))
    with user_error("data.too-small", folder / "part-*"):
        TFRecordEvaluation(matched(folder / "part-*"), 4, COUNT + 1, vocab_size=VOCAB_SIZE).open()


def test_order_is_determined_by_the_seed(folder: Path) -> None:
    def order(first_step: int = 0, **options: Any) -> list[str]:
        data = training(matched(folder / "part-*"), **options)
        return names(joined(batches(data.pipeline(context(), first_step), 10)))

    assert order() == order()
    assert order() != order(seed=4)
    assert order(first_step=3)[:56] == order()[24:], "a resumed run continues"
    assert len(order(deterministic=False)) == 80
    assert training(matched(folder / "part-*")).resume_note is None
    assert training(matched(folder / "part-*"), deterministic=False).resume_note


def test_padding_values_are_ignored(tmp_path: Path) -> None:
    """Slots without a token or prediction are ignored, as in the store."""
    odd = odd_examples()
    (one := tmp_path / "one").mkdir()
    chosen = (
        "weights in other places",
        "padding that is not zero",
        "other order",
        "an unknown feature",
    )
    (one / "part-0").write_bytes(frame(*(odd[name] for name in chosen)))
    data = TFRecordEvaluation(matched(one / "part-0"), 4, None, vocab_size=65_536)
    data.open()
    assert same_sequences(
        joined(batches(data.pipeline(context()))), open_store(one).gather(np.arange(4))
    )


def test_damage_is_reported_with_its_file(folder: Path, tmp_path: Path) -> None:
    for name, code, damage in (
        ("a flipped bit", "data.damaged", lambda path: flip(path, 0.51)),
        ("cut off", "data.damaged", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("no records", "data.format", lambda path: path.write_text("plain text, no records")),
        ("gone", "file.unreadable", lambda path: path.unlink()),
    ):
        files = matched(Path(shutil.copytree(folder, tmp_path / name)) / "part-*")
        bad = tmp_path / name / "part-00002-of-00005"
        damage(bad)
        error = read_error(training(files))
        assert (error.code, error.subject) == (code, str(bad))
        with user_error(
            code, bad, wording=name != "gone"
        ):  # this message includes TensorFlow's text
            TFRecordEvaluation(files, 4, None, vocab_size=VOCAB_SIZE).open()
    kinds = (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError)
    for unrelated in (
        ValueError("x"),
        *(kind(None, None, "shapes do not match") for kind in kinds),
    ):
        assert training(matched(folder / "part-*")).translate_error(unrelated) is None


def test_bad_records_are_errors(folder: Path, tmp_path: Path) -> None:
    lists = simple_lists()
    good = frame(example(lists))
    for name, bad, reason in (
        ("other widths", {**lists, "input_ids": [101, *lists["input_ids"]]}, ""),
        (
            "no feature",
            {key: values for key, values in lists.items() if key != "masked_lm_ids"},
            "",
        ),
        ("position", {**lists, "masked_lm_positions": [1, 8, 0]}, " has masked_lm_positions "),
        ("weight", {**lists, "masked_lm_weights": [1.0, 0.5, 0.0]}, " has masked_lm_weights "),
        ("label", {**lists, "next_sentence_labels": [2]}, " has next_sentence_labels "),
    ):
        (tmp_path / name).write_bytes(good + frame(example(bad)))
        error = read_error(training(matched(tmp_path / name), vocab_size=65_536))
        assert (error.code, error.subject) == ("data.damaged", str(tmp_path / name))
        assert f"record 1 (byte {len(good)}){reason}" in error.problem
    assert read_error(training(matched(folder / "part-*"), vocab_size=100)).code == "data.damaged"


def test_invalid_file_patterns_are_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"short")
    for code, subject, patterns in (
        ("file.missing", "none-*", f"{folder}/part-*, {tmp_path}/none-*"),
        ("file.wrong-kind", folder, folder),
        ("config.missing", "INPUT_FILES", " , "),
        ("data.empty", tmp_path / "empty", tmp_path / "empty"),
        ("file.unreadable", "nowhere://bucket/x", "nowhere://bucket/x"),
    ):
        with user_error(
            code, subject, wording=code != "file.unreadable"
        ):  # this message includes TensorFlow's text
            matched(patterns)


def test_records_are_not_read_before_open(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("plain text, no records")
    for files, code, name in (
        (matched(text, LONGEST, MAX_PREDICTIONS), "data.format", "text"),
        (matched(folder / "part-*", 512, 5), "config.conflict", "part-00000-of-00005"),
    ):
        for data in (training(files), TFRecordEvaluation(files, 4, None, vocab_size=VOCAB_SIZE)):
            with user_error(code, name):
                data.open()


def test_protocol_buffers_read_odd_encodings_as_we_do() -> None:
    for name, content in odd_examples().items():
        found = tf.train.Example.FromString(content).features.feature
        lists = {
            key: np.array(found[key].int64_list.value or found[key].float_list.value)
            for key in NAMES
        }
        length = lists["input_mask"].sum()
        chosen = lists["masked_lm_weights"] > 0
        masked = (lists[key][chosen].tolist() for key in ("masked_lm_positions", "masked_lm_ids"))
        assert (lists["input_ids"][:length].tolist(), *masked) == (
            SIMPLE_ROW[0],
            *SIMPLE_ROW[3:],
        ), name
