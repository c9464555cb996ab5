"""What the tests of every form of the optimizers share: published runs, settings, specifications."""

from __future__ import annotations

from typing import Any

from mlbert.optim.adam import Adam
from mlbert.optim.adamw import AdamW, DecoupledAdamW
from mlbert.optim.lamb import Lamb
from mlbert.optim.stableadamw import DecoupledStableAdamW, StableAdamW
from reference_optimizers import ReferenceAdamW, ReferenceLamb, ReferenceStableAdamW

COMMON: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.05, "max_grad_norm": 1.0}
DECOUPLED = {"base_lr": 0.5}
# Method -> its own settings, its specification in float64.
METHODS: dict[type[Adam], tuple[dict[str, float], type[ReferenceAdamW]]] = {
    Lamb: ({}, ReferenceLamb),
    AdamW: ({}, ReferenceAdamW),
    DecoupledAdamW: (DECOUPLED, ReferenceAdamW),
    StableAdamW: ({}, ReferenceStableAdamW),
    DecoupledStableAdamW: (DECOUPLED, ReferenceStableAdamW),
}
CHANGING = [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.02]


def _published(
    cls: type[Adam], base: float, beta_2: float, decay: float, rates: list[float], clip: float | None = None, **own: Any
) -> tuple[type[Adam], list[float], dict[str, Any]]:
    settings = {"betas": (0.9, beta_2), "eps": 1e-6, "weight_decay": decay, "max_grad_norm": clip, **own}
    return cls, [base * rate for rate in rates], settings


# tests/assets/lamb and tests/assets/adamw: method, rates and settings of each run.
PUBLISHED = {
    "lamb_default": _published(Lamb, 0.002, 0.999, 0.01, [1.0] * 10),
    "lamb_mlperf8k": _published(Lamb, 0.00288293, 0.88, 0.0166629, [1.0] * 10, betas=(0.88, 0.88)),
    "lamb_clip_inside": _published(Lamb, 0.01, 0.999, 0.01, [1.0] * 10, clip=1.0),
    "adamw_no_bias_correction": _published(AdamW, 0.001, 0.999, 0.01, [1.0] * 10, bias_correction=False),
    "mosaic_default_const": _published(DecoupledAdamW, 0.0005, 0.98, 1e-5, [1.0] * 10, base_lr=0.0005),
    "mosaic_sched_wd1e-2": _published(DecoupledAdamW, 0.0005, 0.98, 0.01, CHANGING, base_lr=0.0005),
    "decoupled_stableadamw_modernbert": _published(DecoupledStableAdamW, 0.0008, 0.98, 1e-5, CHANGING, base_lr=0.0008),
    "decoupled_wd1e-2": _published(DecoupledStableAdamW, 0.0008, 0.98, 0.01, CHANGING, base_lr=0.0008),
    "stableadamw_wd1e-2": _published(StableAdamW, 0.003, 0.99, 0.01, CHANGING),
    "stableadamw_wd0": _published(StableAdamW, 0.003, 0.99, 0.0, CHANGING),
}
# The programs of these decay every tensor, LayerNorm and biases too.
DECAY_ALL = {name for name in PUBLISHED if "lamb" not in name and "no_bias" not in name}
