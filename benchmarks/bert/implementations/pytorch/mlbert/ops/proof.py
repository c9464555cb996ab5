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

Legend: S sequences, T tokens, N heads, H head size, D hidden, F inner size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.ops import device_cache
from mlbert.ops import forms as registry
from mlbert.ops.comparison import Arguments, compare
from mlbert.ops.dropout import dropout_key
from mlbert.ops.fp8_scaling import INPUT, TYPES, WEIGHT, FP8Scaling, Products
from mlbert.ops.precision import compute_dtype
from mlbert.ops.rotary import rotations

LENGTHS = (0, 7, 0, 65, 1, 33, 180, 0)
TAIL = 13  # tokens after the last sequence
TOKENS = sum(LENGTHS) + TAIL
MASKED = 37
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
        layer = shape.hidden_size, shape.num_attention_heads, shape.intermediate_size
        return cls(*layer, shape.vocab_size, shape.padded_vocab_size)


SMALL = Sizes()


class Problems:
    """Create arguments of the ops on a device.

    Args:
        device: of the tensors.
        dtype: of the activations; weights are float32.
        dropout: whether attention uses dropout.
        sizes: of the model.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, dropout: bool = True, sizes: Sizes = SMALL) -> None:
        self._hidden, heads, self._inner, self._vocabulary, self._padded = sizes
        self._heads = 3, heads, self._hidden // heads
        self._device, self._dtype, self._dropout = device, dtype, DROPOUT if dropout else 0.0
        self._key = dropout_key(3, 1, 2, 3)
        self._rows = torch.arange(1000, 1000 + TOKENS, dtype=torch.int32, device=device)

    def differentiable(self) -> dict[str, tuple[Arguments, tuple[int, ...]]]:
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

    def _random(self, draw: int, *shape: int, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """Return normal numbers of bfloat16 precision, generated on the host to be the same on every device."""
        generator = torch.Generator().manual_seed(sum(shape) + 1000 * draw)
        return torch.randn(shape, generator=generator).bfloat16().to(self._device, dtype or self._dtype)

    def _ids(self, draw: int, count: int, bound: int) -> Tensor:
        generator = torch.Generator().manual_seed(count + 1000 * draw)
        return torch.randint(bound, (count,), generator=generator).to(self._device)

    def _attention(self, draw: int) -> tuple[Any, ...]:
        bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=self._device)
        qkv = self._random(draw, TOKENS, *self._heads, dtype=None)
        return (qkv, bounds, max(LENGTHS), self._dropout, self._key, self._rows, None)

    def _rotary(self, draw: int) -> tuple[Any, ...]:
        qkv = self._random(draw, TOKENS, *self._heads, dtype=None)
        return (qkv, rotations(torch.arange(TOKENS, device=self._device), self._heads[2], 10_000.0))

    def _dropout_add_layer_norm(self, draw: int) -> tuple[Any, ...]:
        x, residual = (self._random(2 * draw + i, TOKENS, self._hidden, dtype=None) for i in range(2))
        weight, bias, x_bias = (self._random(3 * draw + i, self._hidden) for i in range(3))
        return (x, residual, weight, bias, 1e-12, DROPOUT, self._key, self._rows, x_bias)

    def _layer_norm_dropout(self, draw: int) -> tuple[Any, ...]:
        x = self._random(draw, TOKENS, self._hidden)
        weight, bias = (self._random(2 * draw + i, self._hidden) for i in range(2))
        return (x, weight, bias, 1e-12, DROPOUT, self._key, self._rows)

    def _embedding_sum(self, draw: int) -> tuple[Any, ...]:
        # Few ids for many tokens: long runs of equal rows.
        ids = self._ids(draw, TOKENS, 9), self._ids(draw + 1, TOKENS, 2), self._ids(draw + 2, TOKENS, 33)
        return (*ids, *(self._random(draw + i, n, self._hidden) for i, n in enumerate((self._padded, 40, 2))))

    def _masked_cross_entropy(self, draw: int) -> tuple[Any, ...]:
        labels = self._ids(draw, MASKED, self._vocabulary)
        labels[::9] = -100  # ignored
        return (self._random(draw, MASKED, self._padded, dtype=None), labels, self._vocabulary)

    def _linear_qkv(self, draw: int) -> tuple[Any, ...]:
        weights = (self._random(3 * draw + i, self._hidden, self._hidden) * self._hidden**-0.5 for i in range(3))
        biases = (self._random(3 * draw + i, self._hidden) for i in range(3))
        return (self._random(draw, TOKENS, self._hidden, dtype=None), *weights, *biases)

    def _linear_gelu(self, draw: int) -> tuple[Any, ...]:
        return (*self._feed_forward(draw)[:3], False)

    def _feed_forward(self, draw: int) -> tuple[Any, ...]:
        x, bias = self._random(draw, TOKENS, self._hidden, dtype=None), self._random(draw, self._inner)
        w1 = self._random(draw, self._inner, self._hidden) * self._hidden**-0.5
        return (x, w1, bias, self._random(draw, self._hidden, self._inner) * self._inner**-0.5, False)

    def not_differentiable(self) -> dict[str, Callable[[], tuple[Any, ...]]]:
        """Return functions that create the arguments of the other ops; FP8 ops modify some arguments."""
        e4m3, e5m2, inner = torch.float8_e4m3fn, torch.float8_e5m2, self._inner

        def scales() -> tuple[Tensor, Tensor]:
            return torch.full((), SCALE, device=self._device), torch.zeros((), device=self._device)

        def x(columns: int, draw: int = 1) -> Tensor:
            return self._random(draw, TOKENS, columns, dtype=torch.bfloat16)

        def norm() -> tuple[Any, ...]:
            return self._dropout_add_layer_norm(1)

        def product() -> tuple[Any, ...]:
            a, b = (self._random(i, n, self._hidden).to(TYPES[INPUT]) for i, n in enumerate((TOKENS, self._inner)))
            factors = FP8Scaling(1, Products()).to(self._device).inverse[0]
            factors.copy_(torch.tensor([0.25, 2.0, 1.0]))
            bias = self._random(2, self._inner, dtype=torch.bfloat16)
            return (a, b, (factors[INPUT], factors[WEIGHT]), torch.bfloat16, True, bias, None)

        def backward() -> tuple[Any, ...]:
            x_and_residual = norm()
            saved = registry.form("fp8_dropout_add_layer_norm_forward", "plain")(*x_and_residual, *scales())[-1]
            gradients = x(self._hidden, 2), x(self._hidden, 3)
            return (*gradients, saved, x_and_residual[2], DROPOUT, self._key, self._rows, *scales())

        def gelu(*draws: int) -> tuple[Any, ...]:
            return (*(self._random(draw, TOKENS, inner, dtype=None) for draw in draws), False)

        return {
            "gelu": lambda: gelu(1),
            "gelu_backward": lambda: gelu(1, 2),
            "fp8_quantise": lambda: (x(inner), *scales(), e4m3, None),
            "fp8_quantise_sum": lambda: (x(inner), *scales(), e5m2),
            "fp8_gelu": lambda: (x(inner), self._random(1, inner), False, *scales(), e4m3),
            "fp8_gelu_backward": lambda: (x(inner), x(inner, 2), self._random(1, inner), False, *scales(), e5m2),
            "fp8_dropout_add_layer_norm_forward": lambda: (*norm(), *scales()),
            "fp8_dropout_add_layer_norm_backward": backward,
            "fp8_product": product,
        }


FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE = "proof"
FP8_SHARE = 0.25  # of a rounding step of FP8
FAILS = "fails"
OWN_MASKS = "flash"  # generates its own masks, so compare it without dropout
# Settings that disable an implementation.
REMEDIES = {"cublaslt": "OPS=triton", "flash": "OPS=auto", "fmha": "OPS=auto"}  # others: OPS=plain
OverRanks = Callable[[Tensor], Any]
Say = Callable[[str], object]


def prove(
    choice: str, precision: str, shape: BertConfig, device: torch.device, over_ranks: OverRanks, say: Say
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
    names, kind = registry.ops(), f"{dtype} {sizes}"
    found = device_cache.load(CACHE, device, say, kind)
    known = len(found)
    while True:
        chosen = {
            op: name if registry.takes(name, dtype) else "plain" for op, name in registry.selected(device).items()
        }
        wanted = [op for op in names if chosen[op] != "plain" and (precision.startswith("fp8") or op[:4] != "fp8_")]
        for key, op in ((f"{op} {chosen[op]}", op) for op in wanted):
            found[key] = found[key] if key in found else check(op, chosen[op], device, dtype, sizes)
        failed = torch.tensor([op in wanted and bool(found[f"{op} {chosen[op]}"]) for op in names], dtype=torch.int64)
        over_ranks(failed)
        for op in itertools.compress(names, failed.tolist()):
            why = found.get(f"{op} {chosen[op]}") or "failed verification on another rank"
            say(f"ops: {op} runs {registry.refuse(op, chosen[op], device, why)}: {chosen[op]} {why}")
        if not failed.any():
            break
    # Do not cache exceptions: they may be due to lack of memory.
    found = {key: why for key, why in found.items() if not why.startswith(FAILS)}
    if len(found) > known:
        device_cache.store(CACHE, device, found, kind)


def check(op: str, name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes = SMALL) -> str:
    """Return why implementation `name` of `op` must not be used, or "" if it agrees with the reference.

    Raises:
        UserError: it broke the device.
    """
    problems, form = Problems(device, dtype, dropout=name != OWN_MASKS, sizes=sizes), registry.form(op, name)
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


def _difference(form: Callable[..., Any], plain: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> str:
    """Return how results differ from the reference's, or "" if they agree."""
    pairs = zip(*(_results(run, arguments()) for run in (form, plain)), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"returns {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
        is_fp8 = theirs.dtype in FP8_TYPES
        allowed = FP8_SHARE * torch.finfo(theirs.dtype).eps if is_fp8 else torch.finfo(torch.bfloat16).eps
        error, size = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
        if not error <= allowed * size:  # written so that NaN fails
            return f"result {number}: error {error:.3e} for norm {size:.3e}, at most {allowed:.3e} of it is allowed"
    return ""


def _results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return results, and scalar arguments that the op may have modified. Autograd does not differentiate them."""
    results = [x for x in tree_leaves(function(*arguments)) if isinstance(x, Tensor)]
    return [*results, *(x for x in arguments if isinstance(x, Tensor) and not x.dim())]
