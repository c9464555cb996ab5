"""Words about settings: defaults by recipe, other programs' names, the table of the documentation."""

from __future__ import annotations

import pytest

from mlbert.core.config import split_arguments
from mlbert.core.config_files import name_shape
from mlbert.core.errors import UserError
from mlbert.core.setting_words import _OTHERS, default_words, hint_at, markdown_table
from mlbert.core.settings import LAUNCH_SETTINGS, settings_by_env, train_settings


def test_no_word_of_others_is_one_of_ours_and_each_hint_leads_to_a_flag() -> None:
    ours = {name_shape(word) for row in train_settings().values() for word in (row.flag, row.name)}
    assert not ours & set(_OTHERS)
    for shape in _OTHERS:
        assert name_shape(shape) == shape
        assert any(row.flag in str(hint_at(shape)) for row in train_settings().values())


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--lr=1e-4", "called --learning_rate here (export LR)"),
        ("--num-train-epochs=3", "--max_steps here (export MAX_STEPS); a run's length is told in steps"),
        ("--bf16=1", "Write --precision bf16 here (export PRECISION=bf16)"),
        ("--report_to=wandb", "--wandb_project"),
        ("--per_device_train_batch_size=8", "--train_batch_size"),
        ("--seeed=1", "The nearest known one is --seed"),
    ],
)
def test_a_word_of_another_tool_is_told_what_it_is_called_here(word: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        split_arguments([word])
    assert told in str(caught.value)


def test_a_default_names_the_recipes_that_differ() -> None:
    row, needed = train_settings()["seed"], train_settings()["learning_rate"]
    recipes = {"a": {"seed": None, "learning_rate": 1.0}, "b": {"seed": None}, "c": {"seed": 5}}
    assert default_words(row, recipes) == "none; c: 5"
    assert default_words(needed, recipes) == "required; a: 1.0"
    assert default_words(train_settings()["resume"], {"a": {"resume": False}}) == "no"


def test_the_documentation_table_names_everything_with_its_default() -> None:
    table = markdown_table({"a": {}}, [(row, "not set") for row in LAUNCH_SETTINGS])
    assert all(f"| `{env}` |" in table for env in settings_by_env())
    cells = [line.replace("\\|", "").split("|") for line in table.splitlines()]
    assert {len(row) for row in cells} == {8}
    assert all(row[4].strip() for row in cells)
