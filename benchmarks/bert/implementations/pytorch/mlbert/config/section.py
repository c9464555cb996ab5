"""Sections of settings.

Each package declares its own in its ``config.py``, which imports only this module.

    class OptimizerConfig(Section):
        optimizer: str = setting("OPTIMIZER", "Update rule.", default="lamb", choices=OPTIMIZERS)

A field without a default is required. Values are never coerced: `Setting.parse` parses text, then
pydantic checks type and limits strictly.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticUndefined

# Also for the modules that declare settings, which import nothing but this one.
from mlbert.host.registry import Choice as Choice
from mlbert.host.registry import Registry as Registry
from mlbert.host.texts import (
    is_count as is_count,  # for the sections, which import only this module
)
from mlbert.host.texts import parse_number as parse_number

_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}
_NONE = {"", "none", "null"}
# Kept out of logs; the surrogates stand for bytes that are not UTF-8.
_UNPRINTABLE = re.compile("[\n\r\0\x1b\ud800-\udfff]")


class Ranges:
    """Units and limits that settings share.

    Every number has an upper bound, so that a typing error cannot hang or crash the machine.
    """

    STEPS: ClassVar[dict[str, Any]] = {"unit": "steps", "ge": 1, "le": 10**9}
    STEPS_FROM_0: ClassVar[dict[str, Any]] = STEPS | {"ge": 0}
    STEPS_TO_0: ClassVar[dict[str, Any]] = {"unit": "steps", "ge": -(10**9), "le": 0}
    CHECKPOINTS: ClassVar[dict[str, Any]] = STEPS_FROM_0 | {"unit": "checkpoints"}
    SAMPLES: ClassVar[dict[str, Any]] = {"unit": "sequences", "ge": 1, "le": 10**15}
    PACKS: ClassVar[dict[str, Any]] = {"ge": 1, "le": 2**20}
    IN_PACK: ClassVar[dict[str, Any]] = {"unit": "sequences", "ge": 1, "le": 512}
    TOKENS: ClassVar[dict[str, Any]] = {"unit": "tokens", "ge": 1, "le": 65535}
    SECONDS: ClassVar[dict[str, Any]] = {"unit": "seconds", "gt": 0, "le": 10**9}
    CPUS: ClassVar[dict[str, Any]] = {"ge": 1, "le": 4096}
    RATE: ClassVar[dict[str, Any]] = {"ge": 0, "le": 100}
    PROBABILITY: ClassVar[dict[str, Any]] = {"gt": 0, "lt": 1}


class Contradiction(NamedTuple):
    """Values that cannot be used together, as the parts of a `UserError`."""

    code: str
    subject: str
    problem: str
    remedy: str


class Section(BaseModel):
    """Settings that belong together, owned by one package.

    Frozen and typed; created by `mlbert.config.resolution`.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    @field_validator("*")
    @classmethod
    def _check_choice(cls, value: object, info: ValidationInfo) -> object:
        """Raise ValueError if the field's registry does not have the value."""
        public: Any = cls.model_fields[str(info.field_name)].json_schema_extra
        registry = public["choices"]
        if registry is not None and value is not None and value not in registry:
            raise ValueError(value)
        return value

    def contradictions(self) -> Iterable[Contradiction]:
        """Return contradictions between values, the most important first."""
        return ()

    def oddities(self) -> Iterable[str]:
        """Return a sentence about each value that is legal but looks like a mistake."""
        return ()


def setting(
    env: str,
    meaning: str,
    *,
    key: str | None = None,
    default: Any = ...,
    unit: str = "",
    choices: Registry | None = None,
    fixed_on_resume: bool = False,
    **limits: float,
) -> Any:
    """Declare a setting as a field of a `Section`.

    Args:
        env: name of the export.
        meaning: one sentence.
        key: YAML key, and the flag without dashes, if it is not the field's name;
            empty if only the launchers read it.
        default: of the right type; without it the setting is required.
        unit: of a number.
        choices: of a text; None allows any. The type of a few fixed words is a Literal instead.
        fixed_on_resume: a resumed run must not change the value.
        limits: ``ge``, ``gt``, ``le``, ``lt`` as in pydantic.
    """
    public = {
        "env": env,
        "key": key,
        "unit": unit,
        "choices": choices,
        "fixed": fixed_on_resume,
    }
    make_field: Any = Field
    return make_field(default, description=meaning, json_schema_extra=public, **limits)


