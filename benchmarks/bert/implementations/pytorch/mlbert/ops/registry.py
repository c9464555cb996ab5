"""Which implementation of each op runs: decided once, told in the log, overridable.

Every op module registers its implementations by name with `register`; `select` picks one per op for each kind of
device, and the public functions ask `implementation`. On a CPU the names are ``native`` (C kernels, or PyTorch
products around them) and ``plain`` (`mlbert.ops.reference`); any other device has ``plain`` unless something is
registered for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlbert.core import native
from mlbert.core.errors import UserError
from mlbert.ops import native_library

CHOICES = ("auto", "plain", "native")
_PLAIN_DTYPES = (torch.float64,)

_implementations: dict[str, dict[str, Callable[..., Any]]] = {}
_remarks: dict[tuple[str, str], Callable[[], str]] = {}
_chosen: dict[str, str] = {}
_note = ""


def register(
    op: str, name: str, remark: Callable[[], str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function is implementation `name` of `op`; `remark()` is what `describe` adds, if anything."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _implementations.setdefault(op, {})[name] = function
        if remark:
            _remarks[op, name] = remark
        return function

    return keep


def select(choice: str = "auto") -> dict[str, str]:
    """Decide the implementation of every op on the CPU; the last call counts.

    Args:
        choice: ``auto`` (the C kernels if they compile, else plain), ``plain``, or ``native`` (an error if they don't).

    Returns:
        op -> name of its implementation.

    Raises:
        UserError: unknown choice, or ``native`` where the kernels can't be had.
    """
    global _note
    if choice not in CHOICES:
        raise UserError("OPS", f"{choice!r} is no implementation", f"Use one of {', '.join(CHOICES)}")
    name, _note = choice, ""
    if choice != "plain":
        try:
            native_library.library()
            name = "native"
        except native.NativeUnavailable as error:
            if choice == "native":
                raise UserError("OPS=native", str(error), "Install gcc, or set OPS=plain (slower)") from error
            name, _note = "plain", f" (no native kernels: {error})"
    _chosen.clear()
    for op, forms in _implementations.items():
        _chosen[op] = name if name in forms else "plain"
    return dict(_chosen)


def describe() -> str:
    """The choice as one line for the log."""
    if not _chosen:
        select()
    names = sorted(set(_chosen.values()))
    words = f"all {names[0]}" if len(names) == 1 else ", ".join(f"{op} {name}" for op, name in sorted(_chosen.items()))
    remarks = [text for choice in _chosen.items() if choice in _remarks and (text := _remarks[choice]())]
    return f"ops: {'; '.join([words, *remarks])}{_note}"


def implementation(op: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """The function that runs `op` on tensors like this one; float64 and other devices are plain."""
    if not _chosen:
        select()
    name = _chosen[op] if tensor.device.type == "cpu" and tensor.dtype not in _PLAIN_DTYPES else "plain"
    return _implementations[op][name]
