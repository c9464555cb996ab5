"""What a masked-LM model puts in the place of [MASK], by how probable it finds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mlbert.core.bert_config import BertConfig
from mlbert.core.errors import UserError
from mlbert.feed.host_batch import HostBatch
from mlbert.models.bert import AnyBert, BertForMaskedLM, MaskedLogits
from mlbert.models.huggingface import read_config
from mlbert.models.load import load_weights
from mlbert.store.ragged import Ragged
from mlbert.store.tokenizer import Tokenizer, load_tokenizer

MASK = "[MASK]"
_OWN, _THEIRS = "bert_config.json", "config.json"
_INSIDE = ("model", "weights", "huggingface")  # folders of a run that hold weights
_HEAD = "cls.predictions."


def open_masked_lm(folder: Path) -> tuple[BertForMaskedLM, Tokenizer]:
    """Model and tokenizer of a Hugging Face folder, of a run's ``weights/``, or of a run folder. Raises UserError: it
    holds no masked-LM model or no vocabulary."""
    place = next((path for path in (folder, *(folder / name for name in _INSIDE)) if _config_of(path)), None)
    if place is None:
        reason = f"holds no {_THEIRS}" if folder.is_dir() else "there is no such folder"
        raise UserError(folder, reason, "Give the folder of a model: config.json, model.safetensors, vocab.txt")
    config = _config_of(place)
    assert config is not None, "found above"
    shape = BertConfig.from_json(config) if config.name == _OWN else read_config(config)
    tokenizer = load_tokenizer(place)
    if len(tokenizer.vocabulary) != shape.vocab_size:
        reason = f"has {len(tokenizer.vocabulary)} entries, the model has vocab_size {shape.vocab_size}"
        raise UserError(tokenizer.file, reason, "Give the vocabulary that the model was trained with")
    model = BertForMaskedLM(shape)
    model.initialize(0)
    if any(name.startswith(_HEAD) for name in load_weights(model, place).missing):
        raise UserError(place, "has no masked-LM head", "Give a model that was pre-trained, not fine-tuned")
    model.train(False)
    return model, tokenizer


def _config_of(folder: Path) -> Path | None:
    return next((folder / name for name in (_OWN, _THEIRS) if (folder / name).is_file()), None)


def fill(model: AnyBert, tokenizer: Tokenizer, text: str, top: int = 5) -> list[tuple[str, float]]:
    """The ``top`` most probable entries for the one [MASK] of a text, each with its probability. Raises UserError: the
    text has no or more than one [MASK], or is too long for the model."""
    before, after = (tokenizer.encode(part) for part in check_text(text))
    return fill_tokens(model, tokenizer, [*before, tokenizer.mask_id, *after], len(before), top)


def check_text(text: str) -> list[str]:
    """What stands before and after the one [MASK] of a text. Raises UserError: it has none, or several."""
    parts = text.split(MASK)
    if len(parts) != 2:
        reason = f"has {len(parts) - 1} times {MASK}" if len(parts) > 2 else f"has no {MASK}"
        raise UserError(f"text {_shortened(text)!r}", reason, f"Write {MASK} once, in place of a word")
    return parts


@torch.no_grad()
def fill_tokens(
    model: AnyBert, tokenizer: Tokenizer, tokens: Sequence[int], place: int, top: int
) -> list[tuple[str, float]]:
    """As `fill`, of tokens without [CLS] and [SEP], of which that at ``place`` is [MASK]."""
    config, size = model.config, len(tokenizer.vocabulary)
    if not 1 <= top <= size:
        raise UserError(f"top {top}", "is no number of guesses", f"Use 1 to {size}, the size of the vocabulary")
    row = [tokenizer.cls_id, *tokens, tokenizer.sep_id]
    if len(row) > config.max_position_embeddings:
        reason = f"is {len(row)} tokens long, the model takes {config.max_position_embeddings}"
        raise UserError("text", reason, "Give less text around the [MASK]")
    rows = Ragged.from_rows([(row, len(row), False, [place + 1], [0])])
    batch = HostBatch.of_sequences(rows, np.zeros(1, np.int64), len(row))
    device = next(parameter for _, parameter in model.named_parameters()).device
    logits: MaskedLogits = model(batch.to(device), None)  # type: ignore[operator]
    probabilities, ids = logits.masked[0, :size].float().softmax(dim=0).topk(top)
    return [(tokenizer.entries[number], p) for number, p in zip(ids.tolist(), probabilities.tolist(), strict=True)]


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
