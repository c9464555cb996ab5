"""Durations in every unit to steps, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.host.errors import UserError
from mlbert.programs.mosaic.common_yaml import Durations
from user_errors import user_error

PLAIN = Durations(sequences_per_step=4096, max_seq_length=128, steps_per_epoch=lambda: 50)
LONG = Durations(sequences_per_step=4096, max_seq_length=128, steps_per_epoch=lambda: 50, max_steps=70_000)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("10ba", 10),
        ("286720000sp", 70_000),  # of the published YAML
        ("286_720_000sp", 70_000),
        ("4097sp", 2),
        ("3ep", 150),
        ("0.5ep", 25),
        ("524288tok", 1),
        ("524289tok", 2),
        ("1e6tok", 2),
    ],
)
def test_units(text: str, steps: int) -> None:
    assert PLAIN.steps("max_duration", text) == steps


def test_a_share_of_the_training() -> None:
    assert LONG.steps("t_warmup", "0.06dur", least=0) == 4200
    assert LONG.steps("t_warmup", "0dur", least=0) == 0
    with user_error("config.value", "max_duration=0.5dur"):
        PLAIN.steps("max_duration", "0.5dur")


@pytest.mark.parametrize("text", ["", "10", "ba", "-1ba", "1.5", "10 parsecs", "nanba", "0ba", "1e999tok", None])
def test_invalid_durations_are_refused(text: object) -> None:
    with pytest.raises(UserError, match="max_duration"):
        PLAIN.steps("max_duration", text)


@given(st.integers(1, 10**9), st.sampled_from(["ba", "sp", "tok"]))
def test_no_duration_is_cut_short(number: int, unit: str) -> None:
    """The steps hold as much as was asked for, and one fewer would not."""
    steps = PLAIN.steps("max_duration", f"{number}{unit}")
    size = {"ba": 1, "sp": 4096, "tok": 4096 * 128}[unit]
    assert (steps - 1) * size < number <= steps * size
