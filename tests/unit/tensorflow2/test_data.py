"""Training and evaluation data: PyTorch's steps for any number of replicas, and each evaluation sample once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from host_batches import tokens_of
from mlbert.config.resolution import CommandLine, resolve
from mlbert.config.sections import Configuration
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.formats.open import open_store
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import write_examples
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.pretraining import EvalSet
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from mlbert.training.config import EvaluationConfig
from sequences_of_rows import sequences_of
from stored_sets import MAX_PREDICTIONS, VOCAB_SIZE, flip, make_rows, names, random_lengths, same_sequences, write_set
from tf2_bert.data import EVALUATED_ON_TRAINING, Data, evaluation_data, training_data
from tf2_bert.recipe import RECIPE, inspect
from tf2_bert.rows import Rows
from training_settings import SETTINGS, SHAPE
from unit.tensorflow2.cases import assert_evaluated_once, batches, context, joined, read_error
from unit.tensorflow2.device_programs import read_rows
from unit.tensorflow2.processes import start
from user_errors import user_error

COUNT, BATCH, SEED = 300, 8, 3
PACKINGS = [1, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("set") / "set", make_rows(random_lengths(COUNT)))


def settings(tmp_path: Path, folder: Path, **changes: Any) -> Configuration:
    """Return the settings of a run on a set, with 8 rows per replica and step."""
    shape = tmp_path / "bert_config.json"
    shape.write_text(json.dumps({**SHAPE, "vocab_size": VOCAB_SIZE}))
    values = {name: value for name, value in SETTINGS.items() if name not in ("recipe", "synthetic_data")}
    values |= {"bert_config_file": shape, "output_dir": tmp_path, "input_dir": folder, "eval_dir": folder}
    values |= {"train_batch_size": BATCH, "eval_batch_size": 4, "num_eval_examples": 50}
    values |= {"average_packing_rate": 1.0, "gradient_accumulation_steps": 1, **changes}
    return resolve(RECIPE, {}, CommandLine({name: str(value) for name, value in values.items()})).config


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


def assert_steps_of_pytorch(config: Configuration, replicas: int) -> None:
    """Compare each replica's rows with PyTorch's, sequence by sequence, across the end of an epoch."""
    data = opened_training(config)
    section = config[DataConfig]
    options = {"max_sequences_per_pack": section.max_sequences_per_pack, "bin_counts": section.counts_of_bins}
    ranks = [{"rank": rank, "world_size": replicas, "seed": SEED, "partition": contiguous} for rank in range(replicas)]
    sources = [PackedSource(section.input_dir, packs_per_step=BATCH, **rank, **options) for rank in ranks]
    for source in sources:
        source.open()
    steps = sources[0].steps_per_epoch + 2
    found = batches(data.pipeline(context(replicas)), steps * replicas)
    for step in range(steps):
        for rank, source in enumerate(sources):
            (batch,) = source.batches_of(step)
            assert tokens(sequences_of(found[step * replicas + rank])) == tokens_of(batch)


@pytest.mark.parametrize("most", PACKINGS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_match_pytorch(tmp_path: Path, folder: Path, most: int, replicas: int) -> None:
    assert_steps_of_pytorch(settings(tmp_path, folder, max_sequences_per_pack=most), replicas)


def test_steps_of_bins_match_pytorch(tmp_path: Path, folder: Path) -> None:
    make_bins(folder, tmp_path / "bins", edges=(16, 32))
    for counts in ("none", "5 3"):
        assert_steps_of_pytorch(settings(tmp_path, tmp_path / "bins", bin_counts=counts), 2)


@pytest.mark.parametrize("most", PACKINGS)
def test_replicas_and_hosts_share_one_order(tmp_path: Path, folder: Path, most: int) -> None:
    expected = None
    for hosts, replicas in ((1, 1), (1, 4), (2, 4), (4, 4)):
        config = settings(tmp_path, folder, max_sequences_per_pack=most, train_batch_size=16 // replicas)
        data, local = opened_training(config), replicas // hosts
        parts = [batches(data.pipeline(context(replicas, hosts, host)), 3 * local) for host in range(hosts)]
        in_order = [part for step in range(3) for host in parts for part in host[step * local : (step + 1) * local]]
        found = names(joined(in_order))
        assert expected in (None, found)
        expected = found


def test_data_resumes_at_the_step(tmp_path: Path, folder: Path) -> None:
    data = opened_training(settings(tmp_path, folder, max_sequences_per_pack=3))
    whole = batches(data.pipeline(context(2)), 12)
    resumed = batches(data.pipeline(context(2), 4), 4)
    assert names(joined(whole[8:])) == names(joined(resumed))
    assert data.resume_note is None


@pytest.mark.parametrize("most", PACKINGS)
@pytest.mark.parametrize(("hosts", "replicas"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_evaluation_uses_every_sample_once(tmp_path: Path, folder: Path, most: int, hosts: int, replicas: int) -> None:
    data = opened_evaluation(settings(tmp_path, folder, max_sequences_per_pack=most))
    found = assert_evaluated_once(data, hosts, replicas, folder, 50)
    expected = EvalSet(folder, 50, 4, max_sequences_per_pack=most)
    expected.open()
    assert sorted(tokens(found)) == sorted(piece for batch in expected for piece in tokens_of(batch))


def test_evaluation_uses_at_most_all_samples(tmp_path: Path, folder: Path) -> None:
    assert opened_evaluation(settings(tmp_path, folder, num_eval_examples="none")).num_examples == COUNT
    with user_error("data.too-small", folder):
        opened_evaluation(settings(tmp_path, folder, num_eval_examples=COUNT + 1))


def test_stored_packs_are_used_unchanged(tmp_path: Path, folder: Path) -> None:
    packs = tmp_path / "packed"
    shuffle_set(folder, packs, seed=1, packing=Packing(40, 3))
    data = opened_training(settings(tmp_path, packs, max_sequences_per_pack=3))
    assert data.shape.tokens == 40
    whole = opened_training(settings(tmp_path, packs, max_sequences_per_pack=3, train_batch_size=1))
    count = open_store(packs).num_packs
    assert same_sequences(joined(batches(whole.pipeline(context()), count)), make_rows(random_lengths(COUNT)))
    small = opened_training(settings(tmp_path, packs, max_sequences_per_pack=2))
    error = read_error(small)
    assert (error.code, error.subject) == ("data.too-long", "MAX_SEQUENCES_PER_PACK")


def test_tfrecord_folder_can_be_packed(tmp_path: Path) -> None:
    rows = make_rows(random_lengths(60))
    (records := tmp_path / "records").mkdir()
    write_examples(records / "part-0", rows, 32, MAX_PREDICTIONS)
    data = opened_evaluation(settings(tmp_path, records, max_sequences_per_pack=3, num_eval_examples=60))
    assert same_sequences(joined(batches(data.pipeline(context(2)))), rows)


def test_synthetic_data(tmp_path: Path) -> None:
    for most in PACKINGS:
        config = settings(tmp_path, tmp_path / "none", synthetic_data="1", max_sequences_per_pack=most)
        inputs = inspect(config)
        assert inputs.train_data == inputs.eval_data == "synthetic"
        (batch,) = batches(opened_training(config).pipeline(context()), 1)
        assert batch.next_sentence_weights.sum() == BATCH * most
        assert batch.input_ids.max() < VOCAB_SIZE
        evaluation = opened_evaluation(config)
        total = sum(part.next_sentence_weights.sum() for part in batches(evaluation.pipeline(context())))
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


def test_rows_are_wide_enough_and_a_set_smaller_than_a_step_is_an_error(tmp_path: Path, folder: Path) -> None:
    data = opened_training(settings(tmp_path, folder, max_predictions_per_seq=9, train_batch_size=200))
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
        sections = config[DataConfig], config[EvaluationConfig], config[TensorFlowConfig]
        return Data(*sections, inspect(config), tf.distribute.get_strategy(), SEED)

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
    config, strategy = settings(tmp_path, folder), tf.distribute.get_strategy()
    for data in (opened_training(config), opened_evaluation(config)):
        dataset = data.dataset(strategy)
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        assert all(spec.shape.is_fully_defined() for spec in dataset.element_spec)


@pytest.mark.slow
def test_real_replicas_get_the_rows_in_order(tmp_path: Path, folder: Path) -> None:
    """One device without a strategy, and 2 and 4 mirrored virtual devices; reader errors reach all of them."""
    process = start(read_rows, tmp_path, folder, tmp_path / "rows.npz")
    output = process.communicate(120)
    assert process.returncode == 0, output
    assert output.count("\nMAX_PREDICTIONS_PER_SEQ: a row of the data has") == 3  # one for each number of replicas
    arrays = dict(np.load(tmp_path / "rows.npz"))
    for kind in ("train", "eval"):
        found = [Rows(*(arrays[f"{kind}{count}_{i:02}"] for i in range(10))) for count in (1, 2, 4)]
        assert len({tuple(names(sequences_of(rows))) for rows in found}) == 1
    assert same_sequences(sequences_of(found[0]), open_store(folder).gather(np.arange(50)))
