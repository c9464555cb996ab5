"""Declare recipes: a recipe's sections, its overrides of their defaults,
and the module that builds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlbert.config.configuration import Configuration
from mlbert.config.section import Section, Setting, says_none, settings_of

# Public name of two recipes: masked_lm_text if TOKENIZER is set, otherwise masked_lm_stored.
MASKED_LM = "masked_lm"


@dataclass(frozen=True)
class Recipe:
    """A way of training, declared without importing torch; ``build`` names the module that does.

    Attributes:
        name: value of RECIPE.
        sections: sections that the recipe reads.
        inspect: returns the configuration's inputs (`mlbert.training.protocols.Inputs`) without
            reading samples. Raises UserError if something is missing or does not fit.
        build: module with the functions of `mlbert.training.protocols.RecipeBuild`.
        overrides: export to value, if it differs from the section's default.
        required: exports that must not be none although their section allows it.
        not_read: exports of these sections that the recipe does not read.
    """

    name: str
    sections: tuple[type[Section], ...]
    inspect: Callable[[Configuration], Any]
    build: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    not_read: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        known = {setting.env for section in self.sections for setting in settings_of(section)}
        unknown = {*self.overrides, *self.required, *self.not_read} - known
        assert not unknown, f"recipe {self.name} has no settings {sorted(unknown)}"

    def reads(self, setting: Setting) -> bool:
        """Return True if the recipe reads this setting."""
        return setting.section in self.sections and setting.env not in self.not_read

    def requires(self, setting: Setting) -> bool:
        """Return True if the user must give this setting."""
        if setting.section not in self.sections or setting.env in ("RECIPE", *self.overrides):
            return False
        return setting.required or setting.env in self.required

    def refuses(self, setting: Setting, value: object) -> bool:
        """Return True if a raw value counts as not given:
        empty text, or none if none is not allowed.
        """
        if setting.env in self.required:
            return says_none(value)
        return not setting.optional and str(value).strip() == ""

    def default(self, setting: Setting) -> object:
        """Return the default value; None if the setting is required
        or not in a section of the recipe.
        """
        if setting.section not in self.sections:
            return None
        if setting.env == "RECIPE":
            return self.name
        return self.overrides.get(setting.env, setting.default)

    def load(self) -> Any:
        """Import the module that builds the recipe."""
        return importlib.import_module(self.build)
