"""The rules give a run that can be made, whatever the text, the time and the machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.host.errors import UserError
from mlbert.programs.pretrain_rules import FLOPS_A_CORE, SIZES, choose
from user_errors import user_error


@given(
    corpus_tokens=st.integers(1, 10**12),
    seconds=st.floats(1.0, 1e7),
    size=st.sampled_from(["auto", *SIZES]),
    speed=st.sampled_from([1e6, FLOPS_A_CORE, 1e16]),
)
def test_every_choice_can_be_run(
    corpus_tokens: int, seconds: float, size: str, speed: float
) -> None:
    try:
        choice = choose(corpus_tokens, seconds, size, speed)
    except UserError:
        assert size in ("small", "medium", "base")
        return
    shape = choice.shape.config(choice.shape.vocabulary)  # raises where it is none
    assert shape.is_rotary
    assert choice.warmup + choice.decay <= max(choice.updates, 2)
    assert choice.updates >= 1
    assert 8 <= choice.sequences <= 256
    assert 0 < choice.learning_rate <= 0.01


def test_more_time_means_a_larger_model_and_speed_more_updates() -> None:
    sizes = [
        choose(10**9, 60.0 * 8**power, "auto", 2 * FLOPS_A_CORE).shape.hidden for power in range(9)
    ]
    assert sizes == sorted(sizes)
    assert {sizes[0], sizes[-1]} == {128, 768}
    slow, fast = (choose(10**7, 600.0, "tiny", speed).updates for speed in (1e10, 1e11))
    assert fast == pytest.approx(10 * slow, rel=1e-3)


def test_muon_is_chosen_where_its_products_cost_less_than_training() -> None:
    chosen = {size: choose(10**7, 2000.0, size).optimizer for size in SIZES}
    assert chosen == {"tiny": "muon", "small": "muon", "medium": "muon", "base": "stableadamw"}
    assert choose(10**10, 1e7, "base", 1e15).optimizer == "muon"


def test_a_size_that_cannot_do_some_steps_is_refused() -> None:
    with user_error("config.range", "--size base") as caught:
        choose(10**6, 60.0, "base", 40e9)
    assert "Use --size small" in str(caught.value)
