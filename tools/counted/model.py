"""Model the duration of a counted step from sustained rates (`counted.gpus`).

    products     the longer of FLOPs / sustained rate and bytes / bandwidth, for each product
    attention    tokens x the estimate in `counted.gpus`
    casts        the longer of bytes / bandwidth and instructions / issue rate, for each kernel
    all others   bytes / bandwidth

The model has no gaps between kernels, and an instruction is issued in every clock. With the
measured rates, sequences per second are 7 to 8 % above the measured ones in bfloat16, and within 2
% in FP8.
"""

from __future__ import annotations

import math

from counted.gpus import ISSUES_A_CLOCK, Gpu, Rates
from counted.parts import ATTENTION, NORMS, PARTS, is_fp8, part_of
from counted.recorder import Operand, Operation
from counted.steps import Counted
from mlbert.config.bert_config import BertConfig

SEQUENCES_A_PACK = 2
NUMBERS = 1024
# Machine instructions of a warp for this many numbers on compute capability 9.0, counted by
# tools/compile_kernels.py. Keys: the kernel's OPERATION (plain, GELU or GELU's derivative), and
# whether it sums over tokens.
INSTRUCTIONS = {(0, False): 256, (0, True): 388, (1, False): 594, (2, True): 895}


def seconds_of_parts(counted: Counted, config: BertConfig, gpu: Gpu, kind: str) -> dict[str, float]:
    """Return the seconds of each of `PARTS` in one step, with the rates of a kind."""
    assert gpu.rates is not None, f"the rates of {gpu.name} are not known"
    rates = gpu.rates[kind]
    seconds = dict.fromkeys(PARTS, 0.0)
    for operation in counted.step:
        part = part_of(operation, counted, config)
        if part != ATTENTION:
            bandwidth = rates.elementwise if part == NORMS else rates.bandwidth
            seconds[part] += seconds_of(operation, gpu, rates, bandwidth)
    return seconds | {ATTENTION: counted.static_shape.tokens * rates.attention}


def seconds_of(operation: Operation, gpu: Gpu, rates: Rates, bandwidth: float) -> float:
    """Return the seconds of one launch outside attention."""
    products = operation.flops / (rates.fp8_flops if is_fp8(operation) else rates.bf16_flops)
    issued = _issue_slots(operation) / (gpu.multiprocessors * ISSUES_A_CLOCK * rates.clock)
    return max(operation.moved / bandwidth, products, issued)


def _issue_slots(operation: Operation) -> int:
    """Return the instructions of all warps for kernels that instructions may limit, else 0."""
    source = operation.arguments.get("x")
    if operation.name != "cast_kernel" or not isinstance(source, Operand):
        return 0
    kind = operation.arguments["OPERATION"], operation.arguments["partial"] is not None
    return math.ceil(math.prod(source.shape) / NUMBERS) * INSTRUCTIONS[kind]
