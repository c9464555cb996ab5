"""Synthetic batches look like real ones and follow the same rules for ranks and resuming."""

from __future__ import annotations

import numpy as np
import torch

from host_batches import assert_same, made_up_batches
from mlbert.data.loading.synthetic import CLS, MASK, SEP, SyntheticSource
from user_errors import user_error

SETTINGS = {"packs_per_step": 8, "max_sequences_per_pack": 3, "seed": 1, "vocab_size": 30522, "max_tokens": 512}


def opened(**options) -> SyntheticSource:
    return SyntheticSource(**{**SETTINGS, **options})


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


def test_ranks_share_one_step_and_resume_is_exact():
    whole = opened().batches_of(3)[0].to("cpu")
    parts = [opened(packs_per_step=4, rank=rank, world_size=2).batches_of(3)[0].to("cpu") for rank in range(2)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
    source, other = opened(), opened()
    for _ in range(3):
        source.next_step()
    other.load_state_dict(source.state_dict())
    assert_same(other.next_step()[0].to("cpu"), whole)
    source.close()
    other.close()


def test_other_settings_are_refused():
    with user_error("run.other-settings", "SYNTH_DATA"):
        opened().load_state_dict(opened(packs_per_step=4).state_dict())
    with user_error("config.range", "SYNTH_DATA"):
        opened(vocab_size=4)
