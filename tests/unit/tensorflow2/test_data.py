"""Data: PyTorch's steps for any number of replicas, each evaluation sample once,
and rows that hold every sequence.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from host_batches import tokens_of
from mlbert.config.configuration import Configuration
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.formats.open import open_store
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.packing import pack_lengths
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import write_examples
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.pretraining import EvalSet
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from mlbert.training.config import EvaluationConfig
from random_set import random_rows
from stored_sets import (
    MAX_PREDICTIONS,
    VOCAB_SIZE,
    flip,
    make_rows,
    names,
    random_lengths,
    same_sequences,
    write_set,
)
from tf2_bert.data import EVALUATED_ON_TRAINING, Data, evaluation_data, training_data
from tf2_bert.recipe import inspect
from tf2_bert.store_rows import RowShape, row_shape, rows_of, zero_rows
from training_settings import SHAPE
from unit.tensorflow2.cases import (
    assert_evaluated_once,
    batches,
    context,
    joined,
    read_error,
    sequences_of,
)
from unit.tensorflow2.strategies_program import settings as plain_settings
from user_errors import user_error

COUNT = 300
BATCH = 8
SEED = 3
PACKINGS = [1, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set") / "set", make_rows(random_lengths(COUNT)))


def settings(tmp_path: Path, folder: Path, **changes: Any) -> Configuration:
    """Return the settings of a run on a set, with 8 rows per replica and step."""
    shape = tmp_path / "bert_config.json"
    shape.write_text(json.dumps({**SHAPE, "vocab_size": VOCAB_SIZE}))
    values = {
        "bert_config_file": shape,
        "output_dir": tmp_path,
        "input_dir": folder,
        "eval_dir": folder,
    }
    values |= {"eval_batch_size": 4, "num_eval_examples": 50, "average_packing_rate": 1.0}
    return plain_settings(**values | changes)


def opened_training(config: Configuration, seed: int = SEED) -> Any:
    data = training_data(config[DataConfig], config[TensorFlowConfig], inspect(config), seed)
    data.open()
    return data


def opened_evaluation(config: Configuration) -> Any:
    data = evaluation_data(config[DataConfig], config[EvaluationConfig], inspect(config))
    data.open()
    return data


def tokens(ragged: Ragged) -> list[bytes]:
    return [ragged.slice(s, s + 1).tokens.astype(np.uint16).tobytes() for s in range(len(ragged))]


@pytest.mark.parametrize(
    ("hosts", "replicas", "first"), [(1, 1, 0), (1, 2, 4), (2, 4, 0), (4, 4, 2)]
)
@pytest.mark.parametrize(
    "options", [{}, {"max_sequences_per_pack": 3}, {"bin_counts": "none"}, {"bin_counts": "5 3"}]
)
def test_steps_match_pytorch(tmp_path, folder, hosts, replicas, first, options) -> None:
    """Compare each replica's rows with PyTorch's, sequence by sequence,
    across the end of an epoch.
    """
    if "bin_counts" in options:
        make_bins(folder, tmp_path / "bins", edges=(16, 32))
        folder = tmp_path / "bins"
    config = settings(tmp_path, folder, **options)
    data = opened_training(config)
    section = config[DataConfig]
    local = replicas // hosts
    assert data.resume_note is None
    options = {
        "max_sequences_per_pack": section.max_sequences_per_pack,
        "bin_counts": section.counts_of_bins,
    }
    ranks = [
        {"rank": rank, "world_size": replicas, "seed": SEED, "partition": contiguous}
        for rank in range(replicas)
    ]
    sources = [
        PackedSource(section.input_dir, packs_per_step=BATCH, **rank, **options) for rank in ranks
    ]
    for source in sources:
        source.open()
    steps = range(first, sources[0].steps_per_epoch + 2)
    pipelines = [data.pipeline(context(replicas, hosts, host), first) for host in range(hosts)]
    found = [iter(batches(pipeline, len(steps) * local)) for pipeline in pipelines]
    for step in steps:
        for rank, source in enumerate(sources):
            (batch,) = source.batches_of(step)
            assert tokens(sequences_of(next(found[rank // local]))) == tokens_of(batch)


@pytest.mark.parametrize("most", PACKINGS)
@pytest.mark.parametrize(("hosts", "replicas"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_evaluation_uses_every_sample_once(
    tmp_path: Path, folder: Path, most: int, hosts: int, replicas: int
) -> None:
    data = opened_evaluation(settings(tmp_path, folder, max_sequences_per_pack=most))
    found = assert_evaluated_once(data, hosts, replicas, folder, 50)
    expected = EvalSet(folder, 50, 4, max_sequences_per_pack=most)
    expected.open()
    assert sorted(tokens(found)) == sorted(
        piece for batch in expected for piece in tokens_of(batch)
    )


def test_evaluation_uses_at_most_all_samples(tmp_path: Path, folder: Path) -> None:
    assert (
        opened_evaluation(settings(tmp_path, folder, num_eval_examples="none")).num_examples
        == COUNT
    )
    with user_error("data.too-small", folder):
        opened_evaluation(settings(tmp_path, folder, num_eval_examples=COUNT + 1))


def test_stored_packs_are_used_unchanged(tmp_path: Path, folder: Path) -> None:
    packs = tmp_path / "packed"
    shuffle_set(folder, packs, seed=1, packing=Packing(40, 3))
    data = opened_training(settings(tmp_path, packs, max_sequences_per_pack=3))
    assert data.shape.tokens == 40
    whole = opened_training(settings(tmp_path, packs, max_sequences_per_pack=3, train_batch_size=1))
    count = open_store(packs).num_packs
    assert same_sequences(
        joined(batches(whole.pipeline(context()), count)), make_rows(random_lengths(COUNT))
    )
    small = opened_training(settings(tmp_path, packs, max_sequences_per_pack=2))
    error = read_error(small)
    assert (error.code, error.subject) == ("data.too-long", "MAX_SEQUENCES_PER_PACK")


def test_synthetic_data(tmp_path: Path) -> None:
    for most in PACKINGS:
        config = settings(
            tmp_path, tmp_path / "none", synthetic_data="1", max_sequences_per_pack=most
        )
        inputs = inspect(config)
        assert inputs.train_data == inputs.eval_data == "synthetic"
        (batch,) = batches(opened_training(config).pipeline(context()), 1)
        assert batch.next_sentence_weights.sum() == BATCH * most
        assert batch.input_ids.max() < VOCAB_SIZE
        evaluation = opened_evaluation(config)
        total = sum(
            part.next_sentence_weights.sum() for part in batches(evaluation.pipeline(context()))
        )
        assert total == evaluation.num_examples == 50


def test_inspection_reports_mismatches(tmp_path: Path, folder: Path) -> None:
    def rejects(code: str, subject: str | Path, **changes: Any) -> None:
        with user_error(code, subject):
            inspect(settings(tmp_path, changes.pop("folder", folder), **changes))

    rejects("config.conflict", "MAX_SEQ_LENGTH", max_seq_length=64)
    rejects("config.conflict", "MAX_PREDICTIONS_PER_SEQ", max_predictions_per_seq=4)
    rejects("file.missing", tmp_path / "nothing", folder=tmp_path / "nothing")
    other = write_set(tmp_path / "other", make_rows(random_lengths(50)), vocabulary="b" * 64)
    rejects("vocabulary.mismatch", other, eval_dir=other)
    long = write_set(tmp_path / "long", make_rows(random_lengths(50, 70)), longest=70)
    rejects("data.model-mismatch", long, folder=long)
    (tmp_path / "small.json").write_text(json.dumps(SHAPE))
    rejects("data.model-mismatch", folder, bert_config_file=tmp_path / "small.json")
    assert inspect(settings(tmp_path, folder, max_seq_length=32)).train_data.startswith("sha256:")


def test_rows_are_wide_enough_and_a_set_smaller_than_a_step_is_an_error(
    tmp_path: Path, folder: Path
) -> None:
    data = opened_training(
        settings(tmp_path, folder, max_predictions_per_seq=9, train_batch_size=200)
    )
    assert data.shape == (32, 9, 1)
    with user_error("data.too-small", folder):
        data.pipeline(context(2))


def test_failed_reader_is_reported_as_a_user_error(tmp_path: Path) -> None:
    """The vocabulary of TFRecords, and damage after opening, can only be checked on reading."""
    (records := tmp_path / "records").mkdir()
    write_examples(records / "part-0", make_rows(random_lengths(40)), 32, MAX_PREDICTIONS)
    (tmp_path / "small.json").write_text(json.dumps(SHAPE))
    data = opened_training(settings(tmp_path, records, bert_config_file=tmp_path / "small.json"))
    error = read_error(data)
    assert (data.failure, error.code) == (error, "data.model-mismatch")
    assert data.translate_error(ValueError()) is None

    data = opened_training(settings(tmp_path, records))
    flip(records / "part-0")
    error = read_error(data)
    assert (error.code, error.subject) == ("data.damaged", str(records / "part-0"))


def test_training_files_are_the_default_evaluation_set(tmp_path: Path, folder: Path) -> None:
    write_examples(tmp_path / "part-0", make_rows(random_lengths(60)), 32, MAX_PREDICTIONS)
    config = settings(tmp_path, folder, input_files=tmp_path / "part-*")
    inputs = inspect(config)
    assert inputs.notes == (EVALUATED_ON_TRAINING,)
    assert inputs.train_data == inputs.eval_data
    write_examples(tmp_path / "eval", make_rows(random_lengths(50), 1), 32, MAX_PREDICTIONS)
    files = {"input_files": tmp_path / "part-*"}
    inputs = inspect(settings(tmp_path, folder, **files, eval_files=tmp_path / "eval"))
    assert not inputs.notes
    assert inputs.train_data != inputs.eval_data
    with user_error("config.conflict", "MAX_SEQUENCES_PER_PACK"):
        inspect(settings(tmp_path, folder, **files, max_sequences_per_pack=3))


def test_data_of_a_run(tmp_path: Path, folder: Path) -> None:
    """Nothing is read before `open`, steps are consecutive, and evaluations repeat."""

    def data_of(config: Configuration) -> Data:
        return Data(
            config[DataConfig],
            config[EvaluationConfig],
            config[TensorFlowConfig],
            inspect(config),
            tf.distribute.get_strategy(),
            SEED,
        )

    config = settings(tmp_path, folder, max_sequences_per_pack=3)
    data = data_of(config)
    assert data.batches is None
    warm_up = data.warm_up_rows()
    data.open(5)
    rows = next(data.batches)
    assert [array.shape for array in warm_up] == [tensor.shape for tensor in rows]
    (expected,) = batches(opened_training(config).pipeline(context(), 5), 1)
    assert names(sequences_of(rows)) == names(sequences_of(expected))
    first, second = ([names(sequences_of(batch)) for batch in data.evaluation()] for _ in range(2))
    assert first == second
    assert sum(map(len, first)) == data.num_eval_samples == 50
    assert data.translate_error(tf.errors.UnknownError(None, None, "another")) is None
    data.close()
    assert data_of(settings(tmp_path, folder, do_eval="0")).num_eval_samples == 0


def test_distributed_datasets_are_endless_with_static_shapes(tmp_path: Path, folder: Path) -> None:
    """Otherwise, workers ask each other at every step whether there is more data."""
    config = settings(tmp_path, folder)
    strategy = tf.distribute.get_strategy()
    for data in (opened_training(config), opened_evaluation(config)):
        dataset = data.dataset(strategy)
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        assert all(spec.shape.is_fully_defined() for spec in dataset.element_spec)


@given(
    count=st.integers(0, 30),
    most=st.integers(1, 4),
    empty=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@examples(max_examples=30)
def test_rows_preserve_every_sequence(count: int, most: int, empty: int, seed: int) -> None:
    ragged = random_rows(count, seed)
    per_row = np.ones(count, np.int64)
    if most > 1 and count:
        packs = pack_lengths(ragged.lengths.astype(np.int32), 64, most, 1)
        ragged = ragged.take(packs.order)
        per_row = np.diff(packs.offsets)
    shape = RowShape(64, 20, most)
    rows = rows_of(ragged, per_row, len(per_row) + empty, shape)
    assert names(sequences_of(rows)) == names(ragged)
    assert rows.next_sentence_weights.sum(1).tolist() == per_row.tolist() + [0] * empty
    assert rows.masked_weights.sum() == len(ragged.masked_labels)
    for field, found in rows._asdict().items():
        width = {"m": 20, "f": most, "n": most}.get(field[0], 64)
        assert found.shape == (len(per_row) + empty, width)
        assert found.dtype == (np.float32 if field.endswith("weights") else np.int32)
        assert not found[len(per_row) :].any()


def test_row_that_does_not_fit_is_an_error() -> None:
    ragged = Ragged.from_rows(
        [([1, 2, 3, 4], 2, True, [1], [9]), ([5, 6, 7], 3, False, [1, 2], [8, 9])]
    )
    for shape, variable in (
        (RowShape(6, 4, 3), "MAX_SEQ_LENGTH"),
        (RowShape(8, 2, 3), "MAX_PREDICTIONS_PER_SEQ"),
        (RowShape(8, 4, 1), "MAX_SEQUENCES_PER_PACK"),
    ):
        with user_error("data.too-long", variable):
            rows_of(ragged, np.array([2]), 1, shape)


def test_number_of_predictions_per_row() -> None:
    """With the published data, 3 sequences in 512 tokens need a third of the slots of 3 full
    sequences.
    """
    assert row_shape(512, 1, 512, 76) == RowShape(512, 76, 1)
    assert row_shape(512, 3, 512, 76) == RowShape(512, 79, 3)
    assert row_shape(512, 2, 128, 20) == RowShape(512, 40, 2)  # no sequence has more than 20
    assert row_shape(512, 3, 512, 200) == RowShape(512, 203, 3)  # masked at a higher rate


@given(
    st.lists(st.integers(5, 128), min_size=1, max_size=3).filter(
        lambda lengths: sum(lengths) <= 128
    )
)
def test_benchmark_masking_never_overflows(lengths: list[int]) -> None:
    masked = [min(20, max(1, round(0.15 * length))) for length in lengths]
    assert sum(masked) <= row_shape(128, 3, 128, 20).predictions


def test_zero_rows_have_nonzero_weights() -> None:
    rows = zero_rows(2, RowShape(8, 3, 2))
    shapes = {name: (found.shape, found.dtype) for name, found in rows._asdict().items()}
    real = rows_of(make_rows(np.array([5, 6])), np.array([1, 1]), 2, RowShape(8, 3, 2))
    assert shapes == {name: (found.shape, found.dtype) for name, found in real._asdict().items()}
    assert (rows.masked_weights.sum(1) > 0).all()
    assert rows.next_sentence_weights.sum(1).tolist() == [1, 1]
    assert (rows.sequence_ids == 1).all()
