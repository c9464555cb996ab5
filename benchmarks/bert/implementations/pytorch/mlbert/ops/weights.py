"""Access the weights that products read, and the memory that their gradients are written to.

Parameters in flat buffers have a `place` (`mlbert.optim.flat.ParameterPlace`): optionally a copy in
the activations' dtype, which the optimizer updates, and the gradient's memory, which a product may
write directly. Without it, the weight is converted each time and autograd handles its gradient,
with the same results.

A weight [F, D] is passed as parts along its rows, like query, key and value.
Parts adjacent in memory are used as one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class WeightPlace(Protocol):
    """A parameter's memory; see `mlbert.optim.flat.ParameterPlace`."""

    copy: Tensor | None

    @property
    def is_clear(self) -> bool: ...

    def before_adding(self) -> None: ...

    def after_writing(self) -> None: ...


class GradientBuffer(NamedTuple):
    """Memory for the gradient of a weight, float32 [F, D], or of a vector, float32 [F], and whether
    to add to its content.
    """

    out: Tensor
    adds: bool

    def keep(self, gradient: Tensor) -> Tensor:
        """Write or add a gradient of this shape, of any dtype. Return the memory."""
        return self.out.add_(gradient) if self.adds else self.out.copy_(gradient)


def in_type(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight as one tensor of this dtype:
    the optimizer's copy if it matches, else converted if needed.
    """
    if parts[0].dtype == dtype:
        return joined([part.detach() for part in parts])
    copies = [
        place.copy
        for part in parts
        if (place := _place(part)) is not None and place.copy is not None
    ]
    if len(copies) == len(parts) and copies[0].dtype == dtype:
        return joined(copies)
    return joined([part.detach() for part in parts]).to(dtype)


def gradient_buffer(parts: Sequence[Tensor]) -> GradientBuffer | None:
    """Return the memory that an op may write the gradient of a weight or of vectors to,
    followed by `written`; None for autograd.
    """
    places = []
    gradients = []
    for part in parts:
        place = _place(part)
        if place is None or not part.requires_grad:
            return None
        gradient = part.grad
        if gradient is None:
            return None
        places.append(place)
        gradients.append(gradient)
    out = neighbors(gradients)
    if out is None:
        return None
    adds = not all(place.is_clear for place in places)
    if adds:
        for place in places:
            place.before_adding()
    return GradientBuffer(out, adds)


def buffer_to_add(part: Tensor) -> Tensor | None:
    """Return the memory that an op may add some rows of a gradient to, followed by `written`; None
    for autograd.
    """
    place = _place(part)
    if place is None or part.grad is None or not part.requires_grad:
        return None
    place.before_adding()
    return part.grad


def part_gradients(
    parts: Sequence[Tensor], total: Tensor, buffer: GradientBuffer | None, last: bool = True
) -> tuple[Tensor | None, ...]:
    """Return the gradients of parts of a weight, or of vectors, that are in one tensor; None if an
    op has written them to the buffer. For ``last`` see `written`.
    """
    if buffer is None:
        return total.to(parts[0].dtype).chunk(len(parts))
    written(parts, last)
    return (None,) * len(parts)


def kept_sum(total: Tensor, buffer: GradientBuffer | None) -> Tensor:
    """Return a sum over tokens, in the buffer if there is one."""
    return total if buffer is None else buffer.keep(total)


def written(parts: Sequence[Tensor], last: bool = True) -> None:
    """Record that an op has written the gradient of a weight or of vectors.

    Args:
        last: whether the gradient is complete, so that hooks run now. If False, autograd adds
            another user's gradient and then runs them.
    """
    for part in parts:
        place = _place(part)
        assert place is not None, "call gradient_buffer first"
        place.after_writing()
        if last and not _autograd_runs_hooks():
            for hook in (getattr(part, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension:
    a view if they are adjacent in memory, else a copy.
    """
    view = neighbors(parts)
    return torch.cat(tuple(parts)) if view is None else view


def neighbors(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of one shape that are adjacent in one storage as one tensor,
    or None if they are not.
    """
    if not parts:
        return None
    first = parts[0]
    if len(parts) == 1:
        return first if first.is_contiguous() else None
    shape = first.shape
    step = first.numel() * first.element_size()
    expected = first.data_ptr()
    for part in parts:
        if part.data_ptr() != expected or part.shape != shape or not part.is_contiguous():
            return None
        expected += step
    if len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return None
    return first.as_strided((len(parts) * shape[0], *shape[1:]), first.stride())


def _place(part: Tensor) -> WeightPlace | None:
    return getattr(part, "place", None)


@functools.cache
def _autograd_runs_hooks() -> bool:
    """Return whether this PyTorch runs a parameter's hooks when backward returns None for it;
    versions differ.
    """
    calls: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(calls.append)
    with torch.enable_grad():
        _ReturnsNone.apply(leaf).backward()
    return bool(calls)


class _ReturnsNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None
