"""Makes the run's step a CUDA graph where CUDA_GRAPH_MODE asks for it; see `mlbert.models.graphed_step`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mlbert.core.errors import UserError
from mlbert.dist.capture import Capture, CudaCapture
from mlbert.dist.world import World
from mlbert.feed.budget import Budget
from mlbert.models import BertForPreTraining, GraphedStep, GraphMode
from mlbert.ops.attention import TRITON_HEAD_SIZES as HEAD_SIZES

SETTING = "CUDA_GRAPH_MODE"
NONE = "none"


def check_graph_mode(mode: str, device: torch.device, ops: Mapping[str, str], head_size: int) -> None:
    """Refuses what cannot be captured, before anything is built.

    Args:
        mode: the setting.
        device: where the run computes.
        ops: op -> the implementation that runs.
        head_size: of the model's attention.

    Raises:
        UserError: graphs are asked for on another device than CUDA, or with an op that reads values on the host.
    """
    if mode == NONE:
        return
    if device.type != "cuda":
        raise UserError(f"{SETTING}={mode}", f"needs a CUDA device, this run is on the {device}", f"Set {SETTING}=none")
    if ops["attention"] == "plain":
        reason = "plain attention reads the sequences' lengths on the host"
        raise UserError(f"{SETTING}={mode}", reason, f"Set OPS=auto, or {SETTING}=none")
    if ops["attention"] == "triton" and head_size not in HEAD_SIZES:
        reason = f"attention with heads of {head_size} runs plain, which reads lengths on the host"
        raise UserError(f"{SETTING}={mode}", reason, f"Use heads of {HEAD_SIZES}, or {SETTING}=none")


def graphed_step(
    mode: str,
    model: BertForPreTraining,
    flat: Any,
    optimizer: Any,
    reducer: Any,
    budget: Budget | None,
    micro_batches: int,
    world: World,
) -> GraphedStep | None:
    """The step that the setting asks for, not yet recorded; None for ``none``.

    Args:
        mode: the setting, which `check_graph_mode` has seen.
        model, flat, optimizer, reducer: of the run; see `mlbert.train.loop.Run`.
        budget: of one micro-batch; None where a recipe's batches have no fixed sizes.
        micro_batches: of one step on this rank.
        world: the ranks, which are connected.

    Raises:
        UserError: the recipe has no budget, or a whole iteration is asked for and the optimizer decides on the host.
    """
    if mode == NONE:
        return None
    if budget is None:
        raise UserError(f"{SETTING}={mode}", "this recipe's batches have no fixed sizes", f"Set {SETTING}=none")
    wanted = GraphMode(mode)
    if wanted is GraphMode.FULL_ITERATION and getattr(optimizer, "device_update", None) is None:
        reason = f"the optimizer in form {optimizer.implementation!r} decides on the host whether to update"
        raise UserError(f"{SETTING}={mode}", reason, f"Set OPS=auto with Triton installed, or {SETTING}=segmented")

    def over_ranks(magnitudes: Tensor) -> Tensor:
        return world.all_reduce_max(magnitudes)

    capture = CudaCapture(world.device)
    return GraphedStep(model, flat, optimizer, budget, micro_batches, wanted, capture, reducer, over_ranks)


def evaluation_capture(mode: str, world: World) -> Capture | None:
    """What captures an evaluation's batch, in a pool of its own: it runs between any two steps; None for ``none``."""
    return CudaCapture(world.device) if mode != NONE else None
