"""The recipes by name.

A new recipe needs a file that declares it, a file that builds it, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mlbert.config.recipe import MASKED_LM, Recipe
from mlbert.config.section import says_none
from mlbert.host.errors import UserError, nearest
from mlbert.host.provenance import TENSORFLOW2
from mlbert.host.registry import Choice, Registry

_REGISTRY = Registry(
    {
        "packed_lamb": Choice("mlbert.recipes.packed_lamb:RECIPE"),
        "ddp_adam": Choice("mlbert.recipes.ddp_adam:RECIPE"),
        "masked_lm_stored": Choice("mlbert.recipes.masked_lm_stored:RECIPE"),
        "masked_lm_text": Choice("mlbert.recipes.masked_lm_text:RECIPE"),
        "classification": Choice("mlbert.recipes.classification:RECIPE"),
    }
)
RECIPES: Mapping[str, Recipe] = {name: _REGISTRY.load(name) for name in _REGISTRY}


def find(name: str, peek: Callable[[str], str | None]) -> Recipe:
    """Return a recipe by name; ``masked_lm`` is `masked_lm_text` if TOKENIZER is set,
    else `masked_lm_stored`.

    Args:
        name: value of RECIPE.
        peek: returns the raw value of a setting by key.

    Raises:
        UserError: the recipe does not exist, or runs in TensorFlow.
    """
    if name == MASKED_LM:
        return (
            RECIPES["masked_lm_stored"]
            if says_none(peek("tokenizer"))
            else RECIPES["masked_lm_text"]
        )
    if name == TENSORFLOW2:
        remedy = (
            "Start benchmarks/bert/implementations/tensorflow2/run_pretraining.py, "
            "or run_and_time.sh"
        )
        raise UserError(
            "config.unsupported", f"RECIPE={name}", "runs in TensorFlow, not here", remedy
        )
    if name not in RECIPES:
        known = [*RECIPES, MASKED_LM]
        near = nearest(name, known)
        hint = f"Did you mean {near}?" if near else "Use a valid one"
        raise UserError("config.choice", f"RECIPE={name}", "no such recipe", hint, known)
    return RECIPES[name]
