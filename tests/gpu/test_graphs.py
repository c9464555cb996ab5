"""Steps with CUDA graphs are bit-equal to steps without them, and do not synchronize."""

import time

import pytest
import torch
from torch import Tensor

from host_batches import made_up_batches
from mlbert.data.batches import StaticShape
from mlbert.distributed.capture import CudaCapture, NoCapture
from mlbert.ops.fp8_scaling import Products
from mlbert.training.step import GraphMode, Graphs
from trainer import Trainer

PACKS = 8
SEED = 7
RATES = (1e-3, 2e-3, 5e-4, 1e-3)
SEGMENTED = GraphMode.SEGMENTED
FULL = GraphMode.FULL_ITERATION
# Products in FP8, what a graph holds, micro-batches.
CASES = [(None, SEGMENTED, 2), (None, FULL, 1), (Products(), SEGMENTED, 1), (Products(), FULL, 2)]


def history(config, device, mode, accumulation, products, capture) -> list[list[Tensor]]:
    """Return the weights, moments and scales before the first step,
    then with loss and norm after each step.
    """
    packs = PACKS * accumulation
    batches = [
        made_up_batches(packs, SEED, config.vocab_size, 512, step=step, accumulation=accumulation)
        for step in range(len(RATES))
    ]
    static_shape = StaticShape.of_packs(PACKS, 512, 3, 512, 76)
    graphs = Graphs(mode, static_shape, accumulation, lambda: capture)
    trainer = Trainer(
        config, batches[0][0], device, torch.bfloat16, SEED, products=products, graphs=graphs
    )
    optimizer = trainer.optimizer
    tensors = [trainer.flat.data, optimizer.exp_avg, optimizer.exp_avg_sq, *trainer.model.buffers()]
    found = [[x.clone() for x in tensors]]
    trainer.make.record()
    assert all(torch.equal(a, b) for a, b in zip(found[0], tensors, strict=True)), (
        "recording changed the state"
    )
    for i, (parts, lr) in enumerate(zip(batches, RATES, strict=True)):
        started = time.monotonic()
        assert trainer.make.graph_for(parts)
        torch.cuda.set_sync_debug_mode("error" if i == len(RATES) - 1 else "default")
        result = trainer.steps(parts, i, lr)
        torch.cuda.set_sync_debug_mode("default")
        found.append(
            [result.loss_sum.clone(), torch.tensor(result.grad_norm), *(x.clone() for x in tensors)]
        )
        torch.cuda.synchronize(device)
        assert 0 < trainer.make.device_seconds < time.monotonic() - started
    return found


@pytest.mark.parametrize(("products", "mode", "accumulation"), CASES, indirect=["products"])
def test_replayed_steps_are_bit_equal(
    products, mode, accumulation, large, device, allow_sync_afterwards
):
    found = history(large, device, mode, accumulation, products, CudaCapture(device))
    expected = history(large, device, mode, accumulation, products, NoCapture())
    for values, reference in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values, reference, strict=True))
    losses = [float(values[0]) for values in found[1:]]
    assert len(set(losses)) == len(losses), "the losses of different steps must differ"
