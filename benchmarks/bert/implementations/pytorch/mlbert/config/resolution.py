"""Resolve recipe defaults, YAML files, exports, flags
and ``key=value`` words into one checked `Configuration`.

Later sources win: section default, recipe override, YAML (a file's ``extends:`` parent first),
environment export, flag or ``key=value``. An unknown name or an illegal value is a `UserError` that
names it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlbert.config.arguments import CommandLine, key_of_flag
from mlbert.config.configuration import Catalog, Configuration
from mlbert.config.recipe import Recipe
from mlbert.config.section import (
    Contradiction,
    Section,
    Setting,
    says_none,
    settings_of,
)
from mlbert.config.sources import check_exports, read_yaml
from mlbert.config.words import REMOVED, missing, unknown_name, value_words
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, hide_credentials, name_shape
from mlbert.host.texts import plain_words

Layer = Mapping[str, tuple[object, str]]  # key to raw value and origin

_NEAR_MISS_CUTOFF = 0.9
_SHOULD_BE = "Input should be "  # how pydantic begins the sentence about a limit
_NOT_SET = "not set"  # origin of a setting without a value from any source
_RECIPE = "recipe "  # prefix of the origin of a recipe's value
_ARGUMENT = "argument "  # prefix of the origin of a name=value word
_ENVIRONMENT = "environment "  # prefix of the origin of an export that is not in the sourced config


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and the origin of each value.

    An origin is ``file:line`` of an export or a YAML line (relative to the repository if inside
    it), ``environment NAME`` if no sourced file set it, ``flag --name``, ``argument name=``,
    ``recipe <name>`` for a default of the recipe or one of its sections, or "not set".
    """

    recipe: Recipe
    config: Configuration
    origin: Mapping[str, str]  # by key
    warnings: Sequence[str] = ()  # sentences about legal values that look like mistakes
    # Configuration files that were read; first the sourced one or the first YAML file.
    files: Sequence[Path] = ()

    def as_table(self) -> list[tuple[str, str, str, str]]:
        """Return rows (key, value, environment name, origin)."""
        known = self.config.catalog.by_key.items()
        return [
            (key, value_words(self.config.get(one)), one.env, self.origin[key])
            for key, one in known
        ]

    def as_lines(self) -> list[str]:
        """Return the rows of the table for printing."""
        return [f"{env}={value}  ({key}, {origin})" for key, value, env, origin in self.as_table()]

    def changed(self) -> list[str]:
        """Return ``NAME=value`` of each setting whose value is not the recipe's default."""
        defaults = {
            one.env: value_words(self.recipe.default(one))
            for one in self.config.catalog.by_env.values()
        }
        return [f"{env}={value}" for _, value, env, _ in self.as_table() if value != defaults[env]]

    def as_configuration(self) -> dict[str, dict[str, Any]]:
        """Return plain values and origins by environment name, for the log."""
        known = self.config.catalog.by_key.items()
        return {
            one.env: {"value": _as_plain(self.config.get(one)), "origin": self.origin[key]}
            for key, one in known
        }

    def as_json(self) -> str:
        """Return the configuration with origins as indented JSON, for the run folder."""
        values = {
            key: _as_plain(self.config.get(one)) for key, one in self.config.catalog.by_key.items()
        }
        return json.dumps(
            {"config": values, "origin": dict(self.origin), "warnings": list(self.warnings)},
            indent=2,
        )


def peek(
    catalog: Catalog,
    key: str,
    environ: Mapping[str, str] | None = None,
    line: CommandLine = CommandLine(),
) -> str | None:
    """Return the raw value that a setting will get.

    Does not need the recipe: used to find the recipe itself.
    """
    given = [layer[key][0] for layer in _layers(catalog, environ, line, []) if key in layer]
    return str(given[-1]) if given else None


