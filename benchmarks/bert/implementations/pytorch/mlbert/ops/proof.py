"""Verify each selected implementation against the reference on this device before a run, forward and backward.

    for each op: small edge-case problem -> rule of `mlbert.ops.comparison` -> accept or refuse
    across ranks: if one refuses, all do -> verify the next implementation in order

So a kernel that was never run on a kind of device cannot silently compute wrong results. FP8 ops are compared with the
reference, which rounds at the same points: as RMS errors, FP8 results may differ by a fraction of a rounding step, for
values that round the other way, and other results by a rounding step of bfloat16. Only selected implementations are
verified. Results are cached (`mlbert.ops.device_cache`).

A kernel that breaks the device's context ends the process, since no other kernel could run. The error names the op and
the setting that disables the implementation.

The problems cover empty sequences, one token, more than a block, and tokens after the last sequence. On a GPU they have
the run's sizes except for the number of tokens, because other sizes are other binaries, layouts and algorithms; C
kernels take the sizes as arguments, so on a CPU they are small.

For OPS=fastest, all available implementations are verified and, at the model's sizes, timed forward and backward. The
slowest rank's times count, so all ranks choose the same. An implementation only loses its place in the order of
preference to one that is clearly faster, so noise does not decide between equals. Times are cached, too.

Legend: S sequences, T tokens, N heads, H head size, D hidden, F inner size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.ops import device_cache
from mlbert.ops import forms as registry
from mlbert.ops.comparison import Arguments, compare
from mlbert.ops.cublaslt_tuning import time_launches
from mlbert.ops.dropout import dropout_key
from mlbert.ops.fp8_scaling import INPUT, WEIGHT, FP8Scaling, Products
from mlbert.ops.precision import compute_dtype
from mlbert.ops.rotary import rotations

LENGTHS = (0, 7, 0, 65, 1, 33, 180, 0)
TAIL = 13  # tokens after the last sequence
TOKENS_PER_MASK = 8
DROPOUT = 0.1
SCALE = 4.0  # for FP8


class Sizes(NamedTuple):
    """Sizes of a model: D, N, F, V, and the vocabulary's rows in memory."""

    hidden: int = 128
    heads: int = 2
    inner: int = 256
    vocabulary: int = 509
    padded: int = 512

    @classmethod
    def of_run(cls, shape: BertConfig, device: torch.device) -> Sizes:
        """Return the sizes to verify for a run of this model."""
        if device.type != "cuda":
            return SMALL
        return cls.of_model(shape)

    @classmethod
    def of_model(cls, shape: BertConfig) -> Sizes:
        """Return the sizes of a model."""
        layer = shape.hidden_size, shape.num_attention_heads, shape.intermediate_size
        return cls(*layer, shape.vocab_size, shape.padded_vocab_size)


SMALL = Sizes()
Problem = tuple[
    Arguments, tuple[int, ...]
]  # an op's arguments, and the indices of those to differentiate


