"""Choose the number format of PRECISION=auto on a CPU by timing the run's model in both.

A processor that multiplies bfloat16 is not always faster with it: a small model spends more on
converting weights and gradients than it saves in its products. Other devices need no timing.

Times are cached by processor, threads, model shape and batch (`mlbert.ops.device_cache`), so that a
run and its continuation choose the same.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.loading.config import DataConfig
from mlbert.data.loading.synthetic import lengths_at, sequences
from mlbert.host.machine import processor_name
from mlbert.ops import device_cache
from mlbert.ops.by_time import preferred
from mlbert.ops.config import ComputeConfig
from mlbert.ops.precision import has_bf16_products
from mlbert.training.protocols import BuildContext, Method, RecipeBuild
from mlbert.training.step import Step

CACHE = "precision"
FORMATS = ("fp32", "bf16")  # in order of preference
MARGIN = 1.03  # how many times as fast bf16 must be
MOST_TOKENS = 8192  # of the timed batch
LEAST_TURNS = 2
ENOUGH_SECONDS = 0.5  # of turns
SEED = 0


def choose_precision(build: RecipeBuild, context: BuildContext, inputs: Any) -> BuildContext:
    """Return the context with the faster precision if PRECISION=auto leaves a choice.

    All ranks call it together; their slowest times count.

    Args:
        build: of the recipe, which must be able to build twice.
        context: of the run.
        inputs: what the recipe's ``inspect`` returned.

    Raises:
        UserError: as ``build.build``.
    """
    config = context.config
    world = context.world
    say = context.warn  # logs the times
    is_open = config[ComputeConfig].precision == "auto" and world.device.type == "cpu"
    if not is_open or not has_bf16_products():
        return context
    batch = timed_batch(config[DataConfig], inputs.shape)
    kind = (
        f"{processor_name()}, {torch.get_num_threads()} threads, {inputs.shape}, "
        f"{batch.num_samples} sequences, {batch.num_tokens} tokens"
    )
    seconds = device_cache.load(CACHE, world.device, say, kind)
    is_missing = torch.tensor(int(not set(FORMATS) <= seconds.keys()))
    world.all_reduce_max(is_missing)
    if is_missing:
        silent = replace(context, warn=lambda line: None)
        seconds = {
            name: _seconds(build, replace(silent, auto_precision=name), inputs, batch)
            for name in FORMATS
        }
        device_cache.store(CACHE, world.device, seconds, kind)
    slowest = torch.tensor([seconds[name] for name in FORMATS], dtype=torch.float64)
    world.all_reduce_max(slowest)
    times = dict(zip(FORMATS, slowest.tolist(), strict=True))
    chosen = preferred(times, MARGIN)
    listed = ", ".join(f"{name} {1e3 * times[name]:.3g} ms" for name in FORMATS)
    say(f"precision: {chosen} (forward and backward pass: {listed})")
    return replace(context, auto_precision=chosen)


def timed_batch(data: DataConfig, shape: BertConfig) -> HostBatch:
    """Return random sequences like those of one micro-batch, of at most `MOST_TOKENS` tokens."""
    length = min(data.max_seq_length or math.inf, shape.max_position_embeddings)
    rows = max(1, data.train_batch_size // data.gradient_accumulation_steps)
    rows = min(rows, max(1, MOST_TOKENS // int(length)))
    lengths = lengths_at((np.arange(rows) + 0.5) / rows, int(length))
    made = sequences(lengths, shape.vocab_size, np.random.default_rng(SEED))
    # Labels that every task has.
    made = replace(
        made,
        masked_labels=np.zeros_like(made.masked_labels),
        labels=np.zeros(rows, np.float32),
    )
    return HostBatch.of_sequences(made, np.arange(rows), int(length))


def _seconds(build: RecipeBuild, context: BuildContext, inputs: Any, batch: HostBatch) -> float:
    """Return the shortest time of forward and backward of a batch, in seconds."""
    build.prepare(context, inputs.shape)
    method: Method = build.build(context, inputs)
    step = Step.of(method, context.world.all_reduce_max, context.warn)
    step.dry_run(batch)
    taken = list[float]()
    while len(taken) < LEAST_TURNS or sum(taken) < ENOUGH_SECONDS:
        started = time.perf_counter()
        step.dry_run(batch)
        taken.append(time.perf_counter() - started)
    return min(taken)
