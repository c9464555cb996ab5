"""Schedules against the output of public reference programs (tests/assets/schedules)."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies

from mlbert.config.arguments import CommandLine
from mlbert.optim import schedules
from mlbert.optim.config import SCHEDULES, ScheduleConfig
from mlbert.optim.schedules import (
    Cosine,
    Linear,
    Polynomial,
    WarmupStableDecay,
    WarmupStableRoot,
)
from mlbert.recipes.sections import resolve, settings_by_key
from simple_recipe import simple_configuration, simple_recipe
from user_errors import user_error

ASSETS = Path(__file__).parents[2] / "assets" / "schedules"
BENCHMARK = json.loads((ASSETS / "benchmark.json").read_text())
GOOGLE = json.loads((ASSETS / "google.json").read_text())["settings"]
MULTIPLIERS = json.loads((ASSETS / "multipliers.json").read_text())

PUBLISHED = [
    *(pytest.param(case["settings"], case["lr"], id=name) for name, case in BENCHMARK.items()),
    *(
        pytest.param(case["settings"], case["lr_at_step_0_to_200"], id=name)
        for name, case in GOOGLE.items()
    ),
]
NUMBERS = {
    "lr_milestones": "30,60",
    "lr_gamma": "0.5",
    "lr_decay_steps": "10",
    "end_lr": "1e-5",
    "lr_decay_end": "90",
}
MULTISTEP = {"schedule": "multistep", "lr_gamma": "0.5"}


@pytest.mark.parametrize(("numbers", "expected"), PUBLISHED)
def test_polynomial_matches_the_benchmark_and_google(numbers, expected):
    assert len(expected) == 201
    end = numbers["num_train_steps"]
    start = numbers.get("start_warmup_step", 0)
    rates = {
        "base_lr": numbers["init_lr"],
        "power": numbers.get("poly_power", 1.0),
        "max_steps": end,
        "decay_end": end,
    }
    schedule = Polynomial(
        **rates, warmup_steps=numbers["num_warmup_steps"], start_warmup_step=start
    )
    for step, lr in enumerate(expected):
        assert schedule(step) == pytest.approx(lr, abs=1e-9), step  # the reference is in float32


@pytest.mark.parametrize("case", MULTIPLIERS["cases"], ids=lambda case: case["name"])
def test_multipliers_match_the_reference(case):
    # The WSD reference starts its warm-up at 1e-10 instead of 0.
    tolerance = 1.01e-10 if case["function"] == "wsd" else 1e-12
    schedule = SCHEDULES.load(case["function"])(
        base_lr=1.0, decay_end=case["arguments"]["max_steps"], **case["arguments"]
    )
    for step, factor in zip(MULTIPLIERS["steps"], case["factor"], strict=True):
        assert schedule(step) == pytest.approx(factor, abs=tolerance), step


def test_rates_of_a_composer_run():
    """The rates of Composer 0.32.1 in a run of 12 updates:
    warm-up in the first quarter, linear decay to 0.02.

    Composer uses the multiplier of step max(n - 1, 0) in update n, counted from 0.
    """
    schedule = Linear(
        base_lr=2e-4, warmup_steps=3, max_steps=12, decay_end=12, end_lr=4e-6, first_step=-1
    )
    rates = [
        0.0,
        0.0,
        6.666666666666667e-05,
        0.00013333333333333334,
        0.0002,
        0.00017822222222222222,
    ]
    rates += [
        0.00015644444444444446,
        0.00013466666666666667,
        0.00011288888888888891,
        9.11111111111111e-05,
    ]
    rates += [6.933333333333334e-05, 4.7555555555555553e-05]
    assert [schedule(n) for n in range(12)] == pytest.approx(rates, rel=1e-12, abs=0)


def test_the_root_after_a_plateau_by_hand():
    """A ramp of 2 steps to 4, a plateau until step 4, then 1 - sqrt(s) of the way from 1 to 4."""
    schedule = WarmupStableRoot(
        base_lr=4.0, warmup_steps=2, max_steps=8, decay_end=8, decay_steps=4, end_lr=1.0
    )
    expected = [0.0, 2.0, 4.0, 4.0, 4.0, 2.5, 4 - 3 * 0.5**0.5, 4 - 3 * 0.75**0.5, 1.0, 1.0]
    assert [schedule(step) for step in range(10)] == pytest.approx(expected)


def test_by_default_there_is_no_ramp_and_the_decay_ends_at_zero():
    own = {
        Linear: {},
        Cosine: {},
        Polynomial: {"power": 2.0},
        WarmupStableDecay: {"decay_steps": 2},
        WarmupStableRoot: {"decay_steps": 2},
    }
    for kind, numbers in own.items():
        schedule = kind(base_lr=1.0, max_steps=8, decay_end=8, **numbers)
        assert (schedule(0), schedule(8)) == (1.0, 0.0)
    assert Linear(base_lr=1.0, warmup_steps=3, max_steps=8, decay_end=3)(3) == 0.0


def test_linear_decay_that_counts_from_one_and_starts_before_the_warmup_ends():
    """With e counted from 1: LR (e + 16) / 82 below LR,
    then linear from LR at e = 82 to the end rate at e = 179.
    """
    base = 0.00039299421615882676
    end = 0.0000494549100544884
    numbers = {
        "warmup_steps": 82,
        "start_warmup_step": -16,
        "max_steps": 299,
        "decay_end": 179,
        "first_step": 1,
    }
    schedule = Linear(base_lr=base, end_lr=end, **numbers)
    for e in range(1, 300):
        decayed = base + (min(e, 179) - 82) / 97 * (end - base)
        assert schedule(e - 1) == pytest.approx(
            base * (e + 16) / 82 if e + 16 < 82 else decayed, rel=1e-12
        )
    assert schedule(65) > base, (
        "must exceed the base rate between the end of the warm-up and e = 82"
    )
    assert schedule(81) == pytest.approx(base)


@pytest.mark.parametrize("name", SCHEDULES)
def test_settings_create_each_schedule(name, recipe, environ):
    """Settings become rates and log entries; settings
    that a schedule does not read are warnings.
    """
    flags = {key: value for key, value in NUMBERS.items() if key in SCHEDULES[name].reads}
    resolved = resolve(
        recipe, environ, CommandLine({**flags, "schedule": name, "max_steps": "100"})
    )
    assert not [w for w in resolved.warnings if "does not read" in w]
    schedule = schedules.make(resolved.config[ScheduleConfig])
    events = []
    schedule.hyperparameters(lambda key, value: events.append((key, value)))
    found = dict(events)
    assert len(found) == len(events), "each key must be logged once"
    assert found["opt_learning_rate_decay_schedule"] == name
    assert found["opt_base_learning_rate"] == resolved.config[ScheduleConfig].learning_rate
    assert found["opt_learning_rate_training_steps"] == 100
    assert found.get("opt_end_learning_rate", 1e-5) == 1e-5
    rates = [schedule(step) for step in range(120)]
    assert rates[99] == rates[110]
    assert (rates[110] < rates[40]) == (name != "constant")
    by_recipe = resolve(
        simple_recipe(poly_power=2.0, end_lr=1e-5),
        environ,
        CommandLine({**flags, "schedule": name}),
    )
    assert not [w for w in by_recipe.warnings if "does not read" in w]
    unread = resolve(
        recipe, environ, CommandLine({**flags, **NUMBERS, "schedule": name, "max_steps": "100"})
    )
    named = [w.split()[0] for w in unread.warnings if "does not read" in w]
    assert sorted(named) == sorted(
        settings_by_key()[key].env for key in NUMBERS if key not in SCHEDULES[name].reads
    )


@pytest.mark.parametrize(
    ("flags", "code", "subject"),
    [
        (MULTISTEP, "config.missing", "LR_MILESTONES"),
        *(
            (MULTISTEP | {"lr_milestones": bad}, "config.value", "LR_MILESTONES")
            for bad in ("5,3", "5,x")
        ),
        ({"schedule": "wsd"}, "config.missing", "LR_DECAY_STEPS"),
        ({"schedule": "wsd", "lr_decay_steps": "101"}, "config.conflict", "LR_DECAY_STEPS"),
        (
            {"schedule": "wsd", "lr_decay_steps": "5", "lr_decay_proportion": "0.5"},
            "config.conflict",
            "LR_DECAY_PROPORTION",
        ),
        ({"schedule": "wsd", "lr_decay_proportion": "0.91"}, "config.conflict", "SCHEDULE=wsd"),
        ({"schedule": "wsd", "lr_decay_steps": "91"}, "config.conflict", "SCHEDULE=wsd"),
        ({"schedule": "wsd_sqrt", "lr_decay_steps": "91"}, "config.conflict", "SCHEDULE=wsd_sqrt"),
        ({"schedule": "linear", "lr_decay_end": "10"}, "config.conflict", "SCHEDULE=linear"),
        ({"schedule": "cosin"}, "config.choice", "SCHEDULE (flag --schedule)"),
    ],
)
def test_invalid_schedule_settings_are_errors(flags, code, subject, recipe, environ):
    with user_error(code, subject):
        resolve(recipe, environ, CommandLine({**flags, "max_steps": "100", "warmup_steps": "10"}))


@pytest.mark.parametrize(("end", "warnings"), [("9", 1), ("10", 0)])
def test_a_polynomial_decay_that_ends_in_the_warmup_is_a_warning(recipe, environ, end, warnings):
    """Google's published flags have a default warm-up that is longer than a short run."""
    flags = {"max_steps": "100", "warmup_steps": "10", "lr_decay_end": end}
    resolved = resolve(recipe, environ, CommandLine(flags))
    found = [line for line in resolved.warnings if "when the warm-up ends" in line]
    assert len(found) == warnings


