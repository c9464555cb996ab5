"""The source that a run's settings ask for: bins, exchange of padding, made-up data."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import host_batches
from host_batches import made_up_batches, rows_of
from mlbert.data.batches import HostBatch
from mlbert.data.formats.order import RankSlice, by_length
from mlbert.data.loading.inputs import check_start
from mlbert.data.loading.pretraining import EvalSet, make_source
from mlbert.data.loading.synthetic import CLS, MASK, SEP, SyntheticSource, lengths_at
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins
from nvidia_shards import bert_rows, write_fixed
from programs import write_files
from stored_sets import make_rows, random_lengths, write_set
from user_errors import user_error

PACKS = {"max_sequences_per_pack": 3}
SHAPE = SimpleNamespace(vocab_size=500, max_position_embeddings=64)


def settings(folder, **changes) -> SimpleNamespace:
    values = {
        "input_dir": folder,
        "synthetic_data": False,
        "data_reader": "auto",
        "train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_sequences_per_pack": 1,
        "counts_of_bins": None,
        "max_seq_length": None,
        "max_predictions_per_seq": None,
    }
    return SimpleNamespace(**(values | changes))


def sources(config, world_size: int, group_size: int) -> list:
    options = {"seed": 1, "world_size": world_size, "group_size": group_size}
    made = [make_source(config, SHAPE, rank=rank, **options) for rank in range(world_size)]
    for source in made:
        source.open()
    return made


@pytest.fixture(scope="module")
def bins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bins")
    source = write_set(folder / "source", make_rows(random_lengths(480)))
    make_bins(source, folder / "out", edges=(8, 16, 32), num_shards=2)
    shuffle_set(source, folder / "packs", num_shards=2, packing=Packing(40, 3))
    return folder / "out"


def by_unit(batches: list[HostBatch], slots: int) -> dict[int, list[tuple[int, ...]]]:
    """Return {number of a unit within the step: all about its tokens},
    in the order of the batches.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    for batch in batches:
        for row, token in rows_of(batch).items():
            found.setdefault(row // slots, []).append((row, *token))
    return found


@pytest.mark.parametrize(("group_size", "parts"), [(2, 3), (4, 1)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"counts_of_bins": (1, 2, 3)},
        PACKS,
        {"input_dir": "packs", **PACKS},
        {"synthetic_data": True},
    ],
    ids=str,
)
def test_each_rank_reads_what_is_assigned_of_all_that_the_ranks_read(
    bins, changes, parts, group_size
):
    config = settings(bins, gradient_accumulation_steps=parts, **changes)
    config.input_dir = bins.parent / config.input_dir  # absolute, or the packs
    apart = sources(config, 4, 1)
    dealt = sources(config, 4, group_size)
    slots = dealt[0].max_tokens
    differing = 0
    for step in range(3):
        read = {
            unit: rows
            for source in apart
            for unit, rows in by_unit(source.batches_of(step), slots).items()
        }
        assert sorted(read) == list(range(24))
        lengths = np.asarray([len(read[unit]) for unit in range(24)])
        for rank, source in enumerate(dealt):
            batches = source.batches_of(step)
            expected = by_length(group_size)(RankSlice(6, parts, rank, 4), lengths.__getitem__)
            for batch, units in zip(batches, expected, strict=True):
                assert list(by_unit([batch], slots).items()) == [
                    (unit, read[unit]) for unit in units.tolist()
                ]
            differing += (
                by_unit(batches, slots).keys()
                != by_unit(apart[rank].batches_of(step), slots).keys()
            )
    assert differing > 0, "some rank reads other units than without exchange"


def test_a_bin_whose_size_shows_when_it_is_read(tmp_path, own_cache):
    for edge, low, count in ((20, 5, 30), (40, 21, 3)):
        (tmp_path / "bins" / str(edge)).mkdir(parents=True)
        rows = bert_rows(count, max_length=edge, min_length=low)
        write_fixed(tmp_path / "bins" / str(edge) / "part_00000_of_00001.hdf5", rows)
    with user_error("data.too-small", "BIN_COUNTS"):
        sources(settings(tmp_path / "bins", counts_of_bins=(2, 4)), 1, 1)


def test_starting_weights_of_another_vocabulary_are_refused(tmp_path):
    special = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"
    write_files(tmp_path, {"vocab.txt": special + "a\nb\n", "start/model.safetensors": ""})
    start = tmp_path / "start"
    (start / "vocab.txt").write_bytes((special + "a\nb\n").replace("\n", "\r\n").encode())
    check_start(start, tmp_path / "vocab.txt")
    (start / "vocab.txt").write_text(special + "b\na\n")
    with user_error("vocabulary.mismatch", start / "vocab.txt"):
        check_start(start, tmp_path / "vocab.txt")


