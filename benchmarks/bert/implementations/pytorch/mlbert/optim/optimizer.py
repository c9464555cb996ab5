"""Base class of the optimizers on flat buffers: sharding, clipping,
skipping of non-finite gradients, and state.

Each rank updates its shard of the weights, then the ranks exchange the shards. A single rank owns
everything and updates in place. "Ranks" are the ranks that share the buffers: all of them, or those
of one node if each node holds the full buffers and computes the same update.

    1. sum over ranks: the gradient's sum of squares -> norm, clip factor;
       if the norm is not finite, nothing changes
    2. the optimizer's direction for the shard, from the clipped gradient
    3. sum over ranks: the per-parameter scale of the update, if the optimizer has one
       (LAMB's trust ratio)
    4. block by block: update the shard's weights, then all-gather them
       while the next block is computed

Shard borders cut through parameters, so per-parameter sums are added over the ranks, one number per
parameter. Every rank gets the same bits and computes the same factors. Runs with the same number of
ranks are bit-equal.

Source of the scheme: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv 1910.02054, section 5.1 (optimizer state partitioning).

A subclass defines its name, the names of its state, `_direction` and `hyperparameters`, in plain
PyTorch. `mlbert.optim.compiled` adds faster implementations by overriding `_load`, `_norm` and
`_update`.

Legend: N elements of the padded flat buffers; n elements of the shard; G parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlbert.host.errors import UserError
from mlbert.host.native import NativeUnavailable
from mlbert.optim.flat import FlatParameters, Piece, pieces_of
from mlbert.optim.shared_weights import Layout, SharedWeights

NORM_CHUNK = 1 << 20  # elements squared in float64 at a time; bounds the temporary
Event = Callable[[str, int | float | str], None]


def clip_scale(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return the factor that scales a gradient of this global norm down to `max_grad_norm`;
    1 if it is already shorter.
    """
    return max_grad_norm / max(grad_norm, max_grad_norm) if max_grad_norm else 1.0


def norm_64(x: Tensor) -> Tensor:
    """Return the L2 norm of a flat tensor, accumulated in float64:
    a float64 scalar on the tensor's device.
    """
    chunks = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in x.split(NORM_CHUNK)]
    return chunks[0] if len(chunks) == 1 else torch.linalg.vector_norm(torch.stack(chunks))


