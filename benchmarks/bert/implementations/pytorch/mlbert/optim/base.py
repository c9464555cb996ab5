"""What all optimizers on flat buffers share: shards, clipping, refusal of non-finite gradients, state, choice of form.

A rank updates its shard of the weights, then the ranks exchange them; a rank alone owns everything, in place. With
"ranks" meaning those that share the buffers out (all, or those of a node, whose twins on other nodes compute the same):

    sum over ranks: gradient's sum of squares -> norm, clip factor; not finite: nothing is changed
    the method's direction for the shard, from the clipped gradient
    sum over ranks: what the method scales each parameter's update by, where it does (LAMB's trust ratio)
    block by block: weights of the shard, all-gather (while the next block is computed)

Shards cut through parameters, so sums that belong to one are added over the ranks, one number a parameter; every rank
gets the same bits and computes the same factors. Runs with equally many ranks are bit-equal.

Source of the scheme: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 5.1 (optimizer state partitioning).

A method is a subclass that gives its name, the names of its state, `_direction` and `hyperparameters`, in plain form;
faster forms are added by `_load`, `_norm` and `_update`, as `mlbert.optim.compiled` does.

Legend: N elements of the padded flat buffers, n of the shard; G parameters.
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
    """Factor that brings a gradient of this global norm down to `max_grad_norm` (1 where it is shorter already)."""
    return max_grad_norm / max(grad_norm, max_grad_norm) if max_grad_norm else 1.0


def norm_64(x: Tensor) -> Tensor:
    """L2 norm of a flat tensor, accumulated in float64; a float64 scalar on the tensor's device."""
    chunks = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in x.split(NORM_CHUNK)]
    return chunks[0] if len(chunks) == 1 else torch.linalg.vector_norm(torch.stack(chunks))


