"""Choose the implementation of each op, once per kind of device.

Op modules register implementations by name with `register`. `mlbert.ops.config.FORMS` says which
names there are, how each is loaded, and what is tried where. `select` applies the user's choice,
and the public functions call `implementation`. The names:

    plain    `mlbert.ops.reference`: any device
    native   C kernels, or PyTorch products around them: CPU
    triton   Triton kernels (`mlbert.ops.triton`): CUDA; for tests also CPU, with Triton's
             interpreter (TRITON_INTERPRET=1)
    cublaslt linear layers with cublasLt's epilogues (`mlbert.ops.cublaslt`),
             the other ops as in ``triton``: CUDA
    fmha     attention with ``csrc/fmha`` (`mlbert.ops.fmha`), if built,
             the other ops as in ``auto``: CUDA
    fused    FP8 products with GELU inside (`mlbert.ops.triton.product`),
             the other ops as in ``auto``: CUDA
    qkv      attention that also sums and rounds the gradient for the product of Q, K and V
             (`mlbert.ops.qkv_attention`), the other ops as in ``auto``: CUDA
    slopes   as ``fused``, with GELU's derivative kept in a byte: CUDA
    gluon    as ``fused``, with the weight kept in shared memory
             (`mlbert.ops.triton.gluon_product`): CUDA
    gluon-attention
             attention's forward pass with partitions that copy and compute
             (`mlbert.ops.triton.gluon_attention`), the other ops as in ``auto``: CUDA

With ``fastest``, all available implementations are verified
and timed before a run (`mlbert.ops.proof`).

An op without the chosen implementation runs plain. So do float64 tensors, and float16 tensors
instead of C kernels. If an implementation fails verification (`mlbert.ops.proof`), the next one in
order runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlbert.host.errors import UserError
from mlbert.host.native import NativeUnavailable
from mlbert.ops.config import FORMS

AUTO = "auto"
PLAIN = "plain"
FASTEST = "fastest"
# Of an optional op, that only some choices have a form of: the names that stand for not using it.
NOT_USED = (PLAIN, "native")

# An implementation, with the signature of the op's public function.
Implementation = Callable[..., Any]
_implementations: dict[str, dict[str, Implementation]] = {}
_remarks: dict[tuple[str, str], Callable[[], str]] = {}
# Ops whose forms agree in every bit: there is nothing to choose, to verify or to log.
_exact: dict[str, dict[str, Implementation]] = {}


@dataclass(frozen=True)
class _Selection:
    """For one kind of device: op -> name, and name -> why a preferred implementation is missing."""

    names: dict[str, str]
    missing: dict[str, str]


_choice = AUTO
_selections: dict[str, _Selection] = {}
_refused: dict[tuple[str, str, str], str] = {}  # kind of device, op, name -> why


def register(
    op: str, name: str, remark: Callable[[], str] | None = None
) -> Callable[[Implementation], Implementation]:
    """Register the decorated function as implementation `name` of `op`.

    `describe` adds `remark()` to the log line.
    """

    def decorate(function: Implementation) -> Implementation:
        _implementations.setdefault(op, {})[name] = function
        if remark:
            _remarks[op, name] = remark
        return function

    return decorate


def register_exact(op: str, name: str) -> Callable[[Implementation], Implementation]:
    """Register the decorated function as implementation `name` of an op whose implementations agree
    in every bit. One of them is named plain.
    """

    def decorate(function: Implementation) -> Implementation:
        _exact.setdefault(op, {})[name] = function
        fastest_exact.cache_clear()
        return function

    return decorate


@functools.cache
def fastest_exact(op: str, kind: str) -> Implementation:
    """Return the implementation that ``auto`` prefers on a kind of device, of an op registered with
    `register_exact`. OPS does not change it.
    """
    usable = (name for name in _tried(AUTO, kind) if not _why_missing(name, kind))
    forms = _exact[op]
    return next((forms[name] for name in usable if name in forms), forms[PLAIN])


def select(choice: str = AUTO, device: torch.device | str = "cpu") -> dict[str, str]:
    """Select the implementation of every op; the last call counts.

    Args:
        choice: ``auto`` (the fastest available: C kernels on a CPU, cublasLt and Triton on CUDA,
            else plain) or a name of the module docstring. On kinds of device other than `device`,
            an unsupported name means ``auto``.
        device: of the run.

    Returns:
        op -> name of its implementation on `device`.

    Raises:
        UserError: the choice is unknown or not available on `device`.
    """
    global _choice
    if choice not in FORMS:
        raise UserError("config.choice", "OPS", f"{choice!r} is unknown", "Use a valid one", FORMS)
    kind = torch.device(device).type
    if not _is_for(choice, kind):
        raise UserError(
            "ops.unavailable",
            f"OPS={choice}",
            f"has no implementation for a {kind} device",
            "Set OPS=auto",
        )
    _choice = choice
    _selections.clear()
    selection = _selection(kind)
    if choice in selection.missing:
        _choice = AUTO
        _selections.clear()
        remedy = "Install gcc, or set OPS=plain (slower)" if choice == "native" else "Set OPS=auto"
        raise UserError("ops.unavailable", f"OPS={choice}", selection.missing[choice], remedy)
    return dict(selection.names)


def describe(device: torch.device | str = "cpu") -> str:
    """Return the selection for `device` as one log line."""
    selection = _selection(torch.device(device).type)
    names = sorted(set(selection.names.values()))
    chosen = sorted(selection.names.items())
    words = (
        f"all {names[0]}" if len(names) == 1 else ", ".join(f"{op} {name}" for op, name in chosen)
    )
    remarks = [text for choice in chosen if choice in _remarks and (text := _remarks[choice]())]
    missing = [f" (no {name} kernels: {reason})" for name, reason in selection.missing.items()]
    kind = torch.device(device).type
    refused = [
        f" ({op}: {name} {why})" for (where, op, name), why in _refused.items() if where == kind
    ]
    return f"ops: {'; '.join([words, *remarks])}{''.join(missing)}{''.join(refused)}"


def implementation(op: str, tensor: torch.Tensor) -> Implementation:
    """Return the function that runs `op` on tensors like this one."""
    name = _selection(tensor.device.type).names[op]
    return _implementations[op][name if takes(name, tensor.dtype) else PLAIN]


def takes(name: str, dtype: torch.dtype) -> bool:
    """Return whether implementations of this name accept a dtype; if not, it runs plain."""
    return name == PLAIN or not (
        dtype == torch.float64 or (dtype == torch.float16 and name == "native")
    )


def available(device: torch.device | str = "cpu") -> dict[str, tuple[str, ...]]:
    """Return op -> names of its implementations that are available on `device`, plain first."""
    kind = torch.device(device).type
    wanted = {name for form in FORMS.values() for name in form.tried.get(kind, ())}
    usable = [PLAIN, *sorted(name for name in wanted if not _why_missing(name, kind))]
    return {
        op: tuple(name for name in usable if name in forms)
        for op, forms in _implementations.items()
    }


def order_to_time(device: torch.device) -> tuple[str, ...]:
    """Return all names that ``fastest`` compares on a device, available or not,
    in order of preference.
    """
    return (*_tried(FASTEST, device.type), PLAIN)


def selected(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return op -> name of its selected implementation on `device`."""
    return dict(_selection(torch.device(device).type).names)


