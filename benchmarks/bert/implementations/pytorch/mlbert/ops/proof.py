"""Verify each selected implementation against the reference on this device before a run,
forward and backward.

    for each op: small edge-case problem -> rule of `mlbert.ops.comparison` -> accept or refuse
    across ranks: if one refuses, all do -> verify the next implementation in order

So a kernel that was never run on a kind of device cannot silently compute wrong results. FP8 ops
are compared with the reference, which rounds at the same points: as RMS errors, FP8 results may
differ by a fraction of a rounding step, for values that round the other way, and other results by a
rounding step of bfloat16. Only selected implementations are verified, with OPS=fastest all that are
available. Results are cached (`mlbert.ops.device_cache`).

A kernel that breaks the device's context ends the process, since no other kernel could run. The
error names the op and the setting that disables the implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.ops import by_time, device_cache
from mlbert.ops import forms as registry
from mlbert.ops.comparison import compare
from mlbert.ops.precision import compute_dtype
from mlbert.ops.problems import Problems, Sizes

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SHARE = 0.25  # of a rounding step of FP8
CACHE = "proof"
FAILS = "fails"
# Settings that disable an implementation.
REMEDIES = {
    "cublaslt": "OPS=triton",
    "fmha": "OPS=auto",
    "fused": "OPS=auto",
    "slopes": "OPS=auto",
    "gluon": "OPS=auto",
    "gluon-attention": "OPS=auto",
    "qkv": "OPS=auto",
}
USUAL_REMEDY = "OPS=plain"
OverRanks = Callable[[Tensor], Any]
Say = Callable[[str], object]


def prove(
    choice: str,
    precision: str,
    shape: BertConfig,
    device: torch.device,
    over_ranks: OverRanks,
    say: Say,
) -> None:
    """Select `choice` and refuse implementations that disagree with the reference.

    Call it on all ranks.

    Args:
        choice: for `registry.select`.
        precision: of the run; FP8 ops are only verified if it uses FP8.
        shape, device: of the run.
        over_ranks: in-place all-reduce MAX of a host tensor.
        say: logs refused implementations and a damaged cache.

    Raises:
        UserError: as `registry.select`, or a kernel broke the device.
    """
    registry.select(choice, device)
    dtype = compute_dtype(precision, device)
    sizes = Sizes.of_run(shape, device)
    names = [
        op for op in registry.ops() if precision.startswith("fp8") or not op.startswith("fp8_")
    ]
    kind = f"{dtype} {sizes}"
    found = device_cache.load(CACHE, device, say, kind)
    known = len(found)

    def reason(op: str, name: str) -> str:
        if name != "plain" and f"{op} {name}" not in found:
            found[f"{op} {name}"] = check(op, name, device, dtype, sizes)
        return found.get(f"{op} {name}", "")

    if choice == "fastest":
        problems = Problems.to_time(shape, device, dtype).all()
        to_time = {op: problems[op] for op in names}
        by_time.keep_fastest(to_time, reason, shape, device, dtype, over_ranks, say)
    while True:
        selected = registry.selected(device)
        chosen = {
            op: selected[op] if registry.takes(selected[op], dtype) else "plain" for op in names
        }
        failed = torch.tensor(
            [bool(reason(op, name)) for op, name in chosen.items()], dtype=torch.int64
        )
        over_ranks(failed)
        for op in itertools.compress(names, failed.tolist()):
            refused = chosen[op]
            why = reason(op, refused) or "failed verification on another rank"
            replacement = registry.refuse(op, refused, device, why)
            say(f"ops: {op} runs {replacement}: {refused} {why}")
        if not failed.any():
            break
    # Do not cache exceptions: they may be due to lack of memory.
    found = {key: why for key, why in found.items() if not why.startswith(FAILS)}
    if len(found) > known:
        device_cache.store(CACHE, device, found, kind)


def check(
    op: str, name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes = Sizes()
) -> str:
    """Return why implementation `name` of `op` must not be used,
    or "" if it agrees with the reference.

    Raises:
        UserError: it broke the device.
    """
    problems = Problems(device, dtype, sizes=sizes)
    form = registry.form(op, name)
    differentiable = problems.differentiable()
    try:
        if op in differentiable:
            why = ""
            for make, differentiated in (differentiable[op], *problems.variants().get(op, ())):
                why = why or compare(op, make, differentiated, form, dtype)[0].why
        else:
            why = _difference(form, registry.form(op, "plain"), problems.not_differentiable()[op])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # from a kernel, its compiler or its library
        first_line = str(error).strip().partition("\n")[0]
        why = f"{FAILS}: {type(error).__name__}: {first_line}"
        _check_device(op, name, device, why)
    return why


def _check_device(op: str, name: str, device: torch.device, why: str) -> None:
    """Raise UserError if the device can no longer run anything."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        remedy = f"Set {REMEDIES.get(name, USUAL_REMEDY)}, which leaves it out"
        reason = f"has left the {device.type} device unusable: {why}"
        raise UserError("device.broken", f"the {name} kernel of {op}", reason, remedy) from error


def _difference(
    form: Callable[..., Any], plain: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]
) -> str:
    """Return how results differ from the reference's, or "" if they agree."""
    pairs = zip(*(_results(run, arguments()) for run in (form, plain)), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return (
                f"returns {ours.dtype} {tuple(ours.shape)} instead "
                f"of {theirs.dtype} {tuple(theirs.shape)}"
            )
        if theirs.dtype in FP8_TYPES:
            allowed = FP8_SHARE * torch.finfo(theirs.dtype).eps
        else:
            allowed = torch.finfo(torch.bfloat16).eps
        error = float((ours.double() - theirs.double()).norm())
        size = float(theirs.double().norm())
        if not error <= allowed * size:  # written so that NaN fails
            return (
                f"result {number}: error {error:.3e} for norm {size:.3e}, "
                f"at most {allowed:.3e} of it is allowed"
            )
    return ""


def _results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return results, and scalar arguments that the op may have modified.

    Autograd does not differentiate them.
    """
    results = [x for x in tree_leaves(function(*arguments)) if isinstance(x, Tensor)]
    return [*results, *(x for x in arguments if isinstance(x, Tensor) and not x.dim())]
