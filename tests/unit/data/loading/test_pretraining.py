"""The source that a run's settings ask for: bins, exchange of padding, made-up data."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from host_batches import rows_of
from mlbert.cli.main import main
from mlbert.data.formats.order import RankSlice, by_length
from mlbert.data.loading.batches import HostBatch
from mlbert.data.loading.inputs import check_start
from mlbert.data.loading.pretraining import make_source
from mlbert.data.prepare.split_bins import make_bins
from nvidia_shards import bert_rows, write_fixed
from stored_sets import make_rows, random_lengths, write_set
from training_settings import train_arguments
from user_errors import assert_error_line, user_error

SHAPE = SimpleNamespace(vocab_size=500, max_position_embeddings=64)


def settings(folder, **changes) -> SimpleNamespace:
    values = {"input_dir": folder, "synthetic_data": False, "data_reader": "auto", "train_batch_size": 6}
    values |= {"gradient_accumulation_steps": 2, "max_sequences_per_pack": 1, "counts_of_bins": None}
    values |= {"max_seq_length": None, "max_predictions_per_seq": None}
    return SimpleNamespace(**{**values, **changes})


def sources(config, world_size: int, group_size: int) -> list:
    """One for each rank, opened."""
    made = []
    for rank in range(world_size):
        source = make_source(config, SHAPE, seed=1, rank=rank, world_size=world_size, group_size=group_size)
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


def by_unit(batches: list[HostBatch], slots: int) -> dict[int, list[tuple[int, ...]]]:
    """Number of each unit within the step, in the order of the batches -> all there is to know of its tokens."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for batch in batches:
        for row, token in rows_of(batch).items():
            found.setdefault(row // slots, []).append((row, *token))
    return found


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"counts_of_bins": (1, 2, 3)}, {"max_sequences_per_pack": 3}, {"synthetic_data": True}],
    ids=str,
)
def test_each_rank_reads_what_is_assigned_of_all_that_the_ranks_read(bins, changes, parts, group_size):
    config = settings(bins, gradient_accumulation_steps=parts, **changes)
    apart, dealt = sources(config, 4, 1), sources(config, 4, group_size)
    slots = dealt[0].max_tokens
    differing = 0
    for step in range(3):
        read = {unit: rows for source in apart for unit, rows in by_unit(source.batches_of(step), slots).items()}
        assert sorted(read) == list(range(24))
        lengths = np.asarray([len(read[unit]) for unit in range(24)])
        for rank, source in enumerate(dealt):
            batches = source.batches_of(step)
            expected = by_length(group_size)(RankSlice(6, parts, rank, 4), lengths.__getitem__)
            for batch, units in zip(batches, expected, strict=True):
                assert list(by_unit([batch], slots).items()) == [(unit, read[unit]) for unit in units.tolist()]
            differing += by_unit(batches, slots).keys() != by_unit(apart[rank].batches_of(step), slots).keys()
    assert differing > 0, "some rank reads other units than without exchange"


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
