"""Before a run each chosen implementation proves itself against its plain twin, forward and backward, on this device.

    for each op: small ugly problem (`mlbert.ops.proof_cases`) -> rule of `mlbert.ops.error_rule` -> kept, or refused
    over all ranks: what one refuses, all refuse           -> the next implementation in order is proven, and so on

So a kernel that nobody has run on a kind of device can't train wrongly in silence. FP8 numbers are compared with those
of the twin, which rounds at the same points: in FP8 a few may fall to the other side of a step, in other types results
may differ by a rounding step of bfloat16; both as root mean squares. Nothing is judged that is not chosen.

What was found is kept (`mlbert.ops.device_cache`).

A kernel that breaks the device's context ends the process: no other kernel could run in it. The message names the op
and how to leave its implementation out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlbert.host.errors import UserError
from mlbert.ops import device_cache, registry
from mlbert.ops.comparison import compare
from mlbert.ops.precision import compute_dtype
from mlbert.ops.proof_cases import Problems

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE = "proof"
FP8_SHARE = 0.25  # of a rounding step of FP8
FAILS = "fails"
OWN_MASKS = "flash"  # draws its masks by itself: it is compared without dropout
# What leaves an implementation out.
REMEDIES = {
    "native": "OPS=plain",
    "triton": "OPS=plain",
    "cublaslt": "OPS=triton",
    "flash": "OPS=auto",
    "fmha": "OPS=auto",
}
OverRanks = Callable[[Tensor], Any]


def prove(
    choice: str, precision: str, device: torch.device, over_ranks: OverRanks, say: Callable[[str], object]
) -> None:
    """Selects `choice`, and refuses what does not compute what its twin does; all ranks call it together.

    Args:
        choice: of `registry.select`.
        precision: of the run; ops of FP8 are proven where it has products in FP8.
        device: where the run computes.
        over_ranks: raises a tensor of the host to the ranks' largest values, in place.
        say: is told of each implementation that is refused, and of a cache that is damaged.

    Raises:
        UserError: as `registry.select`; or a kernel has broken the device.
    """
    registry.select(choice, device)
    dtype = compute_dtype(precision, device)
    names, found = registry.ops(), device_cache.load(CACHE, device, say, str(dtype))
    known = len(found)
    while True:
        chosen = {
            op: name if registry.takes(name, dtype) else "plain" for op, name in registry.selected(device).items()
        }
        wanted = [op for op in names if chosen[op] != "plain" and (precision.startswith("fp8") or op[:4] != "fp8_")]
        for key, op in ((f"{op} {chosen[op]}", op) for op in wanted):
            found[key] = found[key] if key in found else check(op, chosen[op], device, dtype)
        failed = torch.tensor([op in wanted and bool(found[f"{op} {chosen[op]}"]) for op in names], dtype=torch.int64)
        over_ranks(failed)
        for op in itertools.compress(names, failed.tolist()):
            why = found.get(f"{op} {chosen[op]}") or "has failed its proof on another rank"
            say(f"ops: {op} runs {registry.refuse(op, chosen[op], device, why)}: {chosen[op]} {why}")
        if not failed.any():
            break
    # What failed may have lacked memory, and is tried again.
    found = {key: why for key, why in found.items() if not why.startswith(FAILS)}
    if len(found) > known:
        device_cache.store(CACHE, device, found, str(dtype))


def check(op: str, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why implementation `name` of `op` is not to be used, in a few words; empty: it computes what the plain one does.

    Raises:
        UserError: it has broken the device.
    """
    problems, form = Problems(device, dtype, dropout=name != OWN_MASKS), registry.form(op, name)
    cases = {case.op: case for case in problems.all()}
    try:
        if op not in cases:
            why = _difference(form, registry.form(op, "plain"), problems.fp8()[op])
        else:
            why = compare(cases[op], form, dtype)[0].why
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever a kernel, its compiler or its library raises
        why = f"{FAILS}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        _check_device(op, name, device, why)
    return why


def _check_device(op: str, name: str, device: torch.device, why: str) -> None:
    """Raises UserError: nothing runs on the device any more."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        remedy = f"Set {REMEDIES.get(name, 'OPS=plain')}, which leaves it out"
        raise UserError(
            "device.broken", f"the {name} kernel of {op}", f"has broken the {device.type} device: {why}", remedy
        ) from error


def _difference(form: Callable[..., Any], plain: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> str:
    """Why results are not the twin's; empty: they are."""
    pairs = zip(*(_results(run, arguments()) for run in (form, plain)), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"gives {ours.dtype} {tuple(ours.shape)} in place of {theirs.dtype} {tuple(theirs.shape)}"
        is_fp8 = theirs.dtype in FP8_TYPES
        allowed = FP8_SHARE * torch.finfo(theirs.dtype).eps if is_fp8 else torch.finfo(torch.bfloat16).eps
        error, size = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
        if not error <= allowed * size:  # written so that NaN fails
            return f"result {number}: error {error:.3e} of {size:.3e}, allowed are {allowed:.3e} of it"
    return ""


def _results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Results, and the scalars that may have been written into. No op of FP8 is differentiated by autograd."""
    results = [x for x in tree_leaves(function(*arguments)) if isinstance(x, Tensor)]
    return [*results, *(x for x in arguments if isinstance(x, Tensor) and not x.dim())]
