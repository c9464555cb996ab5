"""A tiny BERT, and files with its weights as a published benchmark starts from them."""

from pathlib import Path

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import VOCABULARY
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert import ReadCheckpoint, torch_to_nvidia, write_own


def tiny_bert(vocab_size: int) -> tuple[BertConfig, dict[str, torch.Tensor]]:
    """Return a tiny shape and its float32 parameters without the vocabulary padding."""
    shape = BertConfig(vocab_size, 16, 1, 2, 32, max_position_embeddings=32)
    model = BertForPreTraining(shape)
    model.initialize(5)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return shape, {name: value[:vocab_size] if name in VOCABULARY else value for name, value in state.items()}


def write_tiny_bert(folder: Path, vocab_size: int) -> None:
    """Write the weights in two formats: own/ (with the model shape) and phase1/model.ckpt-28252.pt."""
    write_own(ReadCheckpoint(*tiny_bert(vocab_size), Report(), folder), folder / "own")
    torch_to_nvidia(folder / "own", folder / "phase1/model.ckpt-28252.pt")
