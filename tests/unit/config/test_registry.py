"""A new choice is a line of a registry: settings, help, errors and the closed division follow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlaudit.own_checks import CHECKS
from mlbert.config.arguments import CommandLine
from mlbert.config.resolution import Resolved
from mlbert.host.registry import Choice, Registry
from mlbert.ops import forms, reference
from mlbert.ops.config import FORMS, Form
from mlbert.optim import schedules
from mlbert.optim.config import OPTIMIZERS, SCHEDULES, ScheduleConfig
from mlbert.recipes.sections import resolve, settings_by_key
from programs import run_checked, write_program
from simple_recipe import FOLDERS, simple_recipe
from user_errors import user_error

NEW_MODULE = """
from dataclasses import dataclass

from mlbert.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    factor: float

    @classmethod
    def of(cls, config, **numbers):
        return super().of(config, factor=config.lr_gamma, **numbers)

    def decayed(self, t):
        return self.base_lr * self.factor ** (t - self.warmup_steps)
"""

# A program that registers one more choice of each kind, and prints what users see of them.
NEW_CHOICES = """
import sys

sys.path[:0] = sys.argv[1:]

from mlbert.host.registry import Choice
from mlbert.ops.config import FORMS, Form
from mlbert.optim.config import OPTIMIZERS, SCHEDULES

OPTIMIZERS["sophia"] = Choice("sophia:Sophia")
SCHEDULES["staircase"] = Choice("staircase:Staircase")
FORMS["tiled"] = Form("tiled_ops:load", {"cpu": ("tiled",)}, ("cpu",))

from mlbert.cli.main import main
from mlbert.config.arguments import CommandLine
from mlbert.host.errors import UserError
from mlbert.recipes.sections import resolve
from simple_recipe import FOLDERS, simple_recipe
from write_generated import settings_text

print("docs:", settings_text())
for key in ("optimizer", "schedule", "ops"):
    try:
        resolve(simple_recipe(), FOLDERS, CommandLine({key: "unheard"}))
    except UserError as error:
        print("error:", error.sentence)
        print("line:", error.as_line())
print("help:", flush=True)
main(["train", "--help"])
"""
NEW_FORM = """
from mlbert.ops import forms, reference

def load(kind):
    forms.register("attention", "tiled")(reference.attention)
"""


@pytest.fixture
def exponential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Register a schedule that is in a new module."""
    (tmp_path / "exponential_schedule.py").write_text(NEW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    choice = Choice("exponential_schedule:Exponential", reads=("lr_gamma",), needs=("lr_gamma",))
    monkeypatch.setitem(SCHEDULES, "exponential", choice)
    yield "exponential"
    sys.modules.pop("exponential_schedule", None)


def resolved(**flags: str) -> Resolved:
    return resolve(simple_recipe(), FOLDERS, CommandLine(flags))


def test_a_new_schedule_is_chosen_by_its_name(exponential):
    assert exponential in settings_by_key()["schedule"].type_name.split(" | ")
    config = resolved(schedule=exponential, lr_gamma="0.5").config[ScheduleConfig]
    schedule = schedules.make(config)
    after = config.num_warmup_steps + 2
    assert schedule(after) == pytest.approx(config.learning_rate / 4)
    logged = {}
    schedule.hyperparameters(logged.__setitem__)
    assert logged["opt_learning_rate_decay_schedule"] == exponential


def test_what_a_new_schedule_reads_and_needs_is_checked(exponential):
    with user_error("config.missing", "LR_GAMMA", wording=False):
        resolved(schedule=exponential)
    warnings = resolved(schedule=exponential, lr_gamma="0.5", end_lr="0.1").warnings
    assert warnings == ["END_LR is set, but SCHEDULE=exponential does not read it"]
    assert "LR_GAMMA is set, but SCHEDULE=linear does not read it" in (
        resolved(schedule="linear", lr_gamma="0.5").warnings
    )


def test_the_closed_division_refuses_a_new_schedule(exponential):
    """It allows what its rules name, so that a new choice opens no hole."""
    division = next(key for key, one in settings_by_key().items() if one.env == "MLPERF_DIVISION")
    flags = {division: "closed", "optimizer": "lamb"}
    allowed = resolved(schedule="polynomial", **flags).warnings
    refused = resolved(schedule=exponential, lr_gamma="0.5", **flags).warnings
    assert not any("polynomial decay" in line for line in allowed)
    assert any("polynomial decay, not lamb with exponential" in line for line in refused)


def test_an_unknown_choice_is_refused():
    with user_error("config.choice", "SCHEDULE (flag --schedule)", wording=False):
        resolved(schedule="exponential")


def test_new_choices_are_in_help_docs_and_errors(tmp_path):
    """Without another edit, and without a change of the sentences of errors."""
    program = write_program(tmp_path / "new_choices.py", NEW_CHOICES)
    root = Path(__file__).parents[3]
    out = run_checked(sys.executable, program, root / "tests", root / "tools").stdout
    docs, _, rest = out.partition("error:")
    errors, _, shown = rest.partition("help:")
    lines = [line for line in errors.splitlines() if line.startswith("line:")]
    for name, line in zip(("sophia", "staircase", "tiled"), lines, strict=True):
        assert name in docs
        assert name in shown
        assert f"{name}." in line or f"{name}," in line
        assert errors.count(name) == 1, "a sentence lists no choices"


def test_a_new_form_of_an_op_is_selected_and_timed(tmp_path, monkeypatch):
    """Adding one is a file that registers it, and a line."""
    (tmp_path / "tiled_ops.py").write_text(NEW_FORM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMS, "tiled", Form("tiled_ops:load", {"cpu": ("tiled",)}, ("cpu",)))
    monkeypatch.setattr(forms, "_implementations", {"attention": {"plain": reference.attention}})
    try:
        assert forms.select("tiled") == {"attention": "tiled"}
        assert "tiled" in forms.available()["attention"]
        assert "tiled" in forms.order_to_time(torch.device("cpu"))
    finally:
        monkeypatch.undo()
        forms.select("auto")
    sys.modules.pop("tiled_ops", None)


def test_every_choice_exists():
    for registry in (OPTIMIZERS, SCHEDULES):
        assert all(registry.load(name) for name in registry)
    assert all(callable(FORMS.load(name)) for name, form in FORMS.items() if form.place)
    assert all(callable(CHECKS.load(name)) for name in CHECKS)
    for name in OPTIMIZERS:
        assert OPTIMIZERS.load(name).name == name


def test_only_what_the_rules_name_is_allowed_in_closed():
    assert OPTIMIZERS.allowed_in_closed == ("lamb",)
    assert SCHEDULES.allowed_in_closed == ("polynomial",)


def test_what_other_choices_read():
    registry = Registry({"a": Choice("", reads=("x", "y")), "b": Choice("", reads=("y", "z"))})
    assert registry.unread_by("a") == ("z",)
