"""The source that a run's settings ask for: bins, exchange of padding, made-up data."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from host_batches import assert_same
from mlbert.cli.main import main
from mlbert.data.loading.inputs import check_start
from mlbert.data.loading.pretraining import make_source
from mlbert.data.prepare.split_bins import make_bins
from mlbert.distributed.groups import RankGroup
from nvidia_shards import bert_rows, write_fixed
from stored_sets import make_rows, random_lengths, write_set
from training_settings import train_arguments
from user_errors import assert_error_line, user_error

SHAPE = SimpleNamespace(vocab_size=500, max_position_embeddings=64)


def settings(folder, **changes) -> SimpleNamespace:
    values = {"input_dir": folder, "synthetic_data": False, "data_reader": "auto", "train_batch_size": 6}
    values |= {"gradient_accumulation_steps": 2, "max_sequences_per_pack": 1, "counts_of_bins": None}
    values |= {"max_seq_length": None, "max_predictions_per_seq": None}
    return SimpleNamespace(**{**values, "exchange_by": "lengths", **changes})


def sources(config, world_size: int, group_size: int) -> list:
    """One for each rank, opened."""
    made = []
    for rank in range(world_size):
        group = RankGroup(rank % group_size, group_size)
        source = make_source(config, SHAPE, seed=1, rank=rank, world_size=world_size, exchange=group)
        source.open()
        made.append(source)
    return made


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bins")
    source = write_set(folder / "source", make_rows(random_lengths(480)))
    make_bins(source, folder / "out", edges=(8, 16, 32), num_shards=2)
    return folder / "out"


def tokens(made, step: int = 1) -> np.ndarray:
    """[ranks, micro-batches]"""
    return np.asarray([[batch.num_tokens for batch in source.batches_of(step)] for source in made])


@pytest.mark.parametrize("changes", [{"counts_of_bins": (3, 6, 9)}, {}, {"synthetic_data": True}], ids=str)
def test_exchange_makes_ranks_alike_and_moves_nothing_else(bins, changes):
    config = settings(bins, train_batch_size=18, **changes)
    apart, dealt = sources(config, 4, 1), sources(config, 4, 4)
    for before, after in zip(tokens(apart).T, tokens(dealt).T, strict=True):
        assert before.sum() == after.sum(), "of each micro-batch over all ranks"
        assert np.ptp(after) < np.ptp(before)
    in_pairs = sources(config, 4, 2)
    of_pairs = tokens(apart).reshape(2, 2, -1).sum(1)
    assert tokens(in_pairs).reshape(2, 2, -1).sum(1).tolist() == of_pairs.tolist()


def test_gathering_alone_is_reading(bins):
    (one,) = sources(settings(bins, exchange_by="gather"), 1, 1)
    (other,) = sources(settings(bins), 1, 1)
    for mine, theirs in zip(one.batches_of(0), other.batches_of(0), strict=True):
        assert_same(mine.to("cpu"), theirs.to("cpu"))


def test_a_bin_whose_size_shows_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for edge, low, count in ((20, 5, 30), (40, 21, 3)):
        (tmp_path / "bins" / str(edge)).mkdir(parents=True)
        rows = bert_rows(count, max_length=edge, min_length=low)
        write_fixed(tmp_path / "bins" / str(edge) / "part_00000_of_00001.hdf5", rows)
    with user_error("data.too-small", "BIN_COUNTS"):
        sources(settings(tmp_path / "bins", counts_of_bins=(2, 4)), 1, 1)


def test_wrong_numbers_are_refused_before_anything_is_written(bins, tmp_path, capsys):
    others = tmp_path / "eval/part_00000_of_00001.hdf5"
    others.parent.mkdir()
    write_fixed(others, bert_rows(8, max_length=32))
    config = {"synthetic_data": 0, "input_dir": bins, "eval_dir": others.parent, "max_sequences_per_pack": 1}
    config |= {"average_packing_rate": 1, "bin_counts": "1 3", "shape": {"vocab_size": 500}}
    with pytest.raises(SystemExit) as end:
        main(train_arguments(tmp_path, **config))
    assert end.value.code == 2
    assert_error_line(capsys.readouterr().err, "config.conflict", "BIN_COUNTS")


def test_a_single_rank_gathers_its_own():
    data = np.arange(5, dtype=np.uint8)
    (back,) = RankGroup().all_gather(data)
    assert back.tolist() == data.tolist()


def test_starting_weights_of_another_vocabulary_are_refused(tmp_path):
    special = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"
    (tmp_path / "vocab.txt").write_text(special + "a\nb\n")
    start = tmp_path / "start"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"")
    (start / "vocab.txt").write_bytes((special + "a\nb\n").replace("\n", "\r\n").encode())
    check_start(start, tmp_path / "vocab.txt")
    (start / "vocab.txt").write_text(special + "b\na\n")
    with user_error("vocabulary.mismatch", start / "vocab.txt"):
        check_start(start, tmp_path / "vocab.txt")
