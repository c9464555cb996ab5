"""Spread a config's batch over another number of GPUs, so that its hyper-parameters stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlbert.config.sources import ConfigName
from mlbert.host.errors import UserError

# Recipes in which a step's gradient is that of the samples of all ranks together.
_RECIPES = ("packed_lamb", "masked_lm", "masked_lm_stored", "masked_lm_text")
_FIRST_LINES = re.compile(
    r"^# \d+ nodes? x \d+ GPUs? x \d+ (\w+) per optimizer step x \d+ accumulation steps?",
    re.MULTILINE,
)
_GPUS = re.compile(r"\bgpu:\d+")


@dataclass(frozen=True)
class Spread:
    """A config for another number of GPUs.

    Attributes:
        parts: of its name.
        exports: the values that change, by export.
        lines: what changes and what does not, for the user.
    """

    parts: ConfigName
    exports: Mapping[str, str]
    lines: tuple[str, ...]

    def config(self, text: str) -> str:
        """Return the text of the config with its new values."""
        for name, value in self.exports.items():
            line = f"export {name}={value}"
            pattern = re.compile(rf"^export {name}=(\"[^\"\n]*\"|\S*)", re.MULTILINE)
            if not pattern.search(text):
                text = f"{text.rstrip()}\n{line}\n"
            text = pattern.sub(line, text)
        new = self.parts
        shape = (
            f"# {new.nodes} {_plural(new.nodes, 'node')} x {new.ranks} "
            f"{_plural(new.ranks, 'GPU')} x {new.batch} \\1 per optimizer step x "
            f"{new.accumulation} {_plural(new.accumulation, 'accumulation step')}"
        )
        return _FIRST_LINES.sub(shape, text)

    def site(self, text: str) -> str:
        """Return the text of env.sh with the new number of GPUs of a node."""
        return _GPUS.sub(f"gpu:{self.parts.ranks}", text)


def spread_batch(
    parts: ConfigName, exports: Mapping[str, str], nodes: int | None, gpus: int | None
) -> Spread:
    """Return the config with the same batch of all GPUs and, in each, micro-batches that are not
    larger than before.

    Args:
        parts: of the config's name.
        exports: its exports as written.
        nodes, gpus: the new numbers, the second one of each node; None: as before.

    Raises:
        UserError: the batch is not divisible, or the result depends on the number of GPUs.
    """
    new_nodes = nodes or parts.nodes
    new_ranks = gpus or parts.ranks
    option = f"--nodes {new_nodes} --gpus {new_ranks}"
    _check_recipe(exports, option)
    before = parts.nodes * parts.ranks
    after = new_nodes * new_ranks
    total = before * parts.batch
    batch = _divided(total, after, option, f"the batch of {total}")
    part = parts.batch // parts.accumulation
    steps = next(
        steps for steps in range(1, batch + 1) if batch % steps == 0 and batch <= steps * part
    )
    changed = {
        "DGXNNODES": str(new_nodes),
        "DGXNGPU": str(new_ranks),
        "BATCHSIZE": str(batch),
        "GRADIENT_STEPS": str(steps),
    }
    if start := exports.get("BATCHSIZE_WARMUP_START"):
        words = f"the first step's batch of {int(start) * before}"
        changed["BATCHSIZE_WARMUP_START"] = str(_divided(int(start) * before, after, option, words))
    if minutes := exports.get("WALLTIME"):
        changed["WALLTIME"] = str(-(-int(minutes) * before // after))
    lines = [
        f"{name}: {exports.get(name, '1')} -> {value}"
        for name, value in changed.items()
        if exports.get(name, "1") != value
    ]
    lines.append(
        f"unchanged: the batch of all GPUs ({total}), and with it learning rate, schedule and "
        "evaluations"
    )
    lines.append(
        f"each GPU takes {batch} in {steps} {_plural(steps, 'part')} of {batch // steps} "
        f"(before: parts of {part})"
    )
    if "WALLTIME" in changed and before != after:
        lines.append("WALLTIME is in proportion to the GPUs: measure yours and correct it")
    new = replace(parts, nodes=new_nodes, ranks=new_ranks, batch=batch, accumulation=steps)
    return Spread(new, changed, tuple(lines))


def _check_recipe(exports: Mapping[str, str], option: str) -> None:
    recipe = exports.get("RECIPE", "")
    remedy = "Start from a system with another recipe, or edit the copy and its learning rate"
    if recipe not in _RECIPES:
        reason = (
            f"RECIPE={recipe} treats each GPU's samples separately, so the results would change"
        )
        raise UserError("config.conflict", option, reason, remedy)
    if exports.get("GRADIENT_CLIPPING") == "before":
        reason = "GRADIENT_CLIPPING=before clips each GPU's gradient, so its results change"
        raise UserError("config.conflict", option, reason, remedy)


def _divided(total: int, ranks: int, option: str, words: str) -> int:
    if total % ranks == 0:
        return total // ranks
    good = [number for number in range(1, total + 1) if total % number == 0]
    fewer = max(number for number in good if number < ranks)
    more = next((number for number in good if number > ranks), None)
    numbers = f"{fewer}" if more is None else f"{fewer} or {more}"
    reason = f"{words} is not divisible by {ranks} GPUs"
    raise UserError("config.conflict", option, reason, f"Use {numbers} GPUs")


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