# A setting that a resumed run must not change.
fixed_setting = functools.partial(setting, fixed_on_resume=True)


@dataclass(frozen=True)
class Setting:
    """A declared setting as users see it."""

    env: str  # name of the export
    key: str  # YAML key; empty if only the launchers read it
    section: type[Section]
    field: str  # its name in the section
    kind: type  # str, int, float, bool or Path
    words: tuple[str, ...]  # legal values that the type lists
    # Legal values that may become more.
    registry: Registry | None = dataclasses.field(compare=False)
    optional: bool  # "none" (or an empty export) is a value
    required: bool  # the section has no default
    default: Any  # None if there is none
    unit: str  # empty if it has none
    meaning: str  # one sentence
    fixed_on_resume: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """Legal values; empty allows any."""
        return self.words if self.registry is None else tuple(self.registry)

    @property
    def group(self) -> str:
        """Title of its group on the settings page and in the help."""
        return self.section.__name__.removesuffix("Config")

    @property
    def flag(self) -> str:
        """The flag, with dashes; empty if only the launchers read the setting."""
        return f"--{self.key.replace('_', '-')}" if self.key else ""

    @property
    def type_name(self) -> str:
        """The type in words, such as ``integer or none``."""
        words = {str: "text", int: "integer", float: "number", bool: "yes/no", Path: "path"}[
            self.kind
        ]
        if self.choices:
            words = " | ".join(self.choices)
        return f"{words} or none" if self.optional else words

    def is_none(self, value: object) -> bool:
        """Return True if a raw value means none; the text "none" counts only
        if the setting is optional.
        """
        return value is None or (self.optional and says_none(value))

    def parse(self, value: object) -> object:
        """Convert text, or a value from YAML or a recipe, to the setting's type,
        without checking limits and choices.

        Raises:
            ValueError: the value is not of that type.
        """
        value = value.strip() if isinstance(value, str) else value
        if self.is_none(value):
            return None
        if self.kind is bool:
            text = str(value).lower()  # covers True and False
            if text not in _YES | _NO:
                raise ValueError(value)
            return text in _YES
        legal = {int: (str, int), float: (str, int, float)}.get(self.kind, (str, int, float, Path))
        if isinstance(value, bool) or not isinstance(value, legal):
            raise ValueError(value)
        text = str(value)
        if not text or _UNPRINTABLE.search(text):
            raise ValueError(value)
        return parse_number(text, self.kind) if self.kind in (int, float) else self.kind(text)


def says_none(value: object) -> bool:
    """Return True if a raw value is None or a text that means none."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NONE)


def is_yes_or_no(word: str) -> bool:
    """Return True if a word is a value of a yes/no setting."""
    return word.lower() in _YES | _NO


@cache
def settings_of(section: type[Section]) -> tuple[Setting, ...]:
    """Return the settings of a section in the order of its fields."""
    return tuple(_setting(section, name) for name in section.model_fields)


def _setting(section: type[Section], name: str) -> Setting:
    declared = section.model_fields[name]
    public: Any = declared.json_schema_extra
    kinds = [kind for kind in _alternatives(declared.annotation) if kind is not types.NoneType]
    assert len(kinds) == 1, f"a setting has one type or none: {section.__name__}.{name}"
    kind = kinds[0]
    words = ()
    if typing.get_origin(kind) is Literal:
        words = typing.get_args(kind)
        kind = str
    required = declared.default is PydanticUndefined
    return Setting(
        env=public["env"],
        key=name if public["key"] is None else public["key"],
        section=section,
        field=name,
        kind=kind,
        words=words,
        registry=public["choices"],
        optional=types.NoneType in _alternatives(declared.annotation),
        required=required,
        default=None if required else declared.default,
        unit=public["unit"],
        meaning=str(declared.description),
        fixed_on_resume=public["fixed"],
    )


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)
