"""Reading ahead changes neither the order of the steps nor the position that a checkpoint saves."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.loading.batches import HostBatch
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.training.reader import BatchReader


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


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_steps_and_positions_do_not_depend_on_reading_ahead(plan: list[tuple[bool, bool, bool]]) -> None:
    """For each step: are the next counts begun during it, is a rank warned, does an evaluation follow it?"""
    warned = False
    objective = SimpleNamespace(scope="step", counts=lambda batch: (1,), divisors=lambda counts: counts)
    model = SimpleNamespace(training_flops=lambda batch: 1)
    watch = Lifecycle(World(), lambda *_: None).watch
    source = NumberedSteps()
    reader = BatchReader(source, objective, model, World(), watch, lambda: warned)
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
