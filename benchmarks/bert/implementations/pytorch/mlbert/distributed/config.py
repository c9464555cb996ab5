"""Settings of the ranks."""

from __future__ import annotations

from typing import Literal

from mlbert.config.section import Section, fixed_setting, setting


class DistributedConfig(Section):
    """How ranks share gradients, weights and the update."""

    gradient_clipping: Literal["after", "before", "buckets"] = fixed_setting(
        "GRADIENT_CLIPPING",
        "Clip the gradient after or before the sum over the ranks, "
        "or each rank's buckets separately.",
        default="after",
    )
    gradient_reduction: Literal["fp32", "bf16"] = fixed_setting(
        "GRADIENT_REDUCTION",
        "Format in which ranks exchange gradients; sums are computed in float32 either way.",
        default="fp32",
    )
    bucket_mib: int = fixed_setting(
        "BUCKET_MIB", "Size of the gradient buckets.", default=25, unit="MiB", ge=1, le=4096
    )
    sharded_optimizer: Literal["off", "node", "all"] = setting(
        "SHARDED_OPTIMIZER",
        "Shard the optimizer's state and update over no ranks, the ranks of a node, or all ranks.",
        default="off",
    )
    weights_allgather: Literal["fp32", "bf16", "e5m2"] = fixed_setting(
        "WEIGHTS_ALLGATHER",
        "Format in which a sharded optimizer sends new weights; "
        "the owning rank keeps the exact ones.",
        default="fp32",
    )
    join_timeout: float | None = setting(
        "JOIN_TIMEOUT",
        "How long a rank waits for the others at start-up; none means 120 * (1 + ranks / 1024).",
        default=None,
        unit="seconds",
        ge=1,
        le=86400,
    )
    read_timeout: float = setting(
        "READ_TIMEOUT",
        "How long a run of several ranks waits for data if the storage stalls; "
        "no node counts as lost meanwhile.",
        default=15.0,
        unit="minutes",
        ge=1,
        le=1440,
    )
