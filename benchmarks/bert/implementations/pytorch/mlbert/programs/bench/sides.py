"""The sides of a comparison of training steps, on the same sequences: ours, and Hugging Face's
in plain use.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.data.formats.order import contiguous
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.synthetic import lengths_at, sequences
from mlbert.distributed.capture import CudaCapture
from mlbert.distributed.reduce import GradientReducer
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.host.errors import UserError, import_package
from mlbert.models.bert import BertBase, BertForPreTraining
from mlbert.models.objectives import MaskedLM, PreTraining
from mlbert.models.weights.huggingface import huggingface_config, padded_inputs, to_huggingface
from mlbert.ops.cublaslt_tuning import tuned
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.training.step import GraphMode, Graphs, Step

LEARNING_RATE = 1e-4
LAMB: dict[str, Any] = {
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}
MAX_SEQUENCES_PER_PACK = 3


@dataclass(frozen=True)
class Side:
    """One side of the comparison: its name and a function that runs one step
    and returns its loss.
    """

    name: str
    step: Callable[[], float]


def make_batch(config: BertConfig, packs: int, data: Path | None, seed: int) -> HostBatch:
    """Return the sequences for both sides: from a prepared set,
    or dummy ones with Wikipedia's length distribution.

    Dummy lengths are evenly spaced quantiles, so that even a small batch has the distribution's
    mean.
    """
    max_tokens = config.max_position_embeddings
    if data is None:
        lengths = lengths_at((np.arange(packs) + 0.5) / packs, max_tokens)
        rows = sequences(lengths, config.vocab_size, np.random.default_rng(seed))
        return HostBatch.of_sequences(rows, np.arange(packs), max_tokens)
    packed = PackedSource(
        data,
        packs_per_step=packs,
        max_sequences_per_pack=MAX_SEQUENCES_PER_PACK,
        seed=seed,
        partition=contiguous,
        vocab_size=config.vocab_size,
    )
    if packed.vocab_size != config.vocab_size or packed.max_tokens > config.max_position_embeddings:
        remedy = "Choose another --config or --data"
        raise UserError(
            "data.model-mismatch", data, "does not fit the model's vocabulary or length", remedy
        )
    packed.open()
    batch = packed.next_step()[0]
    packed.close()
    return batch


def our_side(
    batch: HostBatch, model: BertForPreTraining, seed: int, as_graph: bool = False
) -> Side:
    """Return our model with LAMB and the step used in training;
    moves its weights into a flat buffer.

    ``as_graph``: as one CUDA graph, with timed products, if all of it can be captured.
    """
    flat = FlatParameters(model.ordered_parameters())
    optimizer = Lamb(flat, ShardLayout.whole(flat.numel), **LAMB)
    return trained_side(batch, model, seed, optimizer, PreTraining("step"), as_graph)


def trained_side(
    batch: HostBatch,
    model: BertBase,
    seed: int,
    optimizer: FlatOptimizer,
    objective: MaskedLM,
    as_graph: bool = False,
    is_tuned: bool = True,
) -> Side:
    """Return our model with the step used in training; for ``as_graph`` see `our_side`.

    ``is_tuned``: time the products of a graph, which needs the device for itself: the choices are
    cached.
    """
    steps = itertools.count()
    flat = optimizer.flat
    graphs = None
    device = flat.grad.device
    if as_graph and optimizer.can_capture and not model.capture_obstacle(device, batch.max_seqlen):
        graphs = Graphs(
            GraphMode.FULL_ITERATION, StaticShape.over([batch]), 1, lambda: CudaCapture(device)
        )
    alone = GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), [], None)
    step = Step(model, objective, flat, alone, optimizer, lambda amax: amax, print, graphs)
    if graphs:
        step.warm_up()
    if graphs and is_tuned:
        step.record(partial(tuned, device, True, lambda tensor: tensor, lambda text: None))
    elif graphs:
        step.record()
    divisors = objective.divisors(objective.counts(batch))
    return Side(
        "mlbert", lambda: float(step([batch], seed, next(steps), divisors, LEARNING_RATE).loss_sum)
    )


def peer_model(config: BertConfig, start: BertForPreTraining, attention: str | None = None) -> Any:
    """Return Hugging Face's model for training, with the weights of ``start``, on its device.

    ``attention`` is its ``attn_implementation`` ("eager", "sdpa"); None keeps the default.
    """
    transformers = import_package("transformers", "comparison with Hugging Face", "huggingface")
    values: dict[str, Any] = {**huggingface_config(config)}
    del values["architectures"], values["model_type"]
    if attention:
        values["attn_implementation"] = attention
    with next(start.parameters()).device:
        model = transformers.BertForPreTraining(transformers.BertConfig(**values))
    model.load_state_dict(to_huggingface(start), strict=False)
    return model.train()


def their_side(
    config: BertConfig,
    batch: HostBatch,
    dtype: torch.dtype,
    start: BertForPreTraining,
    attention: str | None = None,
) -> Side:
    """Return Hugging Face's model (see `peer_model`) with AdamW on the same sequences, padded."""
    device = next(start.parameters()).device
    model = peer_model(config, start, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs = {name: value.to(device) for name, value in padded_inputs(batch.to("cpu")).items()}

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return Side(f"huggingface{f' {attention}' if attention else ''}", step)


def alternate(sides: list[Side], pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each side's steps, alternating after one unmeasured step each.

    Raises UserError if a loss is not finite, because the times would be meaningless.
    """
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(pairs + 1):
        for side in sides:
            started = time.perf_counter()
            loss = side.step()
            if turn:
                seconds[side.name].append(time.perf_counter() - started)
            if not torch.isfinite(torch.tensor(loss)):
                raise UserError("run.diverged", side.name, f"has loss {loss}", "Try another --seed")
    return seconds