def numbers(evaluation: EvalSet) -> list[int]:
    return [n for batch in evaluation for n in host_batches.numbers(batch)]


def opened_eval(*arguments, max_sequences_per_pack=3, **options) -> EvalSet:
    evaluation = EvalSet(*arguments, max_sequences_per_pack=max_sequences_per_pack, **options)
    evaluation.open()
    return evaluation


def packs_of(batch: HostBatch) -> int:
    return len(np.unique(batch.arrays()["first_rows"] // 32))


@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize(("num_examples", "packs_per_batch"), [(300, 16), (123, 5), (1, 4)])
def test_every_example_once(make_set, world_size, num_examples, packs_per_batch):
    folder = make_set(300)
    seen = []
    for rank in range(world_size):
        evaluation = opened_eval(
            folder, num_examples, packs_per_batch, rank=rank, world_size=world_size
        )
        mine = numbers(evaluation)
        assert mine == numbers(evaluation)
        assert sum(batch.num_samples for batch in evaluation) == len(mine)
        seen += mine
    assert sorted(seen) == list(range(num_examples))


def test_batches_are_as_few_as_can_be_and_of_one_size(make_set):
    folder = make_set(300)
    (num_packs,) = map(packs_of, opened_eval(folder, 300, 10_000))
    packs = list(map(packs_of, opened_eval(folder, 300, 16)))
    assert (sum(packs), len(packs)) == (num_packs, -(-num_packs // 16))
    assert max(packs) <= 16
    assert max(packs) - min(packs) <= 1
    singles = opened_eval(folder, 50, 16, max_sequences_per_pack=1)
    assert [batch.num_samples for batch in singles] == [13, 13, 12, 12]
    assert numbers(singles) == list(range(50))


def test_numbers_that_cannot_work(make_set):
    folder = make_set(300)
    for num_examples, packs_per_batch, subject in (
        (0, 4, folder),
        (301, 4, folder),
        (10, 0, "EVAL_BATCH_SIZE"),
    ):
        with user_error("config.range", subject):
            EvalSet(folder, num_examples, packs_per_batch, max_sequences_per_pack=3)


def opened(packs_per_step: int = 8, vocab_size: int = 30522, **options) -> SyntheticSource:
    options = {"max_sequences_per_pack": 3, "seed": 1, "max_tokens": 512, **options}
    return SyntheticSource(packs_per_step=packs_per_step, vocab_size=vocab_size, **options)


def test_batches_are_well_formed():
    batch = made_up_batches(64, seed=0, vocab_size=300, max_tokens=128)[0].to("cpu")
    lengths = torch.diff(batch.cu_seqlens)
    assert int(lengths.min()) >= 5
    assert int(lengths.max()) == batch.max_seqlen <= 128
    assert (batch.input_ids[batch.cu_seqlens[:-1].long()] == CLS).all()
    assert (batch.input_ids[batch.cu_seqlens[1:].long() - 1] == SEP).all()
    assert (batch.input_ids[batch.masked_positions] == MASK).all()
    assert int(batch.masked_labels.min()) >= 5
    assert int(batch.masked_labels.max()) < 300
    assert (torch.diff(batch.masked_positions) > 0).all()
    packs = batch.dropout_rows // 128
    assert packs.unique().numel() == 64
    assert packs.bincount().max() <= 128


def test_lengths_are_those_of_the_benchmark():
    source = opened(packs_per_step=1000, seed=0, max_sequences_per_pack=1)
    lengths = torch.diff(source.batches_of(0)[0].cu_seqlens).numpy()
    assert 240 < lengths.mean() < 285
    assert 0.2 < np.mean(lengths == 512) < 0.27


def test_ranks_share_one_step():
    whole = opened().batches_of(3)[0].to("cpu")
    parts = [
        opened(packs_per_step=4, rank=rank, world_size=2).batches_of(3)[0].to("cpu")
        for rank in range(2)
    ]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)


def test_other_settings_are_refused():
    with user_error("run.other-settings", "SYNTH_DATA"):
        opened().load_state_dict(opened(packs_per_step=4).state_dict())
    with user_error("config.range", "SYNTH_DATA"):
        opened(vocab_size=4)


def test_synthetic_lengths_have_the_mean_of_the_benchmarks_packs():
    number = 100_000
    lengths = lengths_at((np.arange(number) + 0.5) / number, 512)
    assert lengths.mean() == pytest.approx(254.43, abs=0.1)
    assert (lengths**2).mean() == pytest.approx(98_826, rel=0.01)
    assert lengths.min() == 5
    assert lengths.max() == 512
    assert (lengths == 512).mean() == pytest.approx(0.234, abs=1e-3)
