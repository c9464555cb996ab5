"""Batch-size warm-up: closed forms against sums over all steps, and the learning rate on top."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.config.arguments import CommandLine
from mlbert.config.batch_growth import BatchGrowth, TokenGrowth, floor_sum, growth_of
from mlbert.data.loading.config import BatchGrowthConfig
from mlbert.optim.schedules import InSequences, Linear, MultiStep, WarmupStableDecay
from mlbert.recipes.sections import COMMON, resolve
from mlbert.training.config import PhaseConfig
from simple_recipe import FOLDERS, simple_configuration, simple_recipe
from user_errors import user_error

GROWTHS = st.builds(
    lambda first, more, steps: BatchGrowth(first, first + more, steps),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(0, 90),
)


@given(st.integers(0, 60), st.integers(0, 50), st.integers(1, 50))
def test_a_sum_of_floors(count: int, numerator: int, denominator: int) -> None:
    expected = sum(i * numerator // denominator for i in range(count))
    assert floor_sum(count, numerator, denominator) == expected


@given(GROWTHS, st.integers(0, 10_000))
def test_sums_and_their_inverse(growth: BatchGrowth, wanted: int) -> None:
    total = 0
    for step in range(growth.steps + 3):
        assert growth.before(step) == total
        assert growth.full_batches(step) == total / growth.last
        total += growth.size(step)
    steps = growth.steps_for(wanted)
    assert growth.before(steps) >= wanted
    assert steps == 0 or growth.before(steps - 1) < wanted


def test_each_size_has_as_many_steps() -> None:
    growth = BatchGrowth(96, 576, 4800)
    sizes = [growth.size(step) for step in range(4800)]
    assert sizes == sorted(sizes)
    assert {sizes.count(size) for size in range(96, 576)} == {10}
    assert growth.size(4800) == 576


@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 3000), st.randoms())
def test_each_size_has_tokens_in_proportion_to_it(first, more, tokens, draw) -> None:
    """However full the rows are; but for the step in which a size begins or ends."""
    growth = TokenGrowth(first, first + more, tokens)
    of_sizes = dict.fromkeys(range(first, first + more + 1), 0)
    trained = 0
    largest = 0
    last_size = first
    while trained < tokens:
        size = growth.size(trained)
        assert size >= last_size
        last_size = size
        of_step = draw.randint(1, 8 * size)
        largest = max(largest, of_step)
        of_sizes[size] += of_step
        trained += of_step
    assert growth.size(trained) == growth.size(10 * tokens) == growth.last
    whole = sum(range(first, growth.last))
    for size in range(first, growth.last):
        assert abs(of_sizes[size] - tokens * size / whole) <= largest


@given(GROWTHS)
def test_the_rate_is_straight_in_sequences_and_turns_at_the_configured_steps(growth) -> None:
    plain = WarmupStableDecay(
        base_lr=1.0, warmup_steps=10, max_steps=60, decay_end=60, decay_steps=20, end_lr=0.25
    )
    schedule = InSequences.of(plain, growth)
    for step in (0, 10, 40, 60, 70):
        assert schedule(step) == pytest.approx(plain(step))
    for first, end in ((0, 10), (10, 40), (40, 60)):
        span = growth.before(end) - growth.before(first)
        for step in range(first, end):
            share = (growth.before(step) - growth.before(first)) / span
            expected = plain(first) + share * (plain(end) - plain(first))
            assert schedule(step) == pytest.approx(expected)


def test_a_rate_in_steps_if_the_batch_is_constant() -> None:
    growth = BatchGrowth.constant(8)
    for plain in (
        Linear(base_lr=1.0, warmup_steps=5, max_steps=30, decay_end=20, first_step=-1),
        Linear(base_lr=1.0, warmup_steps=9, start_warmup_step=-4, max_steps=30, decay_end=30),
        MultiStep(base_lr=1.0, max_steps=30, decay_end=30, milestones=(4, 9), gamma=0.5),
    ):
        schedule = InSequences.of(plain, growth)
        assert [schedule(step) for step in range(40)] == [plain(step) for step in range(40)]
    events: dict[str, object] = {}
    schedule.hyperparameters(events.__setitem__)
    assert events["opt_learning_rate_decay_boundary_steps"] == "4,9"


@pytest.mark.parametrize(
    ("values", "code", "subject"),
    [
        ({"start": "2"}, "config.missing", "BATCHSIZE_WARMUP_STEPS"),
        ({"steps": "2"}, "config.missing", "BATCHSIZE_WARMUP_START"),
        ({"tokens": "2"}, "config.missing", "BATCHSIZE_WARMUP_START"),
        ({"start": "9", "steps": "2"}, "config.conflict", "BATCHSIZE_WARMUP_START"),
        ({"start": "2", "steps": "2", "tokens": "2"}, "config.conflict", "BATCHSIZE_WARMUP_TOKENS"),
    ],
)
def test_settings_that_do_not_fit(values: dict[str, str], code: str, subject: str) -> None:
    recipe = simple_recipe((*COMMON, BatchGrowthConfig))
    flags = {f"batchsize_warmup_{name}": value for name, value in values.items()}
    with user_error(code, subject):
        resolve(recipe, FOLDERS, CommandLine(flags))


def test_growth_from_settings() -> None:
    recipe = simple_recipe((*COMMON, BatchGrowthConfig))
    flags = {"batchsize_warmup_start": "3", "batchsize_warmup_steps": "12"}
    config = resolve(recipe, FOLDERS, CommandLine(flags)).config
    assert growth_of(config) == BatchGrowth(3, 8, 12)
    assert growth_of(simple_configuration()) == BatchGrowth.constant(8)
    counted = {"batchsize_warmup_start": "3", "batchsize_warmup_tokens": "700"}
    counted |= {"max_sequences_per_pack": "2"}
    config = resolve(recipe, FOLDERS, CommandLine(counted)).config
    assert growth_of(config) == TokenGrowth(3, 8, 700)
    counted |= {"max_sequences_per_pack": "1", "average_packing_rate": "1"}
    with user_error("config.conflict", "BATCHSIZE_WARMUP_TOKENS"):
        resolve(recipe, FOLDERS, CommandLine(counted))
    recipe = simple_recipe((*COMMON, BatchGrowthConfig, PhaseConfig))
    flags |= {"step_tokens": "500", "max_sequences_per_pack": "2"}
    config = resolve(recipe, FOLDERS, CommandLine(flags)).config
    assert growth_of(config) == TokenGrowth(3, 8, 6000)
    flags |= {"max_sequences_per_pack": "1", "average_packing_rate": "1"}
    with user_error("config.conflict", "BATCHSIZE_WARMUP_STEPS"):
        resolve(recipe, FOLDERS, CommandLine(flags))
