"""Count the pairs of query and key that the Triton attention computes, and their duration.

A program computes whole tiles, so it computes more pairs than the model needs: those past the end
of a sequence, and those outside of the window in the tiles at its border. The loops are those of
`mlbert.ops.triton.attention_forward` and `attention_backward`.

The seconds of a pair are measured: BERT-large's step of 93 sequences, 24,431 tokens, in a graph on
an H200 (records/2026-11-26_gpu-check_h200, third/profile.json), with heads of 64 channels, tiles of
64 x 64 and dropout in attention. Without dropout a forward tile has 285 machine instructions in
place of 445 (counted by tools/compile_kernels.py for sm_90a); whether that makes it faster is not
measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from counted.recorder import Operand, Operation
from mlbert.data.loading.synthetic import LENGTH_QUANTILES

FORWARD = "attention_forward_kernel"
QUERY_GRADIENT = "attention_query_gradient_kernel"
KEY_VALUE_GRADIENT = "attention_key_value_gradient_kernel"
KERNELS = (FORWARD, QUERY_GRADIENT, KEY_VALUE_GRADIENT)

MEASURED_LAYERS = 24
MEASURED_HEADS = 16
MEASURED_SEQUENCES = 93
MEASURED_LONGEST = 512
MEASURED_TILE = 64
# Seconds of all layers, by PRECISION, which only differ in the clock that the power limit leaves.
MEASURED_SECONDS: Mapping[str, Mapping[str, float]] = {
    "bf16": {FORWARD: 4.810e-3, QUERY_GRADIENT: 5.577e-3, KEY_VALUE_GRADIENT: 7.135e-3},
    "fp8": {FORWARD: 4.245e-3, QUERY_GRADIENT: 5.039e-3, KEY_VALUE_GRADIENT: 6.381e-3},
}
# Share of a forward tile's instructions that is left without dropout.
FORWARD_WITHOUT_DROPOUT = 285 / 445


def measured_lengths() -> np.ndarray:
    """Return the lengths (int64) of the measured step's sequences.

    Until November 28 they were linear between the quantiles of the histogram.
    """
    shares = (np.arange(MEASURED_SEQUENCES) + 0.5) / MEASURED_SEQUENCES
    quantiles = np.array(LENGTH_QUANTILES)
    return np.interp(shares, quantiles[:, 0], quantiles[:, 1]).astype(np.int64)


def computed_pairs(
    lengths: Sequence[int], rows: int, columns: int, window: int | None = None
) -> int:
    """Return the pairs that the tiles of one head cover.

    Args:
        lengths: tokens of each sequence.
        rows: tokens of a program: queries, or keys for the gradient of K and V.
        columns: tokens of each iteration of its loop.
        window: tokens seen on each side, or None for all.
    """
    pairs = 0
    for length in lengths:
        for first in range(0, length, rows):
            start = 0
            end = length
            if window is not None:
                start = max(first - window, 0) // columns * columns
                end = min(first + rows + window, length)
            tiles = -(-(end - start) // columns)
            pairs += tiles * rows * columns
    return pairs


@functools.cache
def seconds_per_pair(kernel: str, precision: str) -> float:
    """Return the measured seconds of a pair of one head."""
    lengths = measured_lengths().tolist()
    pairs = computed_pairs(lengths, MEASURED_TILE, MEASURED_TILE)
    return MEASURED_SECONDS[precision][kernel] / (pairs * MEASURED_HEADS * MEASURED_LAYERS)


@functools.cache
def _pairs_of_equal(length: int, rows: int, columns: int, window: int | None) -> int:
    return computed_pairs([length], rows, columns, window)


def seconds_of_launch(operation: Operation, length: int, precision: str, is_scaled: bool) -> float:
    """Return the modeled seconds of a launch of one of `KERNELS`.

    Args:
        operation: the launch, on sequences of ``length`` tokens each.
        precision: PRECISION of the measured step.
        is_scaled: assume that a forward tile without dropout takes the time of its instructions.
    """
    arguments = operation.arguments
    rows = arguments["BLOCK_Q"]
    columns = arguments["BLOCK_K"]
    if operation.name == KEY_VALUE_GRADIENT:
        rows, columns = columns, rows
    qkv = arguments["qkv"]
    assert isinstance(qkv, Operand)
    num_sequences = qkv.shape[0] // length
    pairs = num_sequences * _pairs_of_equal(length, rows, columns, arguments["WINDOW"])
    seconds = pairs * arguments["NUM_HEADS"] * seconds_per_pair(operation.name, precision)
    if is_scaled and operation.name == FORWARD and not arguments["THRESHOLD"]:
        seconds *= FORWARD_WITHOUT_DROPOUT
    return seconds
