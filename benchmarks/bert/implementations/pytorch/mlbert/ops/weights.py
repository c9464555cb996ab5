"""What products read of a model's weights, and where their gradients go.

Parameters that lie in flat buffers bring a `place` (`mlbert.optim.flat.ParameterPlace`): perhaps a copy rounded to the
activations' type, which the optimizer writes with each update, and their gradient's memory, into which a product may
write. Without it a weight is converted each time and its gradient left to autograd, with the same numbers.

A weight [F, D] is given in parts along its rows, as query, key and value are; parts that are neighbours in memory count
as one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class WeightPlace(Protocol):
    """A parameter's memory; `mlbert.optim.flat.ParameterPlace` tells of it."""

    copy: Tensor | None

    @property
    def is_clear(self) -> bool: ...

    def gradient_changes(self, is_clear: bool) -> None: ...


class GradientRoom(NamedTuple):
    """Where the gradient of a weight goes: float32 [F, D], and whether it is to be added to what is there."""

    out: Tensor
    adds: bool


def in_type(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weight as one tensor of this type: the optimizer's copy, else a new one; itself where it has the type."""
    copies = [place.copy for part in parts if (place := _place(part)) is not None and place.copy is not None]
    if len(copies) == len(parts) and copies[0].dtype == dtype:
        return joined(copies)
    return joined([part.detach() for part in parts]).to(dtype)


def gradient_room(parts: Sequence[Tensor]) -> GradientRoom | None:
    """Where a product may put the weight's gradient; then call `written`. None: it is autograd's, as usual."""
    places = [place for part in parts if (place := _place(part)) is not None and part.requires_grad]
    if len(places) < len(parts):
        return None
    out = neighbours([grad for part in parts if (grad := part.grad) is not None])
    if out is None or out.shape[0] != sum(part.shape[0] for part in parts):
        return None
    return GradientRoom(out, adds=not all(place.is_clear for place in places))


def written(parts: Sequence[Tensor], last: bool = True) -> None:
    """Notes that a product has written the weight's gradient.

    Args:
        last: nothing comes after it in this backward pass, so those who wait for the gradient are told; False: autograd
            adds another user's gradient, and tells.
    """
    for part in parts:
        place = _place(part)
        assert place is not None, "gradient_room was asked"
        place.gradient_changes(is_clear=False)
        if last and not _autograd_tells():
            for hook in (getattr(part, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of equal trailing shape as one along the first dimension: a view if they are neighbours, else a copy."""
    view = neighbours(parts)
    return torch.cat(tuple(parts)) if view is None else view


def neighbours(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape that lie one behind the other in one storage, as one tensor; None where they do not."""
    if not parts:
        return None
    first, step = parts[0], parts[0].numel() * parts[0].element_size()
    in_order = all(
        part.is_contiguous() and part.shape == first.shape and part.data_ptr() == first.data_ptr() + i * step
        for i, part in enumerate(parts)
    )
    if not in_order or len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return None
    return first.as_strided((len(parts) * first.shape[0], *first.shape[1:]), first.stride())


def _place(part: Tensor) -> WeightPlace | None:
    return getattr(part, "place", None)


@functools.cache
def _autograd_tells() -> bool:
    """Whether this PyTorch runs a parameter's hooks where backward gave it no gradient: not all versions do."""
    calls: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(calls.append)
    with torch.enable_grad():
        _GivesNone.apply(leaf).backward()
    return bool(calls)


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None
