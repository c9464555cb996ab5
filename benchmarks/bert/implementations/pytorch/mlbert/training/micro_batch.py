"""AUTO_MICRO_BATCH: find micro-batches that fit the device's memory before the first sample is read."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from mlbert.config.sections import Configuration
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.batches import HostBatch, StaticShape
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.ops.config import ComputeConfig
from mlbert.training.protocols import Method
from mlbert.training.step import Step

Build = Callable[[Configuration], Method]


def build_fitting(
    config: Configuration, build: Build, world: World, say: Callable[[str], object]
) -> tuple[Configuration, Method]:
    """Build the method; with AUTO_MICRO_BATCH, double GRADIENT_STEPS until the largest micro-batch fits.

    All ranks call it together and get the same GRADIENT_STEPS. Raises UserError if not even the smallest one fits.
    """
    while True:
        method = build(config)
        if (
            not config[ComputeConfig].auto_micro_batch
            or method.static_shape is None
            or _fits(method, method.static_shape, world)
        ):
            return config, method
        data = config[DataConfig]
        parts = 2 * data.gradient_accumulation_steps
        if data.train_batch_size % parts:
            reason = (
                f"does not fit in memory in {data.gradient_accumulation_steps} parts and is not divisible by {parts}"
            )
            remedy = "Use a power of two, or a smaller model"
            raise UserError("device.memory", f"BATCHSIZE {data.train_batch_size}", reason, remedy)
        config = config.replace(data.model_copy(update={"gradient_accumulation_steps": parts}))
        del method
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"out of memory: GRADIENT_STEPS is now {parts}")


def _fits(method: Method, static_shape: StaticShape, world: World) -> bool:
    """Return True if forward and backward of a dummy batch that fills the static shape fit on every rank."""
    step = Step(method.model, method.objective, method.flat, method.sync, method.optimizer, world.all_reduce_max, print)
    failed = False
    try:
        step.dry_run(_largest(static_shape))
    except (MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator raises a plain RuntimeError.
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not is_memory:
            raise
        failed = True
    return not int(world.all_reduce_max(torch.tensor(int(failed))))


def _largest(static_shape: StaticShape) -> HostBatch:
    """Return equally long sequences that fill the shape's tokens, with its number of masked tokens."""
    lengths = [
        len(part) for part in np.array_split(np.arange(static_shape.tokens), static_shape.sequences) if len(part)
    ]
    rows = []
    for length in lengths:
        masked = range(1, min(length, 1 + static_shape.masked // len(lengths)))
        rows.append(([0] * length, length, False, masked, [0] * len(masked)))
    ragged = replace(Ragged.from_rows(rows), labels=np.zeros(len(rows), np.float32))
    return HostBatch.of_sequences(ragged, np.arange(len(rows)), max(lengths))
