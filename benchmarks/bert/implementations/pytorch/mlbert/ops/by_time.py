"""Time all verified implementations of the ops before a run, for OPS=fastest.

Each op runs forward and backward at the model's sizes. The slowest rank's times count, so all ranks
choose the same. An implementation only loses its place in the order of preference to one that is
clearly faster, so noise does not decide between equals. Times are cached
(`mlbert.ops.device_cache`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.ops import device_cache
from mlbert.ops import forms as registry
from mlbert.ops.cublaslt_tuning import time_launches
from mlbert.ops.problems import Problem

CACHE = "times"
TURNS = 4
# How many times as fast another implementation must be. Times of a GPU are taken on the device and
# vary by a percent; those of a CPU also depend on what else it does.
GPU_MARGIN = 1.03
CPU_MARGIN = 1.2


def keep_fastest(
    problems: Mapping[str, Problem],
    reason: Callable[[str, str], str],
    shape: BertConfig,
    device: torch.device,
    dtype: torch.dtype,
    over_ranks: Callable[[Tensor], Any],
    say: Callable[[str], object],
) -> None:
    """Refuse every implementation that is slower than another one. Call it on all ranks.

    Args:
        problems: by op, at the model's sizes.
        reason: (op, name) -> why an implementation must not be used, or "".
        shape: of the model.
        device, dtype: of the activations.
        over_ranks: in-place all-reduce MAX of a host tensor.
        say: logs each op's times.
    """
    order = registry.order_to_time(device)
    available = registry.available(device)
    usable = {
        op: [n for n in order if n in available[op] and registry.takes(n, dtype)] for op in problems
    }
    kind = f"{dtype} {shape}"
    seconds = device_cache.load(CACHE, device, say, kind)
    # As many entries on all ranks, whatever is available on each.
    taken: dict[tuple[str, str], float] = dict.fromkeys(
        itertools.product(problems, order), math.inf
    )
    for op, problem in problems.items():
        forms = {
            f"{op} {name}": registry.form(op, name) for name in usable[op] if not reason(op, name)
        }
        if not forms.keys() <= seconds.keys():
            seconds |= _seconds(forms, problem, device)
        for name in usable[op]:
            if f"{op} {name}" in forms:
                taken[op, name] = seconds[f"{op} {name}"]
    # Memory may be sufficient next time, so do not cache what did not fit.
    finite = {key: time for key, time in seconds.items() if math.isfinite(time)}
    device_cache.store(CACHE, device, finite, kind)
    slowest = torch.tensor([*taken.values()])
    over_ranks(slowest)
    table = dict(zip(taken, slowest.tolist(), strict=True))
    for op in problems:
        times = {name: table[op, name] for name in usable[op]}
        margin = GPU_MARGIN if device.type == "cuda" else CPU_MARGIN
        fastest = preferred(times, margin)
        for name in times.keys() - {fastest, "plain"}:
            registry.refuse(op, name, device, "is slower")
        by_speed = sorted(times, key=times.__getitem__)
        listed = ", ".join(f"{name} {1e3 * times[name]:.3g} ms" for name in by_speed)
        say(f"ops: {op} runs {fastest}: {listed}")


def preferred(seconds: Mapping[str, float], margin: float) -> str:
    """Return the first name, in order of preference,
    that is not clearly slower than the fastest.
    """
    limit = margin * min(seconds.values())
    return next(name for name, taken in seconds.items() if taken <= limit)


def _seconds(
    forms: Mapping[str, registry.Implementation], problem: Problem, device: torch.device
) -> dict[str, float]:
    """Return by key the shortest time of both passes, in seconds,
    infinite if memory is insufficient.

    The implementations take turns, so a change of the clock affects all.
    """
    arguments = list(problem.make(0))
    inputs = [arguments[place].requires_grad_() for place in problem.differentiated]

    def both_passes(form: registry.Implementation) -> None:
        out = form(*arguments)
        if inputs:
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    shortest = dict.fromkeys(forms, math.inf)
    for key in [*forms] * TURNS:
        with contextlib.suppress(torch.OutOfMemoryError):
            times = time_launches(device, functools.partial(both_passes, forms[key]), launches=2)
            shortest[key] = min(shortest[key], *times)
    return shortest