def resolve(
    catalog: Catalog,
    recipe: Recipe,
    environ: Mapping[str, str] | None,
    line: CommandLine = CommandLine(),
    given: Layer | None = None,
    given_files: Sequence[Path] = (),
    readers: Sequence[Recipe] = (),
) -> Resolved:
    """Merge all sources into one checked configuration.

    Args:
        catalog: of all settings.
        recipe: defines sections and defaults.
        environ: the environment; None means the process's.
        line: the arguments of the command line.
        given: settings converted from another program's configuration,
            key to value and origin; they win.
        given_files: the files of ``given``.
        readers: all recipes, to name those that read a setting that this one does not.

    Raises:
        UserError: unknown name, missing value, wrong type, value out of range, a setting that the
            recipe does not read, or values that contradict each other.
    """
    environ = environment() if environ is None else environ
    files: list[Path] = [*given_files]
    chosen: dict[str, tuple[object, str]] = {}
    for layer in [*_layers(catalog, environ, line, files), given or {}]:
        chosen.update(layer)
    unread = _unread_by_recipe(catalog, recipe, chosen, readers)
    absent = [
        one
        for section in recipe.sections
        for one in settings_of(section)
        if _is_absent(one, recipe, chosen)
    ]
    if absent:
        raise missing(absent, environ.get("CONFIG_FILE", ""))
    sections = [_make(section, recipe, chosen) for section in recipe.sections]
    config = Configuration(sections, catalog)
    for found in _contradictions(config):
        raise UserError(found.code, found.subject, found.problem, found.remedy)
    origins = {key: _own_origin(recipe, one) for key, one in catalog.by_key.items()}
    origins |= {key: origin for key, (_, origin) in chosen.items()}
    warnings = [*unread, *_near_misses(catalog, environ), *_oddities(config, origins)]
    return Resolved(recipe, config, origins, warnings, files)


def _contradictions(config: Configuration) -> Iterator[Contradiction]:
    for section in config.sections:
        yield from section.contradictions()
    yield from config.catalog.relations.contradictions(config)


