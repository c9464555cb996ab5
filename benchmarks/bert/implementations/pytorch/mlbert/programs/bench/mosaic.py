"""One MosaicBERT training step, ours against the published way of running it, on the same texts in one run."""

from __future__ import annotations

import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.host_batch import HostBatch
from mlbert.data.loading.text import TRUNCATE, TextSet, TextSource
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.huggingface import padded_inputs
from mlbert.ops import api as ops
from mlbert.optim.adamw import DecoupledAdamW
from mlbert.optim.flat import FlatParameters
from mlbert.programs.bench.padded import PaddedMosaicBert
from mlbert.programs.bench.step import LEARNING_RATE, Side, alternate, check_pairs, trained_side

ADAMW: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 1e-5}


def our_side(batch: HostBatch, model: BertForMaskedLM, seed: int) -> Side:
    """Our model in the step that training makes; moves its weights into a flat buffer."""
    flat = FlatParameters(model.ordered_parameters())
    layout = ShardLayout.whole(flat.numel)
    optimizer = DecoupledAdamW(flat, layout, base_lr=LEARNING_RATE, max_grad_norm=None, **ADAMW)
    return trained_side(batch, model, seed, flat, optimizer, MaskedLM("step"))


def padded_side(batch: HostBatch, start: BertForMaskedLM, length: int) -> Side:
    """The same weights and texts, padded to ``length``."""
    device = next(start.parameters()).device
    model = PaddedMosaicBert(start).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **ADAMW)
    inputs = {name: value.to(device) for name, value in padded_inputs(batch.to("cpu"), length).items()}

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=start.dtype == torch.bfloat16):
            loss = model(inputs)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Side("padded", step)


def run(
    config: BertConfig, batch: HostBatch, length: int, pairs: int, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, object]:
    """Measures and returns a JSON-able record; times in seconds.

    Args:
        config: a MosaicBERT's shape.
        batch: sequences of at most ``length`` tokens.
        length: what the published way pads to.
        pairs: counted steps of each side, in turn.
        dtype: of the matrix products, on both sides.
        device: where to compute.
        seed: of weights and dropout.
    """
    check_pairs(pairs)
    implementations = ops.select("auto", device)
    model = BertForMaskedLM(config, dtype)
    model.initialize(seed)
    model = model.to(device)
    theirs = padded_side(batch, model, length)  # first: it copies the weights
    seconds = alternate([our_side(batch, model, seed), theirs], pairs)
    ratios = [b / a for a, b in zip(seconds["mlbert"], seconds["padded"], strict=True)]
    return {
        "config": {name: getattr(config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")},
        "padded_to": length,
        "precision": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ops": implementations,
        "sequences": batch.num_samples,
        "tokens": batch.num_tokens,
        "masked_tokens": batch.num_masked,
        "padded_tokens": batch.num_samples * length,
        "sides": {
            name: {"seconds": times, "median_seconds": statistics.median(times)} for name, times in seconds.items()
        },
        "pair_ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def first_texts(folder: Path, tokenizer: str, sequences: int, length: int, rate: float, seed: int) -> HostBatch:
    """A step of so many texts of an MDS set in shuffled order, each cut at ``length`` tokens, as the published loader
    gives them; ``rate`` of the tokens are to be predicted."""
    source = TextSource(
        TextSet(folder, None, load_tokenizer(tokenizer), length, TRUNCATE),
        sequences_per_step=sequences,
        shuffle="py1s",
        shuffle_seed=seed,
        canonical_nodes=1,
        rate=lambda _: rate,
        seed=seed,
    )
    source.open()
    batch = source.batches_of(0)[0]
    source.close()
    return batch