def refuse(op: str, name: str, device: torch.device | str, why: str) -> str:
    """Exclude implementation `name` of `op` on this kind of device.

    Return the name of its replacement.
    """
    kind = torch.device(device).type
    _refused[kind, op, name] = why
    _selections.pop(kind, None)
    return _selection(kind).names[op]


def ops() -> tuple[str, ...]:
    """Return the names of all ops, sorted."""
    return tuple(sorted(_implementations))


def form(op: str, name: str) -> Implementation:
    """Return implementation `name` of `op`, regardless of the selection."""
    return _implementations[op][name]


def select_each(names: Mapping[str, str], device: torch.device | str = "cpu") -> None:
    """Use these implementations (op -> name) on `device`, plain for other ops,
    until the next `select`.
    """
    _selections[torch.device(device).type] = _Selection(
        {op: names.get(op, PLAIN) for op in _implementations}, {}
    )


def _selection(kind: str) -> _Selection:
    """Return the selection for a kind of device, computed lazily because loading implementations is
    slow.
    """
    if kind not in _selections:
        wanted = _tried(_choice, kind)
        missing = {name: reason for name in wanted if (reason := _why_missing(name, kind))}
        names = {
            op: next(
                (
                    n
                    for n in wanted
                    if n in forms and n not in missing and (kind, op, n) not in _refused
                ),
                PLAIN,
            )
            for op, forms in _implementations.items()
        }
        _selections[kind] = _Selection(names, missing)
    return _selections[kind]


def _tried(choice: str, kind: str) -> tuple[str, ...]:
    """Return the names to try for each op before plain; those of ``auto`` if the choice is not for
    this kind of device.
    """
    names = _own_names(choice, kind)
    return FORMS[AUTO].tried.get(kind, ()) if names is None else names


def _is_for(choice: str, kind: str) -> bool:
    """Return True if there is something to choose on this kind of device."""
    return choice in (AUTO, PLAIN) or _own_names(choice, kind) is not None


def _own_names(choice: str, kind: str) -> tuple[str, ...] | None:
    """Return the names that a choice tries, None if it is not for this kind of device."""
    if choice != FASTEST:
        return FORMS[choice].tried.get(kind)
    preferred = FORMS[AUTO].tried.get(kind, ())
    timed = [name for name, form in FORMS.items() if kind in form.timed_on]
    return tuple(dict.fromkeys([*preferred, *timed])) or None


def _why_missing(name: str, kind: str) -> str:
    """Load the implementations `name`. Return why they are not available, or ""."""
    try:
        if name in FORMS and FORMS[name].place:
            FORMS.load(name)(kind)
    except (NativeUnavailable, ImportError) as error:
        return str(error)
    return ""
