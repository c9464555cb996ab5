"""From recipe defaults, YAML files, exports, flags and ``key=value`` words to one checked `TrainConfig`.

Later wins: recipe default, YAML (a file's ``extends:`` parent first), environment export, flag or ``key=value``.
Nothing unknown passes: a wrong name or value is a `UserError` that names it. This module is the only reader of the
process environment in the package, apart from the identity of a rank in ``mlbert.dist.world``.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbert.core.bin_counts import validate_bin_counts
from mlbert.core.config_files import check_exports, name_shape, read_yaml, unknown_name
from mlbert.core.errors import UserError
from mlbert.core.provenance import hide_credentials
from mlbert.core.rules import TARGET_MLM_ACCURACY
from mlbert.core.schedules import SCHEDULES, Linear, parse_milestones
from mlbert.core.setting import Setting
from mlbert.core.setting_words import missing, value_words
from mlbert.core.settings import TrainConfig, settings_by_env, train_settings

_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}
_NONE = {"", "none", "null"}
_KEY_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NEAR_MISS_CUTOFF = 0.9
_UNTOLD = re.compile("[\n\r\0\x1b\ud800-\udfff]")  # no log holds them; the last are bytes that are no UTF-8
_RECIPE, _NOT_SET = "recipe ", "not set"  # origins of what the user has not given


@dataclass(frozen=True)
class Resolved:
    """A checked configuration and where each value came from.

    An origin is ``file:line`` of an export or a YAML line (relative to the tree where it lies in it), ``environment
    NAME`` where no sourced file gave it, ``flag --name``, ``argument name=``, ``recipe <name>`` for a recipe's default,
    or "not set".
    """

    config: TrainConfig
    origin: Mapping[str, str]  # by field name
    warnings: Sequence[str] = ()  # sentences about what looks like a mistake but is legal
    files: Sequence[Path] = ()  # configuration files that were read, first the sourced one or the first YAML file

    def as_table(self) -> list[tuple[str, str, str, str]]:
        """Rows (field, value, environment name, origin) for printing, in table order."""
        rows = train_settings().items()
        return [(name, value_words(getattr(self.config, name)), row.env, self.origin[name]) for name, row in rows]

    def as_configuration(self) -> dict[str, dict[str, Any]]:
        """Environment name to value and origin, in plain values, for the log."""
        return {
            row.env: {"value": _as_plain(getattr(self.config, name)), "origin": self.origin[name]}
            for name, row in train_settings().items()
        }

    def as_json(self) -> str:
        """The configuration with origins as indented JSON, for the run folder."""
        values = {name: _as_plain(getattr(self.config, name)) for name in train_settings()}
        return json.dumps({"config": values, "origin": dict(self.origin), "warnings": list(self.warnings)}, indent=2)


@dataclass(frozen=True)
class CommandLine:
    """Words of a command line, sorted but not yet checked against types."""

    flags: Mapping[str, str] = field(default_factory=dict)  # field name to text
    yaml_files: Sequence[Path] = ()  # arguments of --config
    overrides: Sequence[str] = ()  # key=value


def environment() -> Mapping[str, str]:
    """The process environment."""
    return os.environ


def split_arguments(words: Sequence[str]) -> CommandLine:
    """Sort command line words into flags, ``--config FILE`` and ``key=value``.

    Accepts ``--flag value`` and ``--flag=value``, with dashes or underscores; a yes/no flag may stand alone.

    Raises:
        UserError: an unknown flag, a flag without its value, or a stray word.
    """
    flags: dict[str, str] = {}
    yaml_files: list[Path] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if not _KEY_VALUE.fullmatch(word):
                raise UserError(word, "is neither a flag nor key=value", "See mlbert train --help")
            overrides.append(word)
            continue
        flag, has_value, value = word.partition("=")
        name = "config" if flag == "--config" else _field_of_flag(flag)
        if not has_value:
            stands_alone = not rest or rest[0].startswith("--") or rest[0].lower() not in _YES | _NO
            if name != "config" and train_settings()[name].kind is bool and stands_alone:
                value = "1"
            elif rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            else:
                raise UserError(flag, "has no value", f"Write {flag} VALUE")
        if name == "config":
            yaml_files.append(Path(value))
        elif name in flags:
            raise UserError(flag, "is given twice", "Give it once")
        else:
            flags[name] = value
    return CommandLine(flags, yaml_files, overrides)


def peek(
    name: str,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    yaml_files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
) -> str | None:
    """The value that one field will get, before there are recipe defaults: used to find the recipe itself."""
    layers = _layers({}, environ, flags or {}, yaml_files, overrides, [])
    given = [layer[name][0] for layer in layers if name in layer]
    return str(given[-1]) if given else None


def resolve(
    recipe_defaults: Mapping[str, object],
    environ: Mapping[str, str] | None,
    flags: Mapping[str, str],
    yaml_files: Sequence[Path],
    overrides: Sequence[str],
    given: Mapping[str, tuple[object, str]] | None = None,
    given_files: Sequence[Path] = (),
) -> Resolved:
    """Merge all sources into one checked configuration.

    Args:
        recipe_defaults: field name to value of the right type.
        environ: the environment; ``None`` reads the process's.
        flags: field name (or flag) to text.
        yaml_files: files of ``field: value`` lines, later ones win; ``extends: other.yaml`` names a parent.
        overrides: words ``field=value``.
        given: settings that were made of another program's configuration, field name to value and origin; they win.
        given_files: where they come from.

    Raises:
        UserError: unknown name, missing value, wrong type, value out of range, or values that contradict each other.
    """
    environ = environment() if environ is None else environ
    chosen: dict[str, tuple[object, str]] = {}
    files: list[Path] = [*given_files]
    for layer in [*_layers(recipe_defaults, environ, flags, yaml_files, overrides, files), given or {}]:
        chosen.update(layer)
    values: dict[str, Any] = {}
    absent: list[Setting] = []
    for name, row in train_settings().items():
        value, origin = chosen.setdefault(name, (None if row.optional else "", _NOT_SET))
        if not row.optional and str(value).strip() == "":
            absent.append(row)
        else:
            values[name] = convert(row, value, origin)
    if absent:
        raise missing(absent, environ.get("CONFIG_FILE", ""))
    origins = {name: origin for name, (_, origin) in chosen.items()}
    config = TrainConfig(**values)
    validate(config)
    return Resolved(config, origins, [*_near_misses(environ), *_oddities(config), *_unread(config, origins)], files)


def convert(row: Setting, value: object, origin: str) -> object:
    """A value of the row's type from text or from a YAML or recipe value.

    Raises:
        UserError: wrong type or out of range.
    """
    subject = row.env if origin == f"environment {row.env}" else f"{row.env} ({origin})"
    remedy = f"Give {_article(row)}" + (f" in {row.unit}" if row.unit else "")
    if value is None or (isinstance(value, str) and value.strip().lower() in _NONE and row.optional):
        if not row.optional:
            raise UserError(subject, "is none", remedy)
        return None
    try:
        converted = _parse(row, value)
    except ValueError:
        raise UserError(subject, f"{value!r} is not {_article(row)}", remedy) from None
    reason = row.limits.reason_against(converted)
    if reason is not None:
        raise UserError(subject, f"{str(value).strip()} is not legal, it {reason}", row.meaning)
    return converted


def validate(config: TrainConfig) -> None:
    """Check the relations between values.

    Raises:
        UserError: the first contradiction found.
    """
    packs, parts = config.train_batch_size, config.gradient_accumulation_steps
    if packs % parts:
        remedy = "BATCHSIZE counts the packs of all accumulation steps together; choose one that is divisible"
        raise UserError("GRADIENT_STEPS", f"{parts} does not divide BATCHSIZE {packs}", remedy)
    rate, most = config.average_packing_rate, config.max_sequences_per_pack
    if rate > most:
        remedy = "Set PACKING_FACTOR=1 for unpacked training, or allow more sequences"
        raise UserError("PACKING_FACTOR", f"is {rate:g} while MAX_SEQUENCES_PER_PACK is {most}", remedy)
    if config.warmup_steps and config.warmup_proportion:
        reason = f"is {config.warmup_proportion:g} while WARMUP_STEPS is {config.warmup_steps}"
        raise UserError("WARMUP_PROPORTION", reason, "Set one of the two to 0")
    if config.save_checkpoint_steps and not config.keep_checkpoints:
        reason = f"is 0 while SAVE_CHECKPOINT_STEPS is {config.save_checkpoint_steps}"
        raise UserError("KEEP_CHECKPOINTS", reason, "Keep at least 1, or set SAVE_CHECKPOINT_STEPS=0")
    if config.init_checkpoint is not None and config.init_checkpoint == config.output_dir:
        raise UserError("INIT_CHECKPOINT", "is the run folder LOGDIR itself", "Name the checkpoint to start from")
    validate_bin_counts(config)
    _validate_schedule(config)


def _validate_schedule(config: TrainConfig) -> None:
    reads = SCHEDULES[config.schedule].SETTINGS
    rows = train_settings()
    for name in ("lr_decay_steps", "lr_milestones", "lr_gamma"):
        if name in reads and getattr(config, name) is None:
            reason = f"is not set, and SCHEDULE={config.schedule} needs it"
            raise UserError(rows[name].env, reason, f"Export {rows[name].env}, or give {rows[name].flag}")
    end = config.lr_decay_end or config.max_steps
    if issubclass(SCHEDULES[config.schedule], Linear) and config.num_warmup_steps >= end:
        reason = f"ends at step {end}, the warm-up takes {config.num_warmup_steps}"
        raise UserError(f"SCHEDULE={config.schedule}", reason, "Set a shorter warm-up, or a later LR_DECAY_END")
    if "lr_decay_steps" in reads and config.lr_decay_steps is not None and config.lr_decay_steps > end:
        reason = f"{config.lr_decay_steps} is more than the {end} steps until the decay ends"
        raise UserError("LR_DECAY_STEPS", reason, "Set fewer, or more MAX_STEPS")
    if "lr_milestones" in reads and config.lr_milestones is not None:
        try:
            parse_milestones(config.lr_milestones)
        except ValueError:
            reason = f"{config.lr_milestones!r} are not ascending steps with commas between"
            raise UserError("LR_MILESTONES", reason, "Give for example 800,1200") from None


def _layers(
    recipe_defaults: Mapping[str, object],
    environ: Mapping[str, str] | None,
    flags: Mapping[str, str],
    yaml_files: Sequence[Path],
    overrides: Sequence[str],
    files: list[Path],
) -> list[dict[str, tuple[object, str]]]:
    """Field name to (raw value, origin) for each source, weakest first; ``files`` gets the files that are read."""
    environ = environment() if environ is None else environ
    known = train_settings()
    unknown = [name for name in recipe_defaults if name not in known]
    assert not unknown, f"recipe defaults name no setting: {unknown}"
    recipe = f"{_RECIPE}{recipe_defaults.get('recipe')}"
    layers = [{name: (value, recipe) for name, value in recipe_defaults.items()}]
    exports = _from_environment(environ, files)
    layers += [*(read_yaml(Path(path), files) for path in yaml_files), exports]
    last: dict[str, tuple[object, str]] = {}
    for flag, value in flags.items():
        name = _field_of_flag(flag)
        last[name] = (value, f"flag {known[name].flag}")
    for word in overrides:
        name, value = _split_override(word)
        if name in last:
            raise UserError(word, f"{name} is already given by {last[name][1]}", "Give it once")
        last[name] = (value, f"argument {name}=")
    return [*layers, last]


def _from_environment(environ: Mapping[str, str], files: list[Path]) -> dict[str, tuple[object, str]]:
    """What is exported; the origin is the line of the sourced config, unless something else set the variable since."""
    config_file = Path(environ.get("CONFIG_FILE", ""))
    exports = check_exports(config_file, files) if config_file.is_file() else {}
    found: dict[str, tuple[object, str]] = {}
    for name, row in train_settings().items():
        if row.env in environ:
            value, export = environ[row.env], exports.get(row.env)
            place = export.place if export is not None and export.gives(value) else f"environment {row.env}"
            found[name] = (value, place)
    return found


def _field_of_flag(flag: str) -> str:
    wanted = "--" + flag.removeprefix("--").replace("-", "_")
    by_flag = {row.flag: name for name, row in train_settings().items()}
    if wanted in by_flag:
        return by_flag[wanted]
    raise unknown_name(f"--{flag.removeprefix('--')}", "flag", [*by_flag, "--config"])


def _split_override(word: str) -> tuple[str, str]:
    match = _KEY_VALUE.fullmatch(word)
    if match is None:
        raise UserError(word, "is not of the form key=value", "Write for example learning_rate=1e-3")
    name, value = match.groups()
    if name not in train_settings():
        raise unknown_name(name, "key", train_settings())
    return name, value


def _parse(row: Setting, value: object) -> object:
    """Text or a typed value to the row's type; ``ValueError`` when it does not fit."""
    value = value.strip() if isinstance(value, str) else value
    if row.kind is bool:
        text = str(value).lower()  # of True and False too
        if text not in _YES | _NO:
            raise ValueError(value)
        return text in _YES
    legal = {int: (str, int), float: (str, int, float)}.get(row.kind, (str, int, float, Path))
    if isinstance(value, bool) or not isinstance(value, legal):
        raise ValueError(value)
    text = str(value)
    if not text or _UNTOLD.search(text):
        raise ValueError(value)
    converted = row.kind(text)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ValueError(value)
    return converted