def test_a_milestone_in_the_warmup_is_a_warning(recipe, environ):
    flags = MULTISTEP | {"max_steps": "100", "warmup_steps": "10"}
    for first, expected in (("10", 1), ("11", 0)):
        resolved = resolve(recipe, environ, CommandLine({**flags, "lr_milestones": first}))
        found = [line for line in resolved.warnings if line.startswith("LR_MILESTONES begin at")]
        assert len(found) == expected


@given(
    name=strategies.sampled_from(["linear", "cosine", "wsd"]),
    max_steps=strategies.integers(1, 60),
    warmup=strategies.integers(0, 70),
    start=strategies.integers(-20, 0),
    decay=strategies.integers(1, 70),
    decay_end=strategies.none() | strategies.integers(1, 70),
)
def test_a_legal_schedule_never_jumps(name, max_steps, warmup, start, decay, decay_end):
    """No step changes the rate by more than a full ramp or decay of its length does."""
    config = simple_configuration(
        schedule=name,
        learning_rate=1.0,
        max_steps=1000,
        warmup_steps=0,
        lr_decay_steps=decay if name == "wsd" else None,
    )[ScheduleConfig].model_copy(
        update={
            "max_steps": max_steps,
            "warmup_steps": warmup,
            "start_warmup_step": start if name == "wsd" else 0,
            "lr_decay_end": decay_end,
        }
    )
    if list(config.contradictions()):
        return
    schedule = schedules.make(config)
    rates = [schedule(step) for step in range(max(max_steps, decay_end or 0) + 2)]
    length = decay if name == "wsd" else (decay_end or max_steps) - warmup
    steepest = max(1 / max(warmup, 1) if warmup else 0.0, 1.58 / length)  # pi / 2 of the cosine
    assert all(abs(after - before) <= steepest + 1e-9 for before, after in pairwise(rates)), rates
