"""Time one training step (forward, backward, optimizer), ours against Hugging Face's, in one run.

All sides train on the same sequences. Ours: packed tokens and LAMB, on a GPU as one CUDA graph.
"huggingface", plain use: `transformers.BertForPreTraining` padded to the batch's longest sequence,
vocabulary logits at every position, `torch.optim.AdamW`. "expert": the same class as an expert
would use it, see `mlbert.programs.bench.expert`. Each side uses the best precision that it supports
on this processor. Steps alternate, so that drifting machine speed affects all.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BatchWork, training_flops
from mlbert.data.batches import HostBatch
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.ops.peak import gemm_peak_flops
from mlbert.ops.precision import has_bf16_products
from mlbert.programs.bench.expert import fastest_side
from mlbert.programs.bench.sides import Side, alternate, make_batch, our_side, their_side

CHOICE_STEPS = 3  # measured steps in each dtype


def run(
    config: BertConfig,
    packs: int,
    pairs: int,
    dtype: torch.dtype,
    versus: Sequence[str],
    data: Path | None,
    seed: int,
    device: torch.device,
) -> dict[str, object]:
    """Run the benchmark and return a JSON-able record; times in seconds, rates per second.

    Args:
        config: model shape.
        packs: packs of the prepared set, or number of dummy sequences.
        pairs: measured steps per side.
        dtype: dtype of the matrix products on both sides.
        versus: peers to measure too: "huggingface", "expert".
        data: prepared set to read sequences from.
        seed: seed of weights, data and dropout.
        device: where to compute.
    """
    implementations = ops.select("auto", device)
    batch = make_batch(config, packs, data, seed)
    model = BertForPreTraining(config, dtype)
    model.initialize(seed)
    model = model.to(device)
    peers: list[Side] = []
    record: dict[str, object] = {}
    if "huggingface" in versus:
        peers.append(their_side(config, batch, dtype, model))
    if "expert" in versus:
        side, record["expert"] = fastest_side(config, batch, dtype, model)
        peers.append(side)
    sides = [our_side(batch, model, seed, as_graph=device.type == "cuda"), *peers]
    peak_before = gemm_peak_flops(dtype, device)
    seconds = alternate(sides, pairs)
    peak = max(peak_before, gemm_peak_flops(dtype, device))
    work = BatchWork.of(batch)
    flops = training_flops(config, work)
    record |= {
        **common_record(config, batch, dtype, device, implementations),
        "max_seq_length": config.max_position_embeddings,
        "padded_tokens": work.sequences * batch.max_seqlen,
        "model_flops_per_step": flops,
        "gemm_peak_flops_per_second": peak,
        "sides": {
            name: {
                "seconds": times,
                "median_seconds": statistics.median(times),
                "sequences_per_second": work.sequences / statistics.median(times),
                "model_flops_per_second": flops / statistics.median(times),
                "share_of_gemm_peak": flops / statistics.median(times) / peak,
            }
            for name, times in seconds.items()
        },
    }
    return record | {
        "ratios": {side.name: pair_ratios(seconds["mlbert"], seconds[side.name]) for side in peers}
    }


def faster_dtype(config: BertConfig, packs: int, data: Path | None, seed: int) -> torch.dtype:
    """Return the dtype in which our step is faster on this processor: float32 or bfloat16.

    The arguments are those of `run`.
    """
    if not has_bf16_products():
        return torch.float32
    ops.select("auto", "cpu")
    batch = make_batch(config, packs, data, seed)
    medians = dict[torch.dtype, float]()
    for dtype in (torch.float32, torch.bfloat16):
        model = BertForPreTraining(config, dtype)
        model.initialize(seed)
        side = our_side(batch, model, seed)
        medians[dtype] = statistics.median(alternate([side], CHOICE_STEPS)[side.name])
    return min(medians, key=medians.__getitem__)


def common_record(
    config: BertConfig,
    batch: HostBatch,
    dtype: torch.dtype,
    device: torch.device,
    implementations: object,
) -> dict[str, object]:
    """Return the part of a benchmark's record that names model, batch and machine."""
    return {
        "config": {
            name: getattr(config, name)
            for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        },
        "precision": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ops": implementations,
        "sequences": batch.num_samples,
        "tokens": batch.num_tokens,
        "masked_tokens": batch.num_masked,
    }


def pair_ratios(ours: list[float], theirs: list[float]) -> dict[str, object]:
    """Return the ratios of the other side's seconds to ours, and their median."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"pair_ratios": ratios, "ratio": statistics.median(ratios)}