def _near_misses(environ: Mapping[str, str]) -> list[str]:
    """Sentences about exports that look like a misspelt setting, or have its name elsewhere (LEARNING_RATE for LR)."""
    known = settings_by_env()
    elsewhere = {name_shape(word): row.env for row in known.values() for word in (row.name, row.flag) if word}
    by_shape = {name_shape(env): env for env in known}
    sentences = []
    for name in environ:
        if name in known or not name.isupper():
            continue
        shape = name_shape(name)
        close = difflib.get_close_matches(shape, by_shape, n=1, cutoff=_NEAR_MISS_CUTOFF)
        meant = by_shape[close[0]] if close else elsewhere.get(shape)
        if meant:
            sentences.append(f"{name} is exported but is no setting; did you mean {meant}?")
    return sentences


def _oddities(config: TrainConfig) -> list[str]:
    sentences = []
    ramp_end, is_closed = config.start_warmup_step + config.num_warmup_steps, config.submission_division == "closed"
    if ramp_end > config.max_steps:
        words = f"the warm-up ends at step {ramp_end}, after MAX_STEPS {config.max_steps}: LR is never reached"
        sentences.append(words)
    if config.exchange_by == "gather" and config.exchange_padding == "off":
        sentences.append("EXCHANGE_BY is gather, but nothing is exchanged: EXCHANGE_PADDING is off")
    if is_closed and config.target_mlm_accuracy != TARGET_MLM_ACCURACY:
        sentences.append(
            f"the closed division wants 0.72, TARGET_MLM_ACCURACY is {config.target_mlm_accuracy or 'none'}"
        )
    if is_closed and (config.optimizer, config.schedule) != ("lamb", "polynomial"):
        words = f"the closed division wants LAMB with polynomial decay, not {config.optimizer} with {config.schedule}"
        sentences.append(words)
    return sentences


def _unread(config: TrainConfig, origins: Mapping[str, str]) -> list[str]:
    """Sentences about settings that the user gave, not the recipe, and that the schedule does not read."""
    some_read = {name for schedule in SCHEDULES.values() for name in schedule.SETTINGS}
    unread = some_read.difference(SCHEDULES[config.schedule].SETTINGS)
    return [
        f"{row.env} is set, but SCHEDULE={config.schedule} does not read it"
        for name, row in train_settings().items()
        if name in unread and getattr(config, name) is not None and not origins[name].startswith((_RECIPE, _NOT_SET))
    ]


def _article(row: Setting) -> str:
    """The row's type as a sentence names it: ``an integer or none``, ``one of open | closed``, ``text``."""
    first = row.type_name[0]
    article = "one of " if row.limits.choices else "" if row.kind is str else "an " if first in "aeiou" else "a "
    return article + row.type_name


def _as_plain(value: object) -> object:
    return hide_credentials(str(value)) if isinstance(value, Path | str) else value
