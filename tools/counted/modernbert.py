"""Count one optimizer step of ModernBERT's pre-training on a simulated GPU, and model its duration.

All sequences have the full length. `counted.steps` records the launches; here they are assigned to
parts, and the seconds of a launch are the longer of its FLOPs and bytes at the rates of
`counted.gpus`, those of attention a time for each pair of tokens (`counted.attention_tiles`).

Two rates give a range. The low one has the measured bandwidth of today's norms and casts for
everything element-wise, and attention as it was measured with dropout. The high one has a copy's
bandwidth, and attention without dropout at its share of instructions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from counted.attention_tiles import KERNELS, seconds_of_launch
from counted.gpus import MEASURED, TUNED, Gpu
from counted.model import seconds_of
from counted.parts import Total
from counted.pretend import DEVICE
from counted.recorder import Operand, Operation, RecordedCapture, recording
from counted.steps import Counted, Trained, models_on_the_device, run
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BACKWARD_FACTOR, BatchWork, masked_lm
from mlbert.data.batches import StaticShape
from mlbert.distributed.reduce import GradientReducer
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.ops.precision import compute_dtype, fp8_products
from mlbert.optim import optimizers as methods
from mlbert.optim.adamw import DecoupledStableAdamW
from mlbert.optim.flat import FlatParameters
from mlbert.training.step import GraphMode, Graphs

PRODUCTS = "products of layers and head"
DECODER = "decoder, loss"
GLOBAL_ATTENTION = "global attention"
LOCAL_ATTENTION = "local attention"
NORMS = "norms"
ROTATIONS = "rotations"
GATES = "GeGLU"
CASTS = "casts to FP8"
DROPOUT = "dropout and residual sums"
EMBEDDINGS = "embeddings, rows of masked tokens"
UPDATE = "optimizer"
CLEARING = "clearing and accumulating gradients"
OTHER = "other"
GAPS = "gaps"
PARTS = (
    PRODUCTS,
    DECODER,
    GLOBAL_ATTENTION,
    LOCAL_ATTENTION,
    NORMS,
    ROTATIONS,
    GATES,
    CASTS,
    DROPOUT,
    EMBEDDINGS,
    UPDATE,
    CLEARING,
    OTHER,
)
# Parts whose kernels are bound by memory at the bandwidth of norms and casts.
ELEMENTWISE = (NORMS, ROTATIONS, GATES, CASTS, DROPOUT)

MASKED_SHARE = 0.3
ADAMW: dict[str, Any] = {
    "betas": (0.9, 0.98),
    "eps": 1e-6,
    "weight_decay": 1e-5,
    "max_grad_norm": None,
}
LEARNING_RATE = 8e-4
# Seconds between two kernels of a graph: 1.7 ms in the 1,575 gaps of BERT-large's step
# (records/2026-11-27_gpu-check_h200, `gaps`).
GAP = 1.7e-3 / 1575
# Watts that the card drew in every row of a step, of 700 allowed (records/2026-11-26_gpu-check_h200
# and 2026-11-27_gpu-check_h200: 685 to 692).
WATTS = 690.0
# FLOP/s of products of 8,192 x 8,192 x 8,192 on an H200: 776 to 798 TFLOP/s in bfloat16
# (records/2026-11-26_gpu-check_h200), 1,517 in FP8.
MATRIX_RATE = {"bf16": 787e12, "fp8": 1517e12}

_MODULES = {
    "ops.triton.gate": GATES,
    "ops.triton.residual": DROPOUT,
    "ops.triton.rotary": ROTATIONS,
    "ops.triton.norm": NORMS,
    "ops.triton.cast": CASTS,
    "ops.triton.loss": DECODER,
    "ops.triton.embedding": EMBEDDINGS,
    "ops.triton.expand_batch": EMBEDDINGS,
    "optim": UPDATE,
}
_ROTATION_NAMES = ("cos", "sin")
_ROW_NAMES = (
    "embedding",
    "embedding_dense_backward",
    "index_select",
    "index_add",
    "index_add_",
    "new_zeros",
)


@dataclass(frozen=True)
class Workload:
    """One training step: full sequences of one length on one GPU.

    Attributes:
        config: shape of a ModernBERT.
        length: tokens of each sequence.
        tokens: tokens of the step's only micro-batch, a multiple of ``length``.
        precision: PRECISION.
    """

    config: BertConfig
    length: int
    tokens: int
    precision: str

    @property
    def num_masked(self) -> int:
        """Masked tokens of the step."""
        return self.tokens // self.length * round(MASKED_SHARE * self.length)

    @property
    def flops(self) -> int:
        """FLOPs that the losses require, forward and backward (`mlbert.config.flops`)."""
        sequences = self.tokens // self.length
        batch = SimpleNamespace(
            cu_seqlens=torch.arange(sequences + 1) * self.length,
            num_tokens=self.tokens,
            num_masked=self.num_masked,
            num_samples=sequences,
        )
        work = BatchWork.of(batch, self.config.local_window)
        return BACKWARD_FACTOR * masked_lm(self.config, work)


def count(workload: Workload, gpu: Gpu) -> Counted:
    """Count a step with decoupled StableAdamW, as one graph."""
    with recording(gpu) as recorder, models_on_the_device():
        dtype = compute_dtype(workload.precision, DEVICE)
        products = fp8_products(workload.precision, DEVICE)
        model = BertForMaskedLM(workload.config, dtype, fp8_products=products)
        flat = FlatParameters(model.ordered_parameters())
        optimizer = DecoupledStableAdamW(
            flat,
            ShardLayout.whole(flat.numel),
            base_lr=LEARNING_RATE,
            copy_dtype=methods.copy_dtype(workload.precision, DEVICE),
            **ADAMW,
        )
        sync = GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), [], None)
        sequences = workload.tokens // workload.length
        masked = workload.num_masked // sequences
        shape = StaticShape.of_packs(sequences, workload.length, 1, workload.length, masked)
        capture = functools.partial(RecordedCapture, recorder)
        graphs = Graphs(GraphMode.FULL_ITERATION, shape, 1, capture)
        trained = Trained(model, MaskedLM("step"), flat, sync, optimizer, shape, graphs)
        return run(recorder, trained)


def part_of(operation: Operation, config: BertConfig) -> str:
    """Return the part, one of `PARTS`, that a launch belongs to."""
    operands = (*operation.reads, *operation.writes)
    sizes = {size for operand in operands for size in operand.shape}
    if operation.flops:
        return DECODER if config.padded_vocab_size in sizes else PRODUCTS
    if operation.name in KERNELS:
        is_local = operation.arguments["WINDOW"] is not None
        return LOCAL_ATTENTION if is_local else GLOBAL_ATTENTION
    if operation.kind == "triton":
        starts = (part for start, part in _MODULES.items() if operation.module.startswith(start))
        return next(starts, OTHER)
    if any(operand.buffer == "gradients" for operand in operation.writes):
        return CLEARING
    return _of_torch(operation, operands, sizes, config)


def _of_torch(
    operation: Operation, operands: Sequence[Operand], sizes: set[int], config: BertConfig
) -> str:
    widths = {operand.shape[-1] for operand in operands if len(operand.shape) == 2}
    if config.padded_vocab_size in sizes:
        return DECODER
    if operation.name in _ROW_NAMES:
        return EMBEDDINGS
    if widths & {config.intermediate_size, config.inner_rows}:
        return GATES
    if operation.name in _ROTATION_NAMES or widths & {config.head_size, config.head_size // 2}:
        return ROTATIONS
    if operation.name == "gelu" or operation.name == "gelu_backward":
        return DECODER  # of the head's dense layer
    is_hash = any(operand.dtype in (torch.int64, torch.bool) for operand in operands)
    if is_hash or widths == {config.hidden_size}:
        return DROPOUT
    return OTHER


@dataclass(frozen=True)
class Speed:
    """A modeled step.

    Attributes:
        milliseconds: of each part, and "gaps": the time between kernels.
        tokens_per_second: of one GPU.
        matrix_share: FLOP/s that the losses require over `MATRIX_RATE`.
        joules_per_token: at `WATTS`.
    """

    milliseconds: dict[str, float]
    tokens_per_second: float
    matrix_share: float
    joules_per_token: float


@dataclass(frozen=True)
class Prediction:
    """A step's counts and its modeled speeds.

    Attributes:
        launches, gigabytes, teraflops: of each part.
        memory_gb: peak memory.
        needed_teraflops: FLOPs that the losses require.
        low, high: the range.
    """

    launches: dict[str, int]
    gigabytes: dict[str, float]
    teraflops: dict[str, float]
    memory_gb: float
    needed_teraflops: float
    low: Speed
    high: Speed


def predict(workload: Workload, gpu: Gpu) -> Prediction:
    """Count the workload's step, and model it at both rates."""
    counted = count(workload, gpu)
    sums = {part: Total() for part in PARTS}
    for operation in counted.step:
        sums[part_of(operation, workload.config)].add(operation)
    low = seconds_of_parts(counted, workload, gpu, MEASURED)
    high = seconds_of_parts(counted, workload, gpu, TUNED)
    return Prediction(
        launches={part: total.launches for part, total in sums.items()},
        gigabytes={part: total.moved / 1e9 for part, total in sums.items()},
        teraflops={part: total.flops / 1e12 for part, total in sums.items()},
        memory_gb=counted.memory.peak / 1e9,
        needed_teraflops=workload.flops / 1e12,
        low=speed(workload, low),
        high=speed(workload, high),
    )