def _oddities(config: Configuration, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about each value that is legal but looks like a mistake.

    Args:
        config: the run's configuration.
        origins: where each value came from, by key.
    """
    for section in config.sections:
        yield from section.oddities()
    yield from config.catalog.relations.oddities(config)
    yield from _unread_by_choice(config, origins)


def _unread_by_choice(config: Configuration, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about each setting that only other choices of a registry read."""
    known = config.catalog.by_key
    for chosen in known.values():
        name = config.get(chosen)
        if chosen.registry is None or name is None:
            continue
        for key in chosen.registry.unread_by(str(name)):
            setting = known[key]
            is_given = not origins[key].startswith((_RECIPE, _NOT_SET))
            if is_given and config.get(setting) is not None:
                yield f"{setting.env} is set, but {chosen.env}={name} does not read it"


def _is_absent(setting: Setting, recipe: Recipe, chosen: Layer) -> bool:
    """Return whether a required value is missing."""
    if setting.key in chosen:
        return recipe.refuses(setting, chosen[setting.key][0])
    return recipe.requires(setting)


def _own_origin(recipe: Recipe, setting: Setting) -> str:
    return f"{_RECIPE}{recipe.name}" if setting.section in recipe.sections else _NOT_SET


def _make(section: type[Section], recipe: Recipe, chosen: Layer) -> Section:
    """Return a section with the chosen values.

    Raises UserError if one has a wrong type or is out of range.
    """
    known = settings_of(section)
    values = {
        one.field: _parse(one, *chosen[one.key]) if one.key in chosen else recipe.default(one)
        for one in known
    }
    try:
        return section(**values)
    except ValidationError as error:
        first = error.errors()[0]
        one = next(setting for setting in known if setting.field == first["loc"][0])
        value, origin = chosen.get(one.key) or (values[one.field], _own_origin(recipe, one))
        raise _illegal(one, value, origin, first) from None


def _parse(setting: Setting, value: object, origin: str) -> object:
    subject = _subject(setting, origin)
    kind = _kind_words(setting)
    remedy = f"Give {kind}"
    remedy += f" ({setting.unit})" if setting.unit else ""
    if value is None and not setting.optional:
        raise UserError("config.value", subject, "is none", remedy, setting.choices)
    try:
        return setting.parse(value)
    except ValueError:
        reason = f"{value!r} is not {kind}"
        raise UserError("config.value", subject, reason, remedy, setting.choices) from None


def _illegal(setting: Setting, value: object, origin: str, error: Any) -> UserError:
    """Return the error for a value of the right type that pydantic rejected."""
    subject = _subject(setting, origin)
    reason = f"{str(value).strip()} is not valid"
    if setting.choices:
        return UserError("config.choice", subject, reason, setting.meaning, setting.choices)
    limit = plain_words(error["msg"].removeprefix(_SHOULD_BE))
    return UserError("config.range", subject, f"{reason}: it must be {limit}", setting.meaning)


def _subject(setting: Setting, origin: str) -> str:
    if origin.startswith(_ARGUMENT):
        return origin  # in the words of the user, which may be those of another program
    return setting.env if origin == f"{_ENVIRONMENT}{setting.env}" else f"{setting.env} ({origin})"


def _unread_by_recipe(
    catalog: Catalog,
    recipe: Recipe,
    chosen: dict[str, tuple[object, str]],
    readers: Sequence[Recipe],
) -> list[str]:
    """Remove settings that the recipe does not read and return warnings;
    "none" and default values pass silently.

    Raises:
        UserError: such a setting is in a flag, a YAML file or a sourced config,
            so it was meant for this run.
    """
    warnings = []
    for key, (value, origin) in list(chosen.items()):
        setting = catalog.by_key[key]
        if recipe.reads(setting):
            continue
        del chosen[key]
        if says_none(value) or _parse(setting, value, origin) in (
            recipe.default(setting),
            setting.default,
        ):
            continue
        names = ", ".join(reader.name for reader in readers if reader.reads(setting))
        words = f"is not read by RECIPE={recipe.name}{f', only by {names}' if names else ''}"
        if origin == f"{_ENVIRONMENT}{setting.env}":
            warnings.append(f"{setting.env} {words}")
        else:
            raise UserError(
                "config.not-read",
                _subject(setting, origin),
                words,
                "Remove it, or set another RECIPE",
            )
    return warnings


def _layers(
    catalog: Catalog, environ: Mapping[str, str] | None, line: CommandLine, files: list[Path]
) -> list[Layer]:
    """Return key to (raw value, origin) for each source, weakest first;
    append the files read to ``files``.
    """
    environ = environment() if environ is None else environ
    exports = _from_environment(catalog, environ, files)
    layers: list[Layer] = [
        *(read_yaml(catalog, Path(path), files) for path in line.yaml_files),
        exports,
    ]
    last: dict[str, tuple[object, str]] = {}
    for flag, text in line.flags.items():
        key = key_of_flag(catalog, flag)
        last[key] = (text, f"flag {catalog.by_key[key].flag}")
    for word in line.overrides:
        key, _, text = word.partition("=")
        if key not in catalog.by_key:
            raise unknown_name(catalog, key, "key", catalog.by_key)
        if key in last:
            raise UserError(
                "config.duplicate",
                word,
                f"{key} is already given by {last[key][1]}",
                "Give it once",
            )
        last[key] = (text, f"{_ARGUMENT}{key}=")
    return [*layers, last]


def _from_environment(catalog: Catalog, environ: Mapping[str, str], files: list[Path]) -> Layer:
    """Return the exported settings; the origin is the sourced config's line
    unless the variable changed since.
    """
    config_file = Path(environ.get("CONFIG_FILE", ""))
    exports = check_exports(catalog, config_file, files) if config_file.is_file() else {}
    found: dict[str, tuple[object, str]] = {}
    for key, one in catalog.by_key.items():
        if one.env in environ:
            value = environ[one.env]
            export = exports.get(one.env)
            place = (
                export.place
                if export is not None and export.gives(value)
                else f"{_ENVIRONMENT}{one.env}"
            )
            found[key] = (value, place)
    return found


def _near_misses(catalog: Catalog, environ: Mapping[str, str]) -> list[str]:
    """Return sentences about exports that were a setting, look like a misspelt one,
    or have its key (LEARNING_RATE for LR).
    """
    known = catalog.by_env
    elsewhere = {name_shape(one.key): one.env for one in catalog.by_key.values()}
    by_shape = {name_shape(env): env for env in known}
    sentences = [
        f"{name} is no longer a setting: {why}" for name, why in REMOVED.items() if name in environ
    ]
    for name in environ:
        if name in known or not name.isupper():
            continue
        shape = name_shape(name)
        close = difflib.get_close_matches(shape, by_shape, n=1, cutoff=_NEAR_MISS_CUTOFF)
        meant = by_shape[close[0]] if close else elsewhere.get(shape)
        if meant:
            sentences.append(f"{name} is exported but is not a setting; did you mean {meant}?")
    return sentences


def _kind_words(setting: Setting) -> str:
    """Return the type as used in a sentence: ``an integer or none``, ``one of the choices``,
    ``text``.
    """
    if setting.choices:
        return "one of the choices or none" if setting.optional else "one of the choices"
    if setting.kind is str:
        return setting.type_name
    article = "an" if setting.type_name[0] in "aeiou" else "a"
    return f"{article} {setting.type_name}"


def _as_plain(value: object) -> object:
    return hide_credentials(str(value)) if isinstance(value, Path | str) else value
