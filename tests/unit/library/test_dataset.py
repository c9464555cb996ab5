"""Batches for other people's loops: in the order of training, for any number of workers, and
continued where a loop stopped.
"""

import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import mlbert
from mlbert.config.batch_growth import growth_of
from mlbert.data.batches import Batch
from mlbert.data.formats.order import contiguous
from mlbert.data.loading import text_run
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.data.loading.packed import PackedSource
from mlbert.library.dataset import BatchDataset
from mlbert.optim.config import ScheduleConfig
from mlbert.programs.custom_corpus.corpus_plan import resolve_settings
from mlbert.programs.custom_corpus.own_folder import OwnFolder
from text_sets import random_texts, write_texts
from user_errors import user_error

STEPS = 6
BATCH = 8


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.max_seqlen == other.max_seqlen
        tensors = other.tensors()
        assert one.tensors().keys() == tensors.keys()
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, tensors[name]), name


def loaded(data: BatchDataset, workers: int) -> list[Batch]:
    return list(DataLoader(data, batch_size=None, num_workers=workers))


def test_batches_are_those_of_the_training_run(pretrained: Path) -> None:
    settings = {
        "train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "opt_lamb_beta_1": 0.9,
        "opt_lamb_beta_2": 0.98,
        "weight_decay_rate": 0.0,
        "masking_rate": 0.3,
        "max_seq_length": 32,
    }
    config = resolve_settings(OwnFolder(pretrained), settings, 1.0, 10**6, False).config
    source = text_run.make_source(
        config[DataConfig],
        config[TextConfig],
        config[CorpusConfig],
        growth_of(config),
        config[ScheduleConfig].max_steps,
        seed=1,
    )
    source.open()
    expected = [source.batches_of(step)[0].to("cpu") for step in range(STEPS)]
    source.close()
    data = mlbert.open_dataset(pretrained, BATCH, steps=STEPS)
    assert_same(list(data), expected)
    assert len(data) == STEPS


def test_stored_batches_are_those_of_training(prepared_data: Path) -> None:
    source = PackedSource(
        prepared_data / "train",
        packs_per_step=4,
        max_sequences_per_pack=3,
        seed=7,
        rank=1,
        world_size=2,
        partition=contiguous,
    )
    source.open()
    expected = [source.batches_of(step)[0].to("cpu") for step in range(STEPS)]
    options = {"seed": 7, "sequences_per_pack": 3, "rank": 1, "world_size": 2}
    data = mlbert.open_dataset(prepared_data / "train", 4, steps=STEPS, **options)
    assert_same(list(data), expected)


@pytest.mark.parametrize("kind", ["text", "stored", "split"])
def test_workers_keep_the_order_and_a_position_continues(
    kind: str, pretrained: Path, prepared_data: Path, tmp_path: Path
) -> None:
    if kind == "split":
        folder = write_texts(tmp_path / "set", random_texts(300))
        more = {"tokenizer": prepared_data / "vocab.txt", "max_length": 16}
    else:
        folder = pretrained if kind == "text" else prepared_data / "train"
        more = {}

    def opened(steps: int | None = STEPS) -> BatchDataset:
        return mlbert.open_dataset(folder, BATCH, steps=steps, **more)

    expected = list(opened())
    assert_same(loaded(opened(), 1), expected)
    assert_same(loaded(opened(), 2), expected)
    state = opened().state_dict(2)
    continued = opened()
    continued.load_state_dict(state)
    assert continued.first_step == 2
    assert_same(loaded(continued, 2), expected[2:])
    assert_same(list(islice(opened(None), STEPS)), expected)
    with pytest.raises(TypeError):
        len(opened(None))
    with user_error("run.other-settings", "the data set's state", wording=False):
        mlbert.open_dataset(folder, BATCH // 2, **more).load_state_dict(state)


def test_a_set_can_be_sent_to_another_process(prepared_data: Path, pretrained: Path) -> None:
    """Workers that are not forked get it pickled."""
    for folder in (prepared_data / "train", pretrained):
        data = mlbert.open_dataset(folder, BATCH, steps=2)
        assert_same(list(pickle.loads(pickle.dumps(data))), list(data))


def test_evaluation_has_each_sequence_once(pretrained: Path, prepared_data: Path) -> None:
    for folder in (pretrained, prepared_data / "eval"):
        data = mlbert.open_dataset(folder, BATCH, evaluation=True)
        batches = list(data)
        whole = list(mlbert.open_dataset(folder, 10**6, evaluation=True))
        assert len(whole) == 1
        assert sum(batch.num_samples for batch in batches) == whole[0].num_samples > BATCH
        tokens = torch.cat([batch.input_ids for batch in batches])
        assert torch.equal(tokens, whole[0].input_ids)
        assert_same(loaded(data, 2), batches)


def test_padded_batches_suit_transformers(pretrained: Path, prepared_data: Path) -> None:
    flat = next(iter(mlbert.open_dataset(pretrained, BATCH)))
    padded = next(iter(mlbert.open_dataset(pretrained, BATCH, padded=True)))
    assert padded.keys() == {"input_ids", "attention_mask", "labels"}
    is_token = padded["attention_mask"].bool()
    assert torch.equal(padded["input_ids"][is_token], flat.input_ids)
    assert torch.equal(padded["labels"][padded["labels"] != -100], flat.masked_labels)
    stored = next(iter(mlbert.open_dataset(prepared_data / "train", BATCH, padded=True)))
    assert stored.keys() - padded.keys() == {"token_type_ids", "next_sentence_label"}


def test_mistakes_are_errors_before_a_sample_is_read(
    prepared_data: Path, pretrained: Path, tmp_path: Path
) -> None:
    with user_error("config.conflict", "train"):
        mlbert.open_dataset(prepared_data / "train", BATCH, max_length=128)
    with user_error("config.range", "batch_size 0"):
        mlbert.open_dataset(pretrained, 0)
    with user_error("data.too-small"):
        mlbert.open_dataset(pretrained, 10**6)
    texts = write_texts(tmp_path / "set", ["one text"] * 4)
    with user_error("config.missing", "tokenizer"):
        mlbert.open_dataset(texts, 2)
    with user_error("file.missing"):
        mlbert.open_dataset(tmp_path / "none", 2)


def test_import_is_fast_and_small() -> None:
    code = (
        "import sys, mlbert; names = dir(mlbert); has_numpy = 'numpy' in sys.modules; "
        "mlbert.MLPerfCallback; print(*names, has_numpy, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *names, has_numpy, has_torch = done.stdout.split()
    assert names == [
        "MLPerfCallback",
        "UserError",
        "__version__",
        "load_model",
        "make_optimizer",
        "new_model",
        "open_dataset",
    ]
    assert (has_numpy, has_torch) == ("False", "False")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mlbert.no_such_name


def test_without_torch_the_reason_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import mlbert; mlbert.MLPerfCallback\n"
        "try: mlbert.load_model\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mlbert.load_model needs torch.")


def test_batches_count_what_they_hold(pretrained: Path) -> None:
    batch = next(iter(mlbert.open_dataset(pretrained, BATCH)))
    assert (batch.num_samples, batch.num_tokens) == (BATCH, len(batch.input_ids))
    assert np.diff(batch.cu_seqlens.numpy()).max() == batch.max_seqlen <= 32