class FlatOptimizer:
    """An optimizer for this rank's shard of the flat buffers.

    Args:
        flat: the parameters, padded to the layout's multiple. `step` expects this rank's shard of
            `padded_grad` to be summed over ranks and micro-batches.
        layout: how the padded buffers are sharded, and over which ranks.
        max_grad_norm: global norm to clip the gradient to (None disables clipping).
        clipped_before: gradients are already clipped before the reduction, so do not clip here.
        known_norm: float64 scalar on the device that holds the gradient's norm before each update,
            which saves a pass over the gradient (None: compute the norm here).
        implementation: "plain" (any device), "native" (CPU, C), "triton" (CUDA; on the CPU with
            Triton's interpreter), "apex" (CUDA, unsharded LAMB, if apex is installed) or "auto"
            (native on the CPU and triton on CUDA if available, else plain).
        gathered: format in which weights are sent to the other ranks, "fp32", "bf16" or "e5m2";
            see `SharedWeights`.
        copy_dtype: dtype of a second copy of the weights that each update writes for matrix
            products (`ParameterPlace.copy`). None keeps no copy; products then convert the weights
            themselves.

    Attributes:
        implementation: the implementation in use, "plain", "native", "triton" or "apex".
        reason: why "auto" fell back to plain; empty otherwise.
        can_capture: `launch` makes no decision on the host, so a CUDA graph can capture it.
        grad_norm: float64 scalar on the device, norm of the gradient before clipping at the last
            update; the next update overwrites it. If it is not finite, that update changed nothing.
        weights: the shard's float32 weights and their exchange.

    Raises:
        UserError: the requested native, triton or apex implementation is not available.
    """

    name: ClassVar[str]
    HAS_DECOUPLED_DECAY: ClassVar[bool] = False  # takes ``base_lr``, see `mlbert.optim.adamw`
    # The update needs no neighbors of an element, only sums over its parameter.
    CAN_SHARD: ClassVar[bool] = True
    STATE: ClassVar[tuple[str, ...]] = ()  # attributes, float32 [n] each
    # That the optimizer has; not all run on every device.
    IMPLEMENTATIONS: ClassVar[tuple[str, ...]] = ("plain",)

    def __init__(
        self,
        flat: FlatParameters,
        layout: Layout,
        *,
        max_grad_norm: float | None,
        clipped_before: bool = False,
        known_norm: Tensor | None = None,
        implementation: str = "auto",
        gathered: str = "fp32",
        copy_dtype: torch.dtype | None = None,
    ) -> None:
        assert implementation in ("auto", "plain", "native", "triton", "apex"), implementation
        self.flat = flat
        self._layout = layout
        self.max_grad_norm = max_grad_norm
        self._limit = None if clipped_before else max_grad_norm
        self._known_norm = known_norm
        self._num_updates = 0
        flat.keep_copy(copy_dtype)
        self.weights = SharedWeights(flat.padded_data, layout, gathered, flat.padded_copy)
        for key in self.STATE:
            setattr(self, key, torch.zeros_like(self.weights.shard))
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=flat.data.device)
        self.can_capture = False
        self._pieces = pieces_of(layout.parts, flat.segments)
        self.implementation = "plain"
        self.reason = ""
        if implementation != "plain":
            self._choose(implementation)

    def _choose(self, wanted: str) -> None:
        name = (
            wanted
            if wanted != "auto"
            else "native"
            if self.flat.data.device.type == "cpu"
            else "triton"
        )
        try:
            if name not in self.IMPLEMENTATIONS:
                raise NativeUnavailable(f"{self.name} has no {name} implementation")
            self._load(name)
        except (NativeUnavailable, ImportError) as error:
            if wanted != "auto":
                remedy = "Choose the plain implementation or auto"
                raise UserError(
                    "ops.unavailable", f"{name} optimizer", str(error), remedy
                ) from error
            self.reason = str(error)
        else:
            self.implementation = name
            self.reason = ""

    def _load(self, form: str) -> None:
        """Load one of `IMPLEMENTATIONS` other than plain.

        Raises:
            NativeUnavailable, ImportError: it is not available here.
        """
        raise NotImplementedError

    @property
    def num_updates(self) -> int:
        """Number of updates so far, without skipped steps.

        With triton, reading it waits for the device.
        """
        return self._num_updates

    def hyperparameters(self, event: Event) -> None:
        """Log each hyperparameter once under the benchmark's key: ``event(key, value)``."""
        raise NotImplementedError

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next `launch`. Requires `can_capture`."""
        raise NotImplementedError

    def launch(self) -> None:
        """Queue one update and the exchange of weights without any decision on the host.

        Requires `can_capture`.

        All ranks must call it together. With NCCL, a CUDA graph can capture it.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Run one update with learning rate `lr`; skip it if the gradient's norm is not finite.

        All ranks must call it together. Except with triton, the host inspects the norm,
        so on a GPU this waits for the gradient.

        Returns:
            Norm of the gradient before clipping, a float64 scalar on the device:
                a copy of `grad_norm`.
        """
        if self.can_capture:
            self.set_learning_rate(lr)
            self.launch()
            return self.grad_norm.clone()
        grad = self._layout.take(self.flat.padded_grad)
        norm = self._norm(grad) if self._known_norm is None else float(self._known_norm)
        self.grad_norm.fill_(norm)
        if math.isfinite(norm):
            self._num_updates += 1
            self._update(grad, lr, clip_scale(norm, self._limit))
            self.weights.finish_sharing()
        return self.grad_norm.clone()

    def _norm(self, grad: Tensor) -> float:
        """Return the norm of the full gradient; `grad` [n] is this rank's shard."""
        return float(self._over_ranks(norm_64(grad)))

    def _over_ranks(self, norms: Tensor) -> Tensor:
        """Combine float64 L2 norms of each rank's part into norms over all ranks."""
        return (
            norms if self._layout.size == 1 else self._layout.all_reduce_sum(norms.square()).sqrt()
        )

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        """Update the shard's state and weights and start sharing each block;
        `scale` clips `grad` [n].
        """
        weight = self.weights.shard
        grad = grad * scale
        update = self._direction(weight, grad)
        scales = self._scales(weight, grad, update)
        spans = self._layout.spans
        # No piece spans two blocks.
        blocks = [[p for p in self._pieces if first <= p.start < last] for first, last in spans]
        for block, (first, last) in enumerate(spans):
            if scales is not None:
                for piece in blocks[block]:
                    update[piece.start : piece.stop].mul_(scales[piece.owner])
            weight[first:last].sub_(update[first:last], alpha=lr)
            self.weights.begin_sharing(block)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        """Return the update direction with decay, float32 [n], from the clipped gradient;
        changes the state.
        """
        raise NotImplementedError

    def _scales(self, weight: Tensor, grad: Tensor, update: Tensor) -> Tensor | None:
        """Return the factor for each parameter's direction, float32 [G], or None for no scaling."""
        return None

    def _norms_of(self, values: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Return each parameter's L2 norm in a vector over all ranks,
        0 for a parameter without pieces: float64 [G].
        """
        norms = torch.zeros(len(self.flat.segments), dtype=torch.float64, device=values.device)
        for piece in pieces:
            # hypot(0, x) is exactly x, so a parameter in one piece keeps its norm.
            norms[piece.owner] = torch.hypot(
                norms[piece.owner], norm_64(values[piece.start : piece.stop])
            )
        return self._over_ranks(norms)

    def exact_weights(self) -> AbstractContextManager[object]:
        """Fill `flat.data` with the exact float32 weights of all ranks.

        All ranks must call it together.

        Returns:
            A context manager. On exit, `flat.data` again holds the weights used for training,
                which may be rounded.
        """
        return self.weights.exact()

    def state_dict(self) -> dict[str, Any]:
        """Return `num_updates` and the state of all parameters, float32 [numel] each.

        All ranks must call it together.

        The result does not depend on the number of ranks. A single rank returns its live buffers,
        several ranks return copies. The matching weights are `flat.data` within `exact_weights()`.
        """
        whole = {
            key: self._layout.gather(getattr(self, key))[: self.flat.numel] for key in self.STATE
        }
        return {"num_updates": self.num_updates, **whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy this rank's shard from a `state_dict`, which any number of ranks may have saved.

        `flat.data` must hold the matching float32 weights in full.

        Raises:
            UserError: the state is incomplete or belongs to a model of another size.
        """
        for key in self.STATE:
            value = state.get(key)
            if not isinstance(value, Tensor) or value.shape != self.flat.data.shape:
                found = (
                    f"has {value.numel()} elements" if isinstance(value, Tensor) else "is missing"
                )
                reason = f"{key} {found}, but the model has {self.flat.numel} parameters"
                raise UserError(
                    "checkpoint.shape", "optimizer state", reason, "Use a checkpoint of this model"
                )
        num_updates = state.get("num_updates")
        if not isinstance(num_updates, int):
            reason = "num_updates is missing"
            raise UserError(
                "checkpoint.incomplete", "optimizer state", reason, "Use a complete checkpoint"
            )
        padding = self.flat.padded_data.numel() - self.flat.numel
        for key in self.STATE:
            getattr(self, key).copy_(self._layout.take(pad(state[key], (0, padding))))
        self._set_num_updates(num_updates)
        self.weights.reload()

    def _set_num_updates(self, number: int) -> None:
        self._num_updates = number