def speed(workload: Workload, seconds: dict[str, float]) -> Speed:
    """Return the speed of a step that takes these seconds, by part."""
    rate = workload.tokens / math.fsum(seconds.values())
    needed = workload.flops / workload.tokens
    return Speed(
        milliseconds={part: 1e3 * value for part, value in seconds.items()},
        tokens_per_second=rate,
        matrix_share=rate * needed / MATRIX_RATE[workload.precision],
        joules_per_token=WATTS / rate,
    )


def seconds_of_parts(counted: Counted, workload: Workload, gpu: Gpu, kind: str) -> dict[str, float]:
    """Return the seconds of each part, and of the gaps, with the rates of a kind."""
    assert gpu.rates is not None, f"the rates of {gpu.name} are not known"
    rates = gpu.rates[kind]
    seconds = dict.fromkeys(PARTS, 0.0)
    for operation in counted.step:
        part = part_of(operation, workload.config)
        if operation.name in KERNELS:
            is_scaled = kind == TUNED
            taken = seconds_of_launch(operation, workload.length, workload.precision, is_scaled)
        else:
            bandwidth = rates.elementwise if part in ELEMENTWISE else rates.bandwidth
            taken = seconds_of(operation, gpu, rates, bandwidth)
        seconds[part] += taken
    seconds[GAPS] = GAP * len(counted.step)
    return seconds
