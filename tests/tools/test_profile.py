"""The profile's attribution of kernels, on hand-written traces and on a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_check import profile
from gpu_check.trainer import Trainer
from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops
from mlbert.ops import forms as registry
from mlbert.programs.bench.step_time import make_batch

SHAPE = BertConfig(
    vocab_size=200,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
)
MAIN, AUTOGRAD = 1, 2


def span(
    category: str, name: str, start: float, duration: float, thread: int = MAIN, **arguments: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": arguments}


def operator(name: str, start: float, duration: float, sequence: int, backward: bool = False) -> dict[str, Any]:
    thread = AUTOGRAD if backward else MAIN
    arguments = {"Sequence number": sequence, "Fwd thread id": int(backward)}
    return span("cpu_op", name, start, duration, thread, **arguments)


def kernel(name: str, launched: float, duration: float, number: int, thread: int = MAIN) -> list[dict[str, Any]]:
    """Return a kernel event and the event of its launch."""
    return [
        span("cuda_driver", "cuLaunchKernelEx", launched, 1, thread, correlation=number),
        span("kernel", name, 1000 + launched, duration, 7, correlation=number),
    ]


def seconds(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {group: round(1e6 * sum(names.values()), 6) for group, names in found.items() if names}


def test_kernels_are_attributed_to_their_launch():
    """Kernels with one name in three groups: an op's range, its backward node on another thread, the optimizer."""
    events = [
        span("user_annotation", "mlbert::attention", 0, 10),
        operator("_Attention", 1, 8, 5),
        *kernel("norm_forward_kernel", 2, 100, 1),
        span("user_annotation", "mlbert::dropout_add_layer_norm", 20, 10),
        operator("_DropoutNorm", 21, 8, 6),
        *kernel("norm_forward_kernel", 22, 30, 2),
        operator("autograd::engine::evaluate_function: _DropoutNormBackward", 40, 9, 6, backward=True),
        *kernel("norm_backward_kernel", 41, 50, 3, AUTOGRAD),
        operator("_AttentionBackward", 60, 9, 5, backward=True),
        *kernel("norm_backward_kernel", 61, 200, 4, AUTOGRAD),
        span("user_annotation", "mlbert::optimizer", 80, 5),
        *kernel("vectorized_elementwise_kernel<FillFunctor>", 81, 7, 5),
    ]
    assert seconds(profile.group_times(events)) == {"attention": 300, "norm": 80, "optimizer": 7}


def test_kernels_outside_ranges_are_attributed_by_name():
    events = [
        span("user_annotation", "mlbert::linear_qkv", 0, 10),
        *kernel("nvjet_tst_128x256_64x4_NNT", 1, 40, 1),
        *kernel("void at::native::CatArrayBatchedCopy<float>", 2, 3, 2),
        *kernel("ncclDevKernel_AllReduce_Sum_bf16", 20, 5, 3),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 30, 2, 7, correlation=99),
        *kernel("GeluCUDAKernelImpl", 40, 1, 4),
    ]
    assert seconds(profile.group_times(events)) == {"GEMM": 40, "communication": 5, "copy": 5, "other": 1}


def test_kernel_without_a_launch_event_is_attributed_by_its_external_id():
    annotation = span("user_annotation", "mlbert::attention", 0, 10, **{"External id": 3})
    unlaunched = span("kernel", "norm_forward_kernel", 1000, 9, 7, **{"External id": 3, "correlation": 5})
    assert seconds(profile.group_times([annotation, unlaunched])) == {"attention": 9}


def test_on_a_cpu_the_self_time_of_operators_counts():
    """A product inside attention counts as attention; a sequence number belongs to its last operator."""
    events = [
        operator("aten::detach", 0, 1, 7),
        span("user_annotation", "mlbert::attention", 10, 20),
        operator("aten::bmm", 12, 15, 7),
        operator("aten::mm", 40, 6, 8),
        operator("BmmBackward0", 50, 10, 7, backward=True),
        operator("MmBackward0", 70, 10, 8, backward=True),
        span("cpu_op", "aten::mm", 72, 7, AUTOGRAD),
    ]
    assert seconds(profile.group_times(events)) == {"attention": 30, "GEMM": 13, "other": 4}


@pytest.fixture
def trainer() -> Trainer:
    ops.select("auto")
    return Trainer(SHAPE, make_batch(SHAPE, 4, None, seed=1), torch.device("cpu"), torch.float32, seed=1)


def test_profile_of_a_real_step(trainer):
    before = registry.selected()
    found = profile.profile_step(trainer, SHAPE, torch.float32, steps=1)
    assert registry.selected() == before
    groups = found["groups"]
    assert tuple(groups) == profile.GROUPS
    assert sum(row["share"] for row in groups.values()) == pytest.approx(1)
    for group in ("attention", "GEMM", "norm", "loss", "optimizer", "embedding"):
        assert groups[group]["seconds"] > 0, group
        assert groups[group]["rate"] > 0
    assert "budgets" not in found


def test_step_counts_match_the_model_flops(trainer):
    from mlbert.models.flops import BatchWork, training_flops

    counts = profile.step_counts(trainer, SHAPE, torch.float32)
    work = BatchWork.of(trainer.batch)
    # Attention counts half a forward pass more: the backward pass recomputes the scores.
    again = 0.5 * 4 * work.squared_lengths * SHAPE.hidden_size * SHAPE.num_hidden_layers
    assert counts["GEMM"][0] + counts["attention"][0] == pytest.approx(training_flops(SHAPE, work) + again)
