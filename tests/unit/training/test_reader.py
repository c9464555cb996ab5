"""Reading ahead changes neither steps nor saved positions;
a step whose update is left out is taken back.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mlbert.data.batches import HostBatch
from mlbert.data.formats.streams import Stream
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading import text_lanes
from mlbert.data.loading.masked_text import TextSet, TextSource
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.runs.progress import StepCounts, TrainState
from mlbert.training.reader import BatchReader, SampleCounter
from mlbert.training.step import StepResult
from text_sets import random_texts, write_texts


class NumberedSteps:
    """Step n has n + 1 tokens."""

    is_preparing = False

    def __init__(self) -> None:
        self.step = self.positions = 0

    def state_dict(self, back: int = 0) -> dict[str, int]:
        self.positions += 1
        return {"step": self.step - back}

    def next_step(self) -> list[HostBatch]:
        self.step += 1
        return [HostBatch.dummy(self.step)]


def reader_of(source: Any, lifecycle: Lifecycle, is_warned: Callable[[], bool]) -> BatchReader:
    objective = SimpleNamespace(
        scope="step", counts=lambda batch: (1,), divisors=lambda counts: counts
    )
    model = SimpleNamespace(training_flops=lambda batch: 1)
    return BatchReader(source, objective, model, World(), lifecycle.watch, is_warned)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_steps_and_positions_do_not_depend_on_reading_ahead(plan):
    """For each step: are the next counts begun during it, is a rank warned,
    does an evaluation follow it?
    """
    warned = False
    source = NumberedSteps()
    reader = reader_of(source, Lifecycle(World(), lambda *_: None), lambda: warned)
    for step, (begins, warned, evaluates) in enumerate(plan):
        assert reader.position() == {"step": step}
        assert reader.take(step).counts.tokens == step + 1
        if begins:
            reader.begin_count(step, step / 8)
        following = reader.finish_count(step)
        assert begins == (following is not None)
        assert following is None or (following.warned, following.seconds) == (warned, step / 8)
        if evaluates:
            reader.read_ahead(step)
    assert source.positions == len(plan), "a position may be a collective"


def test_reads_may_be_long_while_the_order_of_an_epoch_is_computed(tmp_path, monkeypatch):
    """test_health.py has what the health monitor makes of it."""
    write_texts(tmp_path / "set", random_texts(60), size_limit=1000)
    texts = TextSet(
        [Stream(local=str(tmp_path / "set"))], load_tokenizer("bert-base-uncased"), 32, "truncate"
    )
    order = {"shuffle": "py1s", "shuffle_seed": 1, "canonical_nodes": 1}
    source = TextSource(texts, sequences_per_step=4, **order, rate=lambda step: 0.15, seed=1)
    lifecycle = Lifecycle(World(), lambda *_: None)
    reader = reader_of(source, lifecycle, lambda: False)
    found = []
    watched = Mock(wraps=text_lanes.shuffle_into)
    watched.side_effect = lambda *_, **__: found.append(lifecycle.watch._is_preparing()) or DEFAULT
    monkeypatch.setattr(text_lanes, "shuffle_into", watched)
    source.open()
    assert not lifecycle.watch._is_preparing()
    for step in range(30):  # two epochs
        reader.take(step)
    source.close()
    assert len(found) >= 2
    assert all(found)


norms = st.sampled_from([1.0, 2.5, math.inf, -math.inf, math.nan])


@example([(math.nan, True, 1)])
@given(st.lists(st.tuples(norms, st.booleans(), st.integers(1, 50)), max_size=20))
def test_only_steps_that_updated_count(steps):
    """However often the counter settles in between; each skipped step is reported once."""
    state = TrainState()
    found = []
    sample_counter = SampleCounter(state, lambda now: found.append(now.step))
    for norm, settles, samples in steps:
        result = StepResult(
            torch.zeros((), dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)
        )
        sample_counter.count(result, StepCounts(samples, 2 * samples, 3 * samples))
        if settles:
            sample_counter.settle()
            assert not sample_counter.is_open
    sample_counter.settle()
    kept = sum(samples for norm, _, samples in steps if math.isfinite(norm))
    assert (state.samples, state.tokens, state.flops) == (kept, 2 * kept, 3 * kept)
    assert state.step == len(steps)
    assert found == [
        number for number, (norm, *_) in enumerate(steps, start=1) if not math.isfinite(norm)
    ]
    assert state.skipped_steps == len(found)
