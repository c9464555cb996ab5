"""The simulated device: operations that raise an error, bytes that launches move,
and memory in use.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from counted import steps
from counted.access import access
from counted.gpus import GPUS
from counted.pretend import DEVICE, HostAccess
from counted.recorder import RecordedCapture, recording
from mlbert.config.bert_config import BertConfig
from mlbert.models.objectives import PreTraining
from mlbert.ops import forms as registry
from mlbert.ops.triton.norm import layer_norm_dropout
from mlbert.optim.triton_update import first_pass_kernel

H200 = GPUS["h200"]
SMALL = BertConfig(200, 64, 2, 1, 128, max_position_embeddings=64)


def clear(size: int) -> None:
    on_device(size, dtype=torch.uint8).zero_()


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def test_synchronization_and_mixed_devices_raise() -> None:
    for wait in (
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: float(x[0]),
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        lambda x: x.to("cpu"),
        lambda x: torch.empty(4).copy_(x),
        lambda x: x + torch.ones(4),
        lambda x: x[x > 0],
    ):
        with recording(H200), pytest.raises((HostAccess, RuntimeError, NotImplementedError)):
            wait(on_device(4))


def test_triton_kernel_rejects_host_tensors() -> None:
    with recording(H200):
        x = on_device(16, 64).bfloat16()
        rows = torch.zeros(16, dtype=torch.int32)
        with pytest.raises(HostAccess, match="on the host"):
            layer_norm_dropout(x, on_device(64), on_device(64), 1e-12, 0.1, 1, rows)


def test_step_that_reads_its_loss_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = PreTraining.loss

    def read(*arguments: Any) -> torch.Tensor:
        value = loss(*arguments)
        assert float(value.detach()) == 0
        return value

    monkeypatch.setattr(PreTraining, "loss", read)
    with pytest.raises(HostAccess, match="a value is read"):
        steps.count(SMALL, 2, "bf16", H200)


def test_backward_is_recorded_and_non_blocking_copies_are_allowed() -> None:
    with recording(H200) as recorder:
        x = on_device(8, 4)
        weight = on_device(4, 4).requires_grad_()
        (x @ weight).sum().backward()
        torch.empty(4, pin_memory=True).copy_(x[0], non_blocking=True)
        assert weight.grad is not None
        assert (weight.grad.device, weight.is_cuda) == (DEVICE, True)
    products = [operation for operation in recorder.operations if operation.name == "mm"]
    assert [operation.flops for operation in products] == [2 * 8 * 4 * 4] * 2
    assert [operand.shape for operand in products[0].reads] == [(8, 4), (4, 4)]
    assert [operand.size for operand in products[0].writes] == [8 * 4 * 4]


def test_in_place_operations_read_and_write_and_fills_only_write() -> None:
    with recording(H200) as recorder:
        x = on_device(1000)
        y = on_device(1000)
        recorder.operations.clear()
        x.add_(y)
        x.zero_()
        x.view(10, 100).t()
        x.expand(5, 1000) + 0.0
    names = [operation.name for operation in recorder.operations]
    assert names == ["add_", "zero_", "add"]
    assert [operation.moved for operation in recorder.operations] == [12000, 4000, 4000 + 20000]


def test_reads_and_writes_are_derived_from_the_kernel_source() -> None:
    """LAMB's first pass writes the weights only if the update is not scaled."""
    scaled, alone = (access(first_pass_kernel, (("SCALING", number),)) for number in (1, 0))
    assert {"data", "grad", "exp_avg", "exp_avg_sq"} <= scaled.reads
    assert {"exp_avg", "exp_avg_sq", "sums_1", "sums_2"} <= scaled.writes
    assert "data" not in scaled.writes
    assert "data" in alone.writes


def test_memory_counts_live_tensors_and_the_peak_of_a_pool() -> None:
    """Two graphs share a pool, so the larger one determines the peak."""
    with recording(H200) as recorder:
        weights = on_device(1000)
        recorder.name(weights, "weights")
        assert recorder.memory.live["weights"] == 4096
        before = recorder.memory.live.total()
        kept = on_device(1 << 20, dtype=torch.uint8)
        del kept
        kept = on_device(1 << 18, dtype=torch.uint8)
        assert recorder.memory.live.total() - before == 1 << 18
        capture = RecordedCapture(recorder)
        replay = capture.record(lambda: clear(1 << 22))
        capture.record(lambda: clear(1 << 21))
        assert recorder.memory.peak == before + (1 << 18) + (1 << 22)
        recorder.operations.clear()
        replay()
        replay()
        assert [operation.name for operation in recorder.operations] == ["zero_", "zero_"]
        del kept


def test_recording_restores_pytorch() -> None:
    available = torch.cuda.is_available()
    with recording(H200):
        assert torch.cuda.get_device_capability() == (9, 0)
        assert registry.selected(DEVICE)["attention"] == "triton"
    assert torch.cuda.is_available() == available
    assert torch.ones(2).device.type == "cpu"