class FlatOptimizer:
    """An optimizer on this rank's shard of flat buffers.

    Args:
        flat: the parameters, padded to the layout's multiple. At `step` this rank's shard of `padded_grad` is final:
            summed over ranks and micro-batches.
        layout: how the padded buffers are shared out, and over which ranks.
        max_grad_norm: global norm that the gradient is clipped to; None: no clipping.
        clipped_before: the clipping is done before the gradients are reduced, and none here.
        known_norm: float64 scalar on the device that holds the gradient's norm before each update, so that there is no
            pass over the gradient to find it; None: it is found here.
        implementation: "plain" (any device), "native" (CPU, C), "triton" (CUDA; the CPU in Triton's interpreter),
            "apex" (CUDA, unsharded LAMB, where apex is installed) or "auto" (native on the CPU, triton on CUDA, where
            they can be had).
        gathered: how weights travel to the other ranks, "fp32", "bf16" or "e5m2"; see `SharedWeights`.
        copy_dtype: the type of a copy of the weights that each update writes, for products in it (`Place.copy`); None:
            no copy, products convert the weights themselves.

    Attributes:
        implementation: the form in use, "plain", "native", "triton" or "apex".
        reason: why "auto" took the plain one; empty where it did not.
        can_capture: `launch` decides nothing on the host, so a graph can hold it.
        grad_norm: float64 scalar on the device, norm of the gradient before clipping at the last update; the next one
            writes over it. Not finite: that update changed nothing.
        weights: the shard's float32 weights, and what becomes of them.

    Raises:
        UserError: the native, triton or apex form is asked for and cannot be had.
    """

    name: ClassVar[str]
    STATE: ClassVar[tuple[str, ...]] = ()  # attributes, float32 [n] each

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
        self.flat, self._layout = flat, layout
        self.max_grad_norm = max_grad_norm
        self._limit, self._known_norm = None if clipped_before else max_grad_norm, known_norm
        self._num_updates = 0
        flat.keep_copy(copy_dtype)
        self.weights = SharedWeights(flat.padded_data, layout, gathered, flat.padded_copy)
        for key in self.STATE:
            setattr(self, key, torch.zeros_like(self.weights.shard))
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=flat.data.device)
        self.can_capture = False
        self._pieces = pieces_of(layout.parts, flat.segments)
        self.implementation, self.reason = "plain", "asked for"
        if implementation != "plain":
            self._choose(implementation)

    def _choose(self, wanted: str) -> None:
        name = wanted if wanted != "auto" else "native" if self.flat.data.device.type == "cpu" else "triton"
        try:
            self._load(name)
        except (NativeUnavailable, ImportError) as error:
            if wanted != "auto":
                raise UserError(
                    "ops.unavailable", f"{name} optimizer", str(error), "Choose the plain implementation or auto"
                ) from error
            self.reason = str(error)
        else:
            self.implementation, self.reason = name, ""

    def _load(self, form: str) -> None:
        """Makes a fast form ready.

        Raises:
            NativeUnavailable, ImportError: there is none, or not here.
        """
        raise NativeUnavailable(f"{self.name} has no such form on {self.flat.data.device}")

    @property
    def num_updates(self) -> int:
        """Updates made so far; a skipped step does not count. With triton, reading it waits for the device."""
        return self._num_updates

    def hyperparameters(self, event: Event) -> None:
        """Names each hyper-parameter once, as the benchmark's log calls it: ``event(key, value)``."""
        raise NotImplementedError

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the next `launch`; where `can_capture`."""
        raise NotImplementedError

    def launch(self) -> None:
        """Queues one update, exchange of weights included, and decides nothing on the host; where `can_capture`.

        All ranks call it together. With NCCL a graph can hold it.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One update with learning rate `lr` on all ranks; nothing where the gradient's norm is not finite.

        All ranks call it together. In the other forms than triton the norm decides on the host, so on a GPU this waits
        for the gradient.

        Returns:
            Norm of the gradient before clipping, a float64 scalar on the device: a copy of `grad_norm`.
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
        """Norm of the whole gradient, of which `grad` [n] is this rank's shard."""
        return float(self._over_ranks(norm_64(grad)))

    def _over_ranks(self, norms: Tensor) -> Tensor:
        """L2 norms of vectors whose parts the ranks hold, from the parts' norms, float64; a rank alone has them."""
        return norms if self._layout.size == 1 else self._layout.all_reduce_sum(norms.square()).sqrt()

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        """Changes state and weights of the shard, and begins to share each block; `scale` clips `grad` [n]."""
        weight, grad = self.weights.shard, grad * scale
        update = self._direction(weight, grad)
        scales = self._scales(weight, grad, update)
        spans = self._layout.spans
        # No piece lies in two blocks.
        blocks = [[p for p in self._pieces if first <= p.start < last] for first, last in spans]
        for block, (first, last) in enumerate(spans):
            if scales is not None:
                for piece in blocks[block]:
                    update[piece.start : piece.stop].mul_(scales[piece.owner])
            weight[first:last].sub_(update[first:last], alpha=lr)
            self.weights.begin_sharing(block)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        """What the weights move against, float32 [n], decay included, from the clipped gradient; changes the state."""
        raise NotImplementedError

    def _scales(self, weight: Tensor, grad: Tensor, update: Tensor) -> Tensor | None:
        """What each parameter's direction is multiplied by: float32 [G]; None: nothing."""
        return None

    def _norms_of(self, values: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """L2 norm of each parameter's part of a vector over all ranks, 0 where it is in no piece: float64 [G]."""
        norms = torch.zeros(len(self.flat.segments), dtype=torch.float64, device=values.device)
        for piece in pieces:
            # hypot(0, x) is x to the bit, so a parameter in one piece keeps its norm.
            norms[piece.owner] = torch.hypot(norms[piece.owner], norm_64(values[piece.start : piece.stop]))
        return self._over_ranks(norms)

    def exact_weights(self) -> AbstractContextManager[object]:
        """Makes `flat.data` the float32 weights, from the ranks that own them; all ranks call it together.

        Returns:
            A context at whose end the weights are again what the ranks train with, which may be rounded.
        """
        return self.weights.exact()

    def state_dict(self) -> dict[str, Any]:
        """`num_updates` and the state of all parameters, float32 [numel] each; all ranks call it together.

        It tells nothing of the number of ranks. A rank alone gives its live buffers, several give copies. The weights
        that belong to it are `flat.data` within `exact_weights()`.
        """
        whole = {key: self._layout.gather(getattr(self, key))[: self.flat.numel] for key in self.STATE}
        return {"num_updates": self.num_updates, **whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes, by copy, this rank's shard of a state that `state_dict` gave, on however many ranks.

        `flat.data` must hold the float32 weights that belong to it, all of them.

        Raises:
            UserError: the state is incomplete or belongs to a model of another size.
        """
        for key in self.STATE:
            value = state.get(key)
            if not isinstance(value, Tensor) or value.shape != self.flat.data.shape:
                found = f"has {value.numel()} elements" if isinstance(value, Tensor) else "is missing"
                reason = f"{key} {found}, the model has {self.flat.numel} parameters"
                raise UserError("checkpoint.shape", "optimizer state", reason, "Use a checkpoint of this model")
        num_updates = state.get("num_updates")
        if not isinstance(num_updates, int):
            raise UserError(
                "checkpoint.incomplete", "optimizer state", "num_updates is missing", "Use a complete checkpoint"
            )
        padding = self.flat.padded_data.numel() - self.flat.numel
        for key in self.STATE:
            getattr(self, key).copy_(self._layout.take(pad(state[key], (0, padding))))
        self._set_num_updates(num_updates)
        self.weights.reload()

    def _set_num_updates(self, number: int) -> None:
        self._num_updates = number
