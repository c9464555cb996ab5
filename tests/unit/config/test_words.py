"""Words about settings: defaults by recipe, other programs' names, the table of the documentation."""

from __future__ import annotations

import pytest

from mlbert.config.recipe import Recipe
from mlbert.config.resolution import split_arguments
from mlbert.config.sections import COMMON, settings_by_key
from mlbert.config.words import _OTHERS, default_words, hint_at
from mlbert.host.errors import name_shape
from mlbert.training.config import RunConfig
from user_errors import user_error


def test_no_word_of_others_is_one_of_ours_and_each_hint_leads_to_a_flag() -> None:
    ours = {name_shape(word) for row in settings_by_key().values() for word in (row.flag, row.key)}
    assert not ours & set(_OTHERS)
    for shape in _OTHERS:
        assert name_shape(shape) == shape
        assert any(row.flag in str(hint_at(shape)) for row in settings_by_key().values())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--lr=1e-4", "called --learning_rate here (export LR)"),
        ("--num-train-epochs=3", "--max_steps here (export MAX_STEPS); run length is in steps"),
        ("--bf16=1", "Write --precision bf16 here (export PRECISION=bf16)"),
        ("--report_to=wandb", "--wandb_project"),
        ("--per_device_train_batch_size=8", "--train_batch_size"),
        ("--seeed=1", "The nearest known one is --seed"),
    ],
)
def test_a_word_of_another_tool_gets_our_name_for_it(word: str, said: str) -> None:
    with user_error("config.unknown-name") as caught:
        split_arguments([word])
    assert said in str(caught.value)


def test_a_default_names_the_recipes_that_differ() -> None:
    known = settings_by_key()
    a = Recipe("a", COMMON, lambda config: None, "", overrides={"LR": 1.0})
    b = Recipe("b", COMMON, lambda config: None, "")
    c = Recipe("c", (RunConfig,), lambda config: None, "", overrides={"SEED": 5})
    assert default_words(known["seed"], [a, b, c]) == "none; c: 5"
    assert default_words(known["learning_rate"], [b, a, c]) == "required; a: 1.0"
    assert default_words(known["resume"], [a]) == "no"