class Problems:
    """Create arguments of the ops on a device.

    Args:
        device: of the tensors.
        dtype: of the activations; weights are float32.
        dropout: whether attention uses dropout.
        sizes: of the model.
        lengths: of the sequences; by default the edge cases, with ignored labels.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        dropout: bool = True,
        sizes: Sizes = SMALL,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._hidden, heads, self._inner, self._vocabulary, self._padded = sizes
        self._heads = 3, heads, self._hidden // heads
        self._device, self._dtype, self._dropout = device, dtype, DROPOUT if dropout else 0.0
        self._key = dropout_key(3, 1, 2, 3)
        self._lengths, self._has_ignored = lengths or LENGTHS, lengths is None
        self._tokens = sum(self._lengths) + TAIL
        self._masked = self._tokens // TOKENS_PER_MASK
        self._rows = torch.arange(1000, 1000 + self._tokens, dtype=torch.int32, device=device)

    def differentiable(self) -> dict[str, Problem]:
        """Return each op that is compared in float64, forward and backward, with its arguments and the indices of those
        to differentiate."""
        return {
            "attention": (self._attention, (0,)),
            "dropout_add_layer_norm": (self._dropout_add_layer_norm, (0, 1, 2, 3, 8)),
            "layer_norm_dropout": (self._layer_norm_dropout, (0, 1, 2)),
            "embedding_sum": (self._embedding_sum, (3, 4, 5)),
            "masked_cross_entropy": (self._masked_cross_entropy, (0,)),
            "linear_qkv": (self._linear_qkv, tuple(range(7))),
            "linear": (self._linear_gelu, (0, 1, 2)),
            "linear_gelu": (self._linear_gelu, (0, 1, 2)),
            "feed_forward": (self._feed_forward, (0, 1, 2, 3)),
            "rotary": (self._rotary, (0,)),
        }

    def all(self) -> dict[str, Problem]:
        """Return every op as in `differentiable`, also those without anything to differentiate."""
        others = self.not_differentiable()
        return self.differentiable() | {
            op: (lambda _, make=make: make(), ()) for op, make in others.items()
        }

    @classmethod
    def to_time(cls, shape: BertConfig, device: torch.device, dtype: torch.dtype) -> Problems:
        """Return problems of a model's sizes with `TIMED_LENGTHS`, cut off at its longest sequence and repeated."""
        lengths = [min(length, shape.max_position_embeddings) for length in TIMED_LENGTHS]
        repeats = math.ceil(TIMED_TOKENS[device.type] / sum(lengths))
        return cls(device, dtype, sizes=Sizes.of_model(shape), lengths=lengths * repeats)

    def _random(self, draw: int, *shape: int, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """Return normal numbers of bfloat16 precision, generated on the host to be the same on every device."""
        generator = torch.Generator().manual_seed(sum(shape) + 1000 * draw)
        return (
            torch.randn(shape, generator=generator)
            .bfloat16()
            .to(self._device, dtype or self._dtype)
        )

    def _ids(self, draw: int, count: int, bound: int) -> Tensor:
        generator = torch.Generator().manual_seed(count + 1000 * draw)
        return torch.randint(bound, (count,), generator=generator).to(self._device)

    def _attention(self, draw: int) -> tuple[Any, ...]:
        bounds = torch.tensor(
            [0, *itertools.accumulate(self._lengths)], dtype=torch.int32, device=self._device
        )
        qkv = self._random(draw, self._tokens, *self._heads, dtype=None)
        return (qkv, bounds, max(self._lengths), self._dropout, self._key, self._rows, None)

    def _rotary(self, draw: int) -> tuple[Any, ...]:
        qkv = self._random(draw, self._tokens, *self._heads, dtype=None)
        return (
            qkv,
            rotations(torch.arange(self._tokens, device=self._device), self._heads[2], 10_000.0),
        )

    def _dropout_add_layer_norm(self, draw: int) -> tuple[Any, ...]:
        x, residual = (
            self._random(2 * draw + i, self._tokens, self._hidden, dtype=None) for i in range(2)
        )
        weight, bias, x_bias = (self._random(3 * draw + i, self._hidden) for i in range(3))
        return (x, residual, weight, bias, 1e-12, DROPOUT, self._key, self._rows, x_bias)

    def _layer_norm_dropout(self, draw: int) -> tuple[Any, ...]:
        x = self._random(draw, self._tokens, self._hidden)
        weight, bias = (self._random(2 * draw + i, self._hidden) for i in range(2))
        return (x, weight, bias, 1e-12, DROPOUT, self._key, self._rows)

    def _embedding_sum(self, draw: int) -> tuple[Any, ...]:
        # Few ids for many tokens: long runs of equal rows.
        ids = [self._ids(draw + i, self._tokens, bound) for i, bound in enumerate((9, 2, 33))]
        return (
            *ids,
            *(self._random(draw + i, n, self._hidden) for i, n in enumerate((self._padded, 40, 2))),
        )

    def _masked_cross_entropy(self, draw: int) -> tuple[Any, ...]:
        labels = self._ids(draw, self._masked, self._vocabulary)
        if self._has_ignored:
            labels[::9] = -100
        return (
            self._random(draw, self._masked, self._padded, dtype=None),
            labels,
            self._vocabulary,
        )

    def _linear_qkv(self, draw: int) -> tuple[Any, ...]:
        weights = (
            self._random(3 * draw + i, self._hidden, self._hidden) * self._hidden**-0.5
            for i in range(3)
        )
        biases = (self._random(3 * draw + i, self._hidden) for i in range(3))
        return (self._random(draw, self._tokens, self._hidden, dtype=None), *weights, *biases)

    def _linear_gelu(self, draw: int) -> tuple[Any, ...]:
        return (*self._feed_forward(draw)[:3], False)

    def _feed_forward(self, draw: int) -> tuple[Any, ...]:
        x, bias = (
            self._random(draw, self._tokens, self._hidden, dtype=None),
            self._random(draw, self._inner),
        )
        w1 = self._random(draw, self._inner, self._hidden) * self._hidden**-0.5
        return (
            x,
            w1,
            bias,
            self._random(draw, self._hidden, self._inner) * self._inner**-0.5,
            False,
        )

    def not_differentiable(self) -> dict[str, Callable[[], tuple[Any, ...]]]:
        """Return functions that create the arguments of the other ops; FP8 ops modify some arguments."""
        e4m3, e5m2, inner = torch.float8_e4m3fn, torch.float8_e5m2, self._inner

        def scales() -> tuple[Tensor, Tensor]:
            return torch.full((), SCALE, device=self._device), torch.zeros((), device=self._device)

        def x(columns: int, draw: int = 1) -> Tensor:
            return self._random(draw, self._tokens, columns, dtype=torch.bfloat16)

        def norm() -> tuple[Any, ...]:
            return self._dropout_add_layer_norm(1)

        def factors(dtype: torch.dtype) -> tuple[Any, ...]:
            a, b = (
                self._random(0, self._tokens, self._hidden).to(dtype),
                self._random(1, inner, self._hidden).to(e4m3),
            )
            inverse = FP8Scaling(1, Products()).to(self._device).inverse[0]
            inverse.copy_(torch.tensor([0.25, 2.0, 1.0]))
            return a, b, (inverse[INPUT], inverse[WEIGHT])

        def product() -> tuple[Any, ...]:
            return (
                *factors(e4m3),
                torch.bfloat16,
                True,
                self._random(2, inner, dtype=torch.bfloat16),
                None,
            )

        def product_gelu_backward() -> tuple[Any, ...]:
            return (
                *factors(e5m2),
                True,
                x(inner, 3),
                self._random(2, inner),
                False,
                *scales(),
                e5m2,
            )

        def backward() -> tuple[Any, ...]:
            x_and_residual = norm()
            saved = registry.form("fp8_dropout_add_layer_norm_forward", "plain")(
                *x_and_residual, *scales()
            )[-1]
            gradients = x(self._hidden, 2), x(self._hidden, 3)
            return (*gradients, saved, x_and_residual[2], DROPOUT, self._key, self._rows, *scales())

        def gelu(*draws: int) -> tuple[Any, ...]:
            return (*(self._random(draw, self._tokens, inner, dtype=None) for draw in draws), False)

        return {
            "gelu": lambda: gelu(1),
            "gelu_backward": lambda: gelu(1, 2),
            "fp8_quantise": lambda: (x(inner), *scales(), e4m3, None),
            "fp8_quantise_sum": lambda: (x(inner), *scales(), e5m2),
            "fp8_gelu": lambda: (x(inner), self._random(1, inner), False, *scales(), e4m3),
            "fp8_gelu_backward": lambda: (
                x(inner),
                x(inner, 2),
                self._random(1, inner),
                False,
                *scales(),
                e5m2,
            ),
            "fp8_dropout_add_layer_norm_forward": lambda: (*norm(), *scales()),
            "fp8_dropout_add_layer_norm_backward": backward,
            "fp8_product": product,
            "fp8_product_gelu": lambda: (
                *factors(e4m3),
                self._random(2, inner),
                False,
                *scales(),
                e4m3,
            ),
            "fp8_product_gelu_backward": product_gelu_backward,
        }


FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE, TIMES = "proof", "times"
TURNS = 4
MARGIN = 1.2  # how many times as fast another implementation must be
TIMED_LENGTHS = (
    36,
    84,
    204,
    484,
    512,
)  # Wikipedia's quantiles: 5, 25, 50, 75 and 95 % of the sequences are not longer
TIMED_TOKENS = {"cuda": 10_000, "cpu": 1_200}  # at least
FP8_SHARE = 0.25  # of a rounding step of FP8
FAILS = "fails"
OWN_MASKS = "flash"  # generates its own masks, so compare it without dropout
# Settings that disable an implementation.
REMEDIES = {
    "cublaslt": "OPS=triton",
    **dict.fromkeys(("flash", "fmha", "fused"), "OPS=auto"),
}  # others: OPS=plain
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
    """Select `choice` and refuse implementations that disagree with the reference. Call it on all ranks.

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
        _keep_fastest(
            {op: problems[op] for op in names}, reason, shape, device, dtype, over_ranks, say
        )
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
            why = reason(op, chosen[op]) or "failed verification on another rank"
            say(
                f"ops: {op} runs {registry.refuse(op, chosen[op], device, why)}: {chosen[op]} {why}"
            )
        if not failed.any():
            break
    # Do not cache exceptions: they may be due to lack of memory.
    found = {key: why for key, why in found.items() if not why.startswith(FAILS)}
    if len(found) > known:
        device_cache.store(CACHE, device, found, kind)


def _keep_fastest(
    problems: Mapping[str, Problem],
    reason: Callable[[str, str], str],
    shape: BertConfig,
    device: torch.device,
    dtype: torch.dtype,
    over_ranks: OverRanks,
    say: Say,
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
    order, available = registry.order_to_time(device), registry.available(device)
    usable = {
        op: [n for n in order if n in available[op] and registry.takes(n, dtype)] for op in problems
    }
    kind = f"{dtype} {shape}"
    seconds = device_cache.load(TIMES, device, say, kind)
    taken: dict[tuple[str, str], float] = dict.fromkeys(
        itertools.product(problems, order), math.inf
    )
    for op, problem in problems.items():
        forms = {
            f"{op} {name}": registry.form(op, name) for name in usable[op] if not reason(op, name)
        }
        if not forms.keys() <= seconds.keys():
            seconds |= _seconds(forms, *problem, device)
        taken |= {
            (op, name): seconds[f"{op} {name}"] for name in usable[op] if f"{op} {name}" in forms
        }
    # Memory may be sufficient next time.
    device_cache.store(
        TIMES, device, {key: time for key, time in seconds.items() if math.isfinite(time)}, kind
    )
    slowest = torch.tensor([*taken.values()])  # as many on all ranks, whatever is available on each
    over_ranks(slowest)
    table = dict(zip(taken, slowest.tolist(), strict=True))
    for op in problems:
        times = {name: table[op, name] for name in usable[op]}
        fastest = _preferred(times)
        for name in times.keys() - {fastest, "plain"}:
            registry.refuse(op, name, device, "is slower")
        listed = ", ".join(
            f"{name} {1e3 * times[name]:.3g} ms" for name in sorted(times, key=times.__getitem__)
        )
        say(f"ops: {op} runs {fastest}: {listed}")


def _preferred(seconds: Mapping[str, float]) -> str:
    """Return the first name, in order of preference, that is not clearly slower than the fastest."""
    return next(name for name, taken in seconds.items() if taken <= MARGIN * min(seconds.values()))


def _seconds(
    forms: Mapping[str, registry.Form],
    make: Arguments,
    places: tuple[int, ...],
    device: torch.device,
) -> dict[str, float]:
    """Return by key the shortest time of both passes, infinite if memory is insufficient. The implementations take
    turns, so a change of the clock affects all."""
    arguments = list(make(0))
    inputs = [arguments[place].requires_grad_() for place in places]

    def both_passes(form: registry.Form) -> None:
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


def check(
    op: str, name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes = SMALL
) -> str:
    """Return why implementation `name` of `op` must not be used, or "" if it agrees with the reference.

    Raises:
        UserError: it broke the device.
    """
    problems, form = (
        Problems(device, dtype, dropout=name != OWN_MASKS, sizes=sizes),
        registry.form(op, name),
    )
    differentiable = problems.differentiable()
    try:
        if op in differentiable:
            why = compare(op, *differentiable[op], form, dtype)[0].why
        else:
            why = _difference(form, registry.form(op, "plain"), problems.not_differentiable()[op])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # from a kernel, its compiler or its library
        why = f"{FAILS}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        _check_device(op, name, device, why)
    return why


def _check_device(op: str, name: str, device: torch.device, why: str) -> None:
    """Raise UserError if the device can no longer run anything."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        remedy = f"Set {REMEDIES.get(name, 'OPS=plain')}, which leaves it out"
        reason = f"has broken the {device.type} device: {why}"
        raise UserError("device.broken", f"the {name} kernel of {op}", reason, remedy) from error


def _difference(
    form: Callable[..., Any], plain: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]
) -> str:
    """Return how results differ from the reference's, or "" if they agree."""
    pairs = zip(*(_results(run, arguments()) for run in (form, plain)), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"returns {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
        is_fp8 = theirs.dtype in FP8_TYPES
        allowed = (
            FP8_SHARE * torch.finfo(theirs.dtype).eps if is_fp8 else torch.finfo(torch.bfloat16).eps
        )
        error, size = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
        if not error <= allowed * size:  # written so that NaN fails
            return f"result {number}: error {error:.3e} for norm {size:.3e}, at most {allowed:.3e} of it is allowed"
    return ""


def _results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return results, and scalar arguments that the op may have modified. Autograd does not differentiate them."""
    results = [x for x in tree_leaves(function(*arguments)) if isinstance(x, Tensor)]
    return [*results, *(x for x in arguments if isinstance(x, Tensor) and not x.dim())]
