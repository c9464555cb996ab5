"""ModernBERT's training step on one device: ours, and transformers' compiled layer by layer.

Every sequence has the full length, as after packing; 30 % of the tokens are masked. Both sides
train in bfloat16 (ours also in FP8) on logits of masked tokens only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from bench_modernbert import ADAMW, MASKED_SHARE, our_optimizer, peer_model
from gpu_check.turns import TimedSide
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BACKWARD_FACTOR, BatchWork, masked_lm
from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MaskedLM
from mlbert.ops.fp8_scaling import Products
from mlbert.ops.precision import compute_dtype, fp8_products
from mlbert.ops.proof import prove
from mlbert.optim import optimizers
from mlbert.programs.bench.sides import LEARNING_RATE, trained_side

SEED = 1
FIRST_WORD = 5


def full_batch(config: BertConfig, length: int, tokens: int) -> HostBatch:
    """Return ``tokens // length`` random sequences of the full length."""
    generator = np.random.default_rng(SEED)
    masked = round(MASKED_SHARE * length)
    rows = []
    for _ in range(tokens // length):
        words = generator.integers(FIRST_WORD, config.vocab_size, length)
        places = np.sort(generator.choice(length, masked, replace=False))
        rows.append((words.tolist(), length, False, places.tolist(), words[places].tolist()))
    return HostBatch.of_sequences(Ragged.from_rows(rows), np.arange(len(rows)), length)


@torch.no_grad()
def random_model(
    config: BertConfig, dtype: torch.dtype, products: Products | None, device: torch.device
) -> BertForMaskedLM:
    """Return a model with random weights, made on the device, which is fast."""
    with device:
        model = BertForMaskedLM(config, dtype, fp8_products=products)
    torch.manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=config.initializer_range)
        else:
            parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
    return model.to(device)


def required_flops(config: BertConfig, batch: HostBatch) -> int:
    """Return the FLOPs that the losses of a step require."""
    work = BatchWork.of(batch, config.local_window)
    return BACKWARD_FACTOR * masked_lm(config, work)


def our_side(
    name: str,
    config: BertConfig,
    batch: HostBatch,
    precision: str,
    device: torch.device,
    opponent: str | None = None,
    is_tuned: bool = True,
    baseline: str | None = None,
    choice: str = "auto",
) -> TimedSide:
    """Return our step, as one graph on CUDA, after its ops have been proved.

    ``choice``: of the ops. For ``is_tuned`` see `mlbert.programs.bench.sides.trained_side`.
    """
    remarks: list[str] = []
    prove(choice, precision, config, device, lambda values: values, remarks.append)
    dtype = compute_dtype(precision, device)
    products = fp8_products(precision, device)
    model = random_model(config, dtype, products, device)
    optimizer = our_optimizer(model, optimizers.copy_dtype(precision, device))
    is_cuda = device.type == "cuda"
    side = trained_side(batch, model, SEED, optimizer, MaskedLM("step"), is_cuda, is_tuned)
    return TimedSide(
        name=name,
        step=side.step,
        units=batch.num_tokens,
        unit="tokens",
        flops=required_flops(config, batch),
        precision=precision,
        baseline=baseline,
        opponent=opponent,
        remarks=tuple(remarks),
    )


def their_side(
    name: str,
    config: BertConfig,
    batch: HostBatch,
    attention: str,
    device: torch.device,
    compiled: bool = True,
) -> TimedSide:
    """Return transformers' step with fused AdamW, and each layer compiled for its one shape.

    ``attention``: its ``attn_implementation``.
    """
    start = random_model(config, torch.bfloat16, None, device)
    with device:
        model = peer_model(start, attention)
    model.to(device)
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, **ADAMW)
    sequences = batch.num_samples
    tokens = batch.to("cpu")
    input_ids = tokens.input_ids.view(sequences, -1).to(device)
    places = tokens.masked_positions.to(device)
    labels = tokens.masked_labels.to(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(input_ids=input_ids).last_hidden_state
            logits = model.decoder(model.head(hidden.flatten(0, 1)[places]))
            loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()

    return TimedSide(
        name=name,
        step=step,
        units=batch.num_tokens,
        unit="tokens",
        flops=required_flops(config, batch),
        precision="bf16",
    )
