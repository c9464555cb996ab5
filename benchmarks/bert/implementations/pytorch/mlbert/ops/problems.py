"""Create arguments of every op, to verify and to time its implementations.

The problems cover empty sequences, one token, more than a block,
and tokens after the last sequence.

Legend: S sequences, T tokens, N heads, H head size, D hidden, F inner size, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.ops import forms as registry
from mlbert.ops.attention import sequence_order
from mlbert.ops.comparison import Arguments
from mlbert.ops.dropout import dropout_key
from mlbert.ops.fp8_scaling import INPUT, WEIGHT, FP8Scaling, Products
from mlbert.ops.qkv_attention import AttentionArguments
from mlbert.ops.rotary import rotations

LENGTHS = (0, 7, 0, 65, 1, 33, 180, 0)
TAIL = 13  # tokens after the last sequence
TOKENS_PER_MASK = 8
DROPOUT = 0.1
EPS = 1e-12
ROTARY_BASE = 10_000.0
SCALE = 4.0  # for FP8
INVERSE_SCALES = (0.25, 2.0, 1.0)  # of an FP8 product's input, weight and gradient
NUM_POSITIONS = 40
NUM_SEGMENTS = 2
# Few different ids for many tokens make long runs of equal rows.
NUM_TOKEN_IDS = 9
NUM_POSITION_IDS = 33
NUM_SLOPES = 253  # codes of GELU's derivative
# Wikipedia's quantiles: 5, 25, 50, 75 and 95 % of the sequences are not longer.
TIMED_LENGTHS = (36, 84, 204, 484, 512)
TIMED_TOKENS = {"cuda": 10_000, "cpu": 1_200}  # at least


class Sizes(NamedTuple):
    """Sizes of a model: D, N, F, V, the vocabulary's rows in memory, and the window of its local
    attention, if it has some.
    """

    hidden: int = 128
    heads: int = 2
    inner: int = 256
    vocabulary: int = 509
    padded: int = 512
    window: int | None = 40

    @classmethod
    def of_run(cls, shape: BertConfig, device: torch.device) -> Sizes:
        """Return the sizes to verify for a run of this model.

        On a GPU these are the run's, because other sizes are other binaries, layouts and
        algorithms. C kernels take the sizes as arguments, so on a CPU they are small.
        """
        if device.type != "cuda":
            return cls()
        return cls.of_model(shape)

    @classmethod
    def of_model(cls, shape: BertConfig) -> Sizes:
        """Return the sizes of a model."""
        return cls(
            hidden=shape.hidden_size,
            heads=shape.num_attention_heads,
            inner=shape.intermediate_size,
            vocabulary=shape.vocab_size,
            padded=shape.padded_vocab_size,
            window=shape.local_window,
        )


class Problem(NamedTuple):
    """A problem of an op: a function that creates its arguments,
    and the indices of those to differentiate.
    """

    make: Arguments
    differentiated: tuple[int, ...]


class Problems:
    """Create arguments of the ops on a device.

    Args:
        device: of the tensors.
        dtype: of the activations; weights are float32.
        sizes: of the model.
        lengths: of the sequences; by default the edge cases, with ignored labels.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: Sizes = Sizes(),
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._sizes = sizes
        self._head_size = sizes.hidden // sizes.heads
        self._device = device
        self._dtype = dtype
        self._key = dropout_key(3, 1, 2, 3)
        self._has_ignored = lengths is None
        self._lengths = lengths or LENGTHS
        self._tokens = sum(self._lengths) + TAIL
        self._masked = self._tokens // TOKENS_PER_MASK
        self._rows = torch.arange(1000, 1000 + self._tokens, dtype=torch.int32, device=device)

    @classmethod
    def to_time(cls, shape: BertConfig, device: torch.device, dtype: torch.dtype) -> Problems:
        """Return problems of a model's sizes with `TIMED_LENGTHS`,
        cut off at its longest sequence and repeated.
        """
        lengths = [min(length, shape.max_position_embeddings) for length in TIMED_LENGTHS]
        repeats = math.ceil(TIMED_TOKENS[device.type] / sum(lengths))
        return cls(device, dtype, sizes=Sizes.of_model(shape), lengths=lengths * repeats)

    def differentiable(self) -> dict[str, Problem]:
        """Return the ops that are compared in float64, forward and backward."""
        return {
            "attention": Problem(self._attention, (0,)),
            "dropout_add_layer_norm": Problem(self._dropout_add_layer_norm, (0, 1, 2, 3, 8)),
            "layer_norm_dropout": Problem(self._layer_norm_dropout, (0, 1, 2)),
            "embedding_sum": Problem(self._embedding_sum, (3, 4, 5)),
            "masked_cross_entropy": Problem(self._masked_cross_entropy, (0,)),
            "linear_qkv": Problem(self._linear_qkv, tuple(range(7))),
            "linear": Problem(self._linear_gelu, (0, 1, 2)),
            "linear_gelu": Problem(self._linear_gelu, (0, 1, 2)),
            "feed_forward": Problem(self._feed_forward, (0, 1, 2, 3)),
            "gated_feed_forward": Problem(self._gated_feed_forward, (0, 1, 2)),
            "gated_gelu": Problem(self._gated_gelu, (0,)),
            "add_dropout": Problem(self._add_dropout, (0, 1)),
        }

    def variants(self) -> dict[str, tuple[Problem, ...]]:
        """Return further problems of some ops that the model has, to be compared likewise."""
        found = dict[str, tuple[Problem, ...]]()
        if self._sizes.window is not None:
            found["attention"] = (Problem(self._local_attention, (0,)),)
        return found

    def not_differentiable(self) -> dict[str, Callable[[], tuple[Any, ...]]]:
        """Return functions that create the arguments of the other ops;
        FP8 ops modify some arguments.
        """
        return {
            "gelu": self._gelu,
            "gelu_backward": self._gelu_backward,
            "qkv_attention": self._qkv_attention,
            "fp8_qkv_attention": self._fp8_qkv_attention,
            "fp8_quantize": self._fp8_quantize,
            "fp8_quantize_sum": self._fp8_quantize_sum,
            "fp8_gelu": self._fp8_gelu,
            "fp8_gelu_backward": self._fp8_gelu_backward,
            "fp8_dropout_add_layer_norm_forward": self._fp8_norm_forward,
            "fp8_dropout_add_layer_norm_backward": self._fp8_norm_backward,
            "fp8_product": self._fp8_product,
            "fp8_product_gelu": self._fp8_product_gelu,
            "fp8_product_gelu_backward": self._fp8_product_gelu_backward,
            "fp8_product_slope": self._fp8_product_slope,
            "fp8_product_slope_backward": self._fp8_product_slope_backward,
        }

    def all(self) -> dict[str, Problem]:
        """Return every op as in `differentiable`, also those without anything to differentiate."""
        found = self.differentiable()
        for op, make in self.not_differentiable().items():
            found[op] = Problem(_ignore_draw(make), ())
        return found

    def _random(self, draw: int, *shape: int, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """Return normal numbers of bfloat16 precision,
        generated on the host to be the same on every device.
        """
        generator = torch.Generator().manual_seed(sum(shape) + 1000 * draw)
        numbers = torch.randn(shape, generator=generator).bfloat16()
        return numbers.to(self._device, dtype or self._dtype)

    def _ids(self, draw: int, count: int, bound: int) -> Tensor:
        generator = torch.Generator().manual_seed(count + 1000 * draw)
        return torch.randint(bound, (count,), generator=generator).to(self._device)

    def _qkv(self, draw: int) -> Tensor:
        heads = self._sizes.heads
        return self._random(draw, self._tokens, 3, heads, self._head_size, dtype=None)

    def _attention(self, draw: int) -> tuple[Any, ...]:
        bounds = torch.tensor(
            [0, *itertools.accumulate(self._lengths)], dtype=torch.int32, device=self._device
        )
        qkv = self._qkv(draw)
        return (qkv, bounds, max(self._lengths), DROPOUT, self._key, self._rows, None)

    def _local_attention(self, draw: int) -> tuple[Any, ...]:
        positions = torch.arange(self._tokens, device=self._device)
        table = rotations(positions, self._head_size, ROTARY_BASE)
        return (*self._attention(draw), self._sizes.window, table)

    def _dropout_add_layer_norm(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        x = self._random(2 * draw, self._tokens, hidden, dtype=None)
        residual = self._random(2 * draw + 1, self._tokens, hidden, dtype=None)
        weight = self._random(3 * draw, hidden)
        bias = self._random(3 * draw + 1, hidden)
        x_bias = self._random(3 * draw + 2, hidden)
        return (x, residual, weight, bias, EPS, DROPOUT, self._key, self._rows, x_bias)

    def _layer_norm_dropout(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        x = self._random(draw, self._tokens, hidden)
        weight = self._random(2 * draw, hidden)
        bias = self._random(2 * draw + 1, hidden)
        return (x, weight, bias, EPS, DROPOUT, self._key, self._rows)

    def _embedding_sum(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        token_ids = self._ids(draw, self._tokens, NUM_TOKEN_IDS)
        segment_ids = self._ids(draw + 1, self._tokens, NUM_SEGMENTS)
        position_ids = self._ids(draw + 2, self._tokens, NUM_POSITION_IDS)
        tokens = self._random(draw, self._sizes.padded, hidden)
        positions = self._random(draw + 1, NUM_POSITIONS, hidden)
        segments = self._random(draw + 2, NUM_SEGMENTS, hidden)
        return (token_ids, segment_ids, position_ids, tokens, positions, segments)

    def _masked_cross_entropy(self, draw: int) -> tuple[Any, ...]:
        logits = self._random(draw, self._masked, self._sizes.padded, dtype=None)
        labels = self._ids(draw, self._masked, self._sizes.vocabulary)
        if self._has_ignored:
            labels[::9] = -100
        return (logits, labels, self._sizes.vocabulary)

    def _linear_qkv(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        x = self._random(draw, self._tokens, hidden, dtype=None)
        weights = [self._random(3 * draw + i, hidden, hidden) * hidden**-0.5 for i in range(3)]
        biases = [self._random(3 * draw + i, hidden) for i in range(3)]
        return (x, *weights, *biases)

    def _linear_gelu(self, draw: int) -> tuple[Any, ...]:
        x, weight, bias, _, exact = self._feed_forward(draw)
        return (x, weight, bias, exact)

    def _feed_forward(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        inner = self._sizes.inner
        x = self._random(draw, self._tokens, hidden, dtype=None)
        first_weight = self._random(draw, inner, hidden) * hidden**-0.5
        first_bias = self._random(draw, inner)
        second_weight = self._random(draw, hidden, inner) * inner**-0.5
        exact = False
        return (x, first_weight, first_bias, second_weight, exact)

    def _gated_feed_forward(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        inner = self._sizes.inner
        x = self._random(draw, self._tokens, hidden, dtype=None)
        first_weight = self._random(draw, 2 * inner, hidden) * hidden**-0.5
        second_weight = self._random(draw, hidden, inner) * inner**-0.5
        return (x, first_weight, second_weight, True, 0.0, self._key, self._rows)

    def _gated_gelu(self, draw: int) -> tuple[Any, ...]:
        pre = self._random(draw, self._tokens, 2 * self._sizes.inner, dtype=None)
        return (pre, True)

    def _add_dropout(self, draw: int) -> tuple[Any, ...]:
        hidden = self._sizes.hidden
        residual = self._random(2 * draw, self._tokens, hidden, dtype=None)
        x = self._random(2 * draw + 1, self._tokens, hidden, dtype=None)
        return (residual, x, DROPOUT, self._key, self._rows)

    def _gelu(self) -> tuple[Any, ...]:
        x = self._random(1, self._tokens, self._sizes.inner, dtype=None)
        return (x, False)

    def _gelu_backward(self) -> tuple[Any, ...]:
        d_out = self._random(1, self._tokens, self._sizes.inner, dtype=None)
        x = self._random(2, self._tokens, self._sizes.inner, dtype=None)
        return (d_out, x, False)

    def _qkv_attention(self) -> tuple[Any, ...]:
        qkv, bounds, longest, dropout, key, rows, slopes = self._attention(1)
        d_out = self._random(2, self._tokens, *qkv.shape[2:], dtype=None)
        order = sequence_order(bounds)
        arguments = AttentionArguments(bounds, longest, dropout, key, rows, slopes, order)
        return (qkv, d_out, arguments)

    def _fp8_qkv_attention(self) -> tuple[Any, ...]:
        return (*self._qkv_attention(), *self._scale())

    def _scale(self) -> tuple[Tensor, Tensor]:
        """Return the scale of an FP8 copy, and the place of its maximum."""
        scale = torch.full((), SCALE, device=self._device)
        maximum = torch.zeros((), device=self._device)
        return (scale, maximum)

    def _bf16(self, draw: int, columns: int) -> Tensor:
        return self._random(draw, self._tokens, columns, dtype=torch.bfloat16)

    def _fp8_quantize(self) -> tuple[Any, ...]:
        x = self._bf16(1, self._sizes.inner)
        return (x, *self._scale(), torch.float8_e4m3fn, None)

    def _fp8_quantize_sum(self) -> tuple[Any, ...]:
        x = self._bf16(1, self._sizes.inner)
        return (x, *self._scale(), torch.float8_e5m2)

    def _fp8_gelu(self) -> tuple[Any, ...]:
        x = self._bf16(1, self._sizes.inner)
        bias = self._random(1, self._sizes.inner)
        return (x, bias, False, *self._scale(), torch.float8_e4m3fn)

    def _fp8_gelu_backward(self) -> tuple[Any, ...]:
        d_out = self._bf16(1, self._sizes.inner)
        x = self._bf16(2, self._sizes.inner)
        bias = self._random(1, self._sizes.inner)
        return (d_out, x, bias, False, *self._scale(), torch.float8_e5m2)

    def _fp8_norm_forward(self) -> tuple[Any, ...]:
        return (*self._dropout_add_layer_norm(1), *self._scale())

    def _fp8_norm_backward(self) -> tuple[Any, ...]:
        arguments = self._fp8_norm_forward()
        weight = arguments[2]
        *_, saved = registry.form("fp8_dropout_add_layer_norm_forward", "plain")(*arguments)
        d_out = self._bf16(2, self._sizes.hidden)
        d_sum = self._bf16(3, self._sizes.hidden)
        return (d_out, d_sum, saved, weight, DROPOUT, self._key, self._rows, *self._scale())

    def _fp8_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return the factors of an FP8 product, the first of `dtype`, and their inverse scales."""
        a = self._random(0, self._tokens, self._sizes.hidden).to(dtype)
        b = self._random(1, self._sizes.inner, self._sizes.hidden).to(torch.float8_e4m3fn)
        inverse = FP8Scaling(1, Products()).to(self._device).inverse[0]
        inverse.copy_(torch.tensor(INVERSE_SCALES))
        return (a, b, (inverse[INPUT], inverse[WEIGHT]))

    def _fp8_product(self) -> tuple[Any, ...]:
        factors = self._fp8_factors(torch.float8_e4m3fn)
        bias = self._random(2, self._sizes.inner, dtype=torch.bfloat16)
        return (*factors, torch.bfloat16, True, bias, None)

    def _fp8_product_gelu(self) -> tuple[Any, ...]:
        factors = self._fp8_factors(torch.float8_e4m3fn)
        bias = self._random(2, self._sizes.inner)
        return (*factors, bias, False, *self._scale(), torch.float8_e4m3fn)

    def _fp8_product_gelu_backward(self) -> tuple[Any, ...]:
        factors = self._fp8_factors(torch.float8_e5m2)
        x = self._bf16(3, self._sizes.inner)
        bias = self._random(2, self._sizes.inner)
        return (*factors, True, x, bias, False, *self._scale(), torch.float8_e5m2)

    def _fp8_product_slope(self) -> tuple[Any, ...]:
        factors = self._fp8_factors(torch.float8_e4m3fn)
        bias = self._random(2, self._sizes.inner)
        return (*factors, bias, *self._scale(), torch.float8_e4m3fn)

    def _fp8_product_slope_backward(self) -> tuple[Any, ...]:
        factors = self._fp8_factors(torch.float8_e5m2)
        codes = self._ids(3, self._tokens * self._sizes.inner, NUM_SLOPES)
        slopes = codes.view(self._tokens, self._sizes.inner).to(torch.uint8)
        return (*factors, slopes, *self._scale(), torch.float8_e5m2)


def _ignore_draw(make: Callable[[], tuple[Any, ...]]) -> Arguments:
    """Return a function of the draw that creates the same arguments each time."""
    return lambda _draw: make()
