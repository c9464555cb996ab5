"""Published models and how they were trained: `configs/pretraining_presets.toml` as objects.

Needs no PyTorch: the planner reads it, too.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError, nearest
from mlbert.host.provenance import shipped

FILE = "pretraining_presets.toml"
ROW_TOKENS = 1024  # tokens of a row in the file, and the length of the first phase
EXTENDED_TOKENS = 8192  # length after the context extension, tokens
SHORT_ROPE_THETA = 10_000.0  # rotary base of the global layers before the extension
LONG_ROPE_THETA = 160_000.0  # and from the extension on
BETAS = (0.9, 0.98)
EPSILON = 1e-6
OPTIMIZER = "decoupled_stableadamw"
MASKING_RATE = 0.30  # fraction of tokens to predict in training


@dataclass(frozen=True)
class Preset:
    """One published model and its recipe.

    Attributes:
        name: in the file.
        shape: with the rotary base of a finished model.
        learning_rate, extend_rate: of the constant phase and of the context extension.
        weight_decay: per step at the full rate.
        warmup_tokens: tokens over which the rate rises.
        rows: of a step, `ROW_TOKENS` tokens each.
        first_rows: of the first step; the batch grows to ``rows`` over ``growth_tokens``.
        micro_rows: rows that a GPU of 80 GB computes at a time.
        published: tokens of each phase, by its name; empty if the model is not published.
        h100_rate: published tokens/s of one H100 SXM; 0 if unknown.
    """

    name: str
    shape: BertConfig
    learning_rate: float
    extend_rate: float
    weight_decay: float
    warmup_tokens: int
    rows: int
    first_rows: int
    growth_tokens: int
    micro_rows: int
    published: Mapping[str, int]
    h100_rate: int

    @property
    def step_tokens(self) -> int:
        """Tokens of a full step."""
        return self.rows * ROW_TOKENS


def names() -> tuple[str, ...]:
    """Return the names of all presets in the order of the file."""
    return tuple(_file())


def find(name: str, option: str) -> Preset:
    """Return a preset.

    Raises UserError, which names the option, if there is none of this name.
    """
    entries = _file()
    if name not in entries:
        near = nearest(name, sorted(entries))
        remedy = f"Did you mean {near}?" if near else f"Use a name in configs/{FILE}"
        raise UserError("config.choice", f"{option} {name}", "is not a known model", remedy)
    values = dict(entries[name])
    base = BertConfig.from_json(shipped("configs") / values.pop("shape"))
    shape = replace(base, **values.pop("differs", {}))
    return Preset(name=name, shape=shape, **values)


@functools.cache
def _file() -> Mapping[str, Mapping]:
    text = (shipped("configs") / FILE).read_text(encoding="utf-8")
    return tomllib.loads(text)
