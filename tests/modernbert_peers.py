"""Random models of transformers' ModernBERT, and the same batch for both programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from mlbert.data.batches import Batch, HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.huggingface import padded_inputs, read_config
from mlbert.models.weights.load import load_weights
from mlbert.models.weights.modernbert import modernbert_state

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "local_attention": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}


def save_peer(
    folder: Path, architecture: str = "ModernBertForMaskedLM", seed: int = 0, **values: Any
) -> Any:
    """Save a model of `SMALL` and these values, with norm gains and biases drawn too; return it."""
    torch.manual_seed(seed)
    config = transformers.ModernBertConfig(**(SMALL | values))
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def open_own(folder: Path) -> BertForMaskedLM:
    """Return our masked-LM model with the weights of a folder; all of them must be there."""
    model = BertForMaskedLM(read_config(folder / "config.json"))
    report = load_weights(model, folder)
    assert not report.missing
    assert not report.dropped
    return model


def masked_batch(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Batch:
    """Return sequences of these lengths in one stream, each with a third of its tokens masked."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        tokens = draw.integers(1, vocab_size, length)
        count = max(1, length // 3)
        positions = np.sort(draw.choice(length, count, replace=False))
        labels = draw.integers(1, vocab_size, count)
        rows.append((tokens.tolist(), length, False, positions.tolist(), labels.tolist()))
    numbers = np.arange(len(rows))
    batch = HostBatch.of_sequences(Ragged.from_rows(rows), numbers, max(lengths))
    return batch.to(torch.device("cpu"))


def peer_outputs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss and the logits of the masked tokens, of a model of transformers."""
    inputs = padded_inputs(batch)
    labels = inputs["labels"]
    found = model(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels
    )
    return found.loss, found.logits[labels != -100]


def own_gradients(model: BertForMaskedLM) -> dict[str, Tensor]:
    """Return our gradients by ModernBERT's names, without the vocabulary's padding."""
    rows = model.config.vocab_size
    vocabulary = ("word_embeddings.weight", "predictions.bias", "decoder.weight", "decoder.bias")
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        gradients[name] = gradient[:rows] if name.endswith(vocabulary) else gradient
    return modernbert_state(gradients, model.config)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of what is expected."""
    return float((found - expected).detach().norm() / expected.detach().norm())
