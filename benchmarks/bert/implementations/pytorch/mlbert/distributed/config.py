"""Settings of the ranks."""

from __future__ import annotations

from typing import Literal

from mlbert.config.section import Section, setting


class DistributedConfig(Section):
    """How ranks share gradients, weights and the update."""

    gradient_clipping: Literal["after", "before", "buckets"] = setting(
        "GRADIENT_CLIPPING",
        "What is clipped: the gradient's sum over the ranks, each rank's own before that, or each bucket of its own.",
        key="gradient_clipping",
        default="after",
        fixed_on_resume=True,
    )
    gradient_reduction: Literal["fp32", "bf16"] = setting(
        "GRADIENT_REDUCTION",
        "How gradients travel to be summed over the ranks; sums are added up in float32 either way.",
        key="gradient_reduction",
        default="fp32",
    )
    bucket_mib: int = setting(
        "BUCKET_MIB",
        "Size of the buckets in which gradients travel.",
        key="bucket_mib",
        default=25,
        unit="MiB",
        ge=1,
        le=4096,
    )
    sharded_optimizer: Literal["off", "node", "all"] = setting(
        "SHARDED_OPTIMIZER",
        "Ranks over which the optimizer's state and update are shared out: none, those of a node, or all.",
        key="sharded_optimizer",
        default="off",
    )
    weights_allgather: Literal["fp32", "bf16", "e5m2"] = setting(
        "WEIGHTS_ALLGATHER",
        "How a sharded optimizer hands out new weights; the exact ones stay with the rank that owns them.",
        key="weights_allgather",
        default="fp32",
    )
    join_timeout: float | None = setting(
        "JOIN_TIMEOUT",
        "Longest that a rank waits for the others at start-up; none: 120 * (1 + (ranks / 1024)^2).",
        key="join_timeout",
        default=None,
        unit="seconds",
        ge=1,
        le=86400,
    )
