"""Synthetic batches look like real ones and follow the same rules for ranks and resuming."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlbert.core.errors import UserError
from mlbert.feed.synthetic import CLS, MASK, SEP, SyntheticSource


def test_batches_are_well_formed():
    source = SyntheticSource(packs_per_step=64, seed=0, vocab_size=300, max_tokens=128)
    (batch,) = source.batches_of(0)
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
    source = SyntheticSource(packs_per_step=1000, seed=0, max_sequences_per_pack=1)
    lengths = torch.diff(source.batches_of(0)[0].cu_seqlens).numpy()
    assert 240 < lengths.mean() < 285
    assert 0.2 < np.mean(lengths == 512) < 0.27


def test_ranks_share_one_step_and_resume_is_exact():
    whole = SyntheticSource(packs_per_step=8, seed=1).batches_of(3)[0]
    parts = [SyntheticSource(packs_per_step=4, seed=1, rank=r, world_size=2).batches_of(3)[0] for r in range(2)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
    source, other = SyntheticSource(packs_per_step=8, seed=1), SyntheticSource(packs_per_step=8, seed=1)
    for _ in range(3):
        source.next_step()
    other.load_state_dict(source.state_dict())
    assert torch.equal(other.next_step()[0].input_ids, whole.input_ids)
    source.close()
    other.close()


def test_other_settings_are_refused():
    with pytest.raises(UserError, match="other settings"):
        SyntheticSource(packs_per_step=8, seed=1).load_state_dict(
            SyntheticSource(packs_per_step=4, seed=1).state_dict()
        )
    with pytest.raises(UserError, match="too small"):
        SyntheticSource(packs_per_step=8, seed=1, vocab_size=4)
