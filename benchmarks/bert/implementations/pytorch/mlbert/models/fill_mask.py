"""Predict the word at a mask token with a masked-LM model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import Tokenizer, check_model_vocabulary, load_tokenizer
from mlbert.host.errors import UserError
from mlbert.host.texts import shortened
from mlbert.models.bert import AnyBert, BertForMaskedLM, BertForPreTraining, MaskedLogits
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.load import open_saved
from mlbert.runs.starting_weights import weights_file

MASK = "[MASK]"
ADAPTER = "adapter_config.json"  # PEFT's
_HEAD = "cls.predictions."
_MOST_TEXT = 60  # characters of a text in an error


def open_model(source: Path) -> tuple[AnyBert, Report, Tokenizer]:
    """Return model, report and tokenizer of a path that `mlbert.models.weights.load.open_saved`
    accepts. Raise UserError if it has no model, no vocabulary, or that of another model.
    """
    if not weights_file(source).is_file():
        remedy = "Give the folder of a model: config.json, model.safetensors, vocab.txt"
        if not source.is_dir():
            raise UserError("file.missing", source, "does not exist", remedy)
        if (source / ADAPTER).is_file():
            reason = "contains a PEFT adapter without its model"
            remedy = "Save the merged model: model.merge_and_unload().save_pretrained(FOLDER)"
            raise UserError("checkpoint.missing", source, reason, remedy)
        raise UserError("checkpoint.missing", source, "contains no model", remedy)
    model, report, vocabulary, lower_case = open_saved(source)
    tokenizer = load_tokenizer(vocabulary, lower_case)
    remedy = "Give the vocabulary that the model was trained with"
    check_model_vocabulary(tokenizer, model.config.vocab_size, tokenizer.file, remedy)
    return model, report, tokenizer


def open_masked_lm(source: Path) -> tuple[BertForMaskedLM | BertForPreTraining, Tokenizer]:
    """Return model and tokenizer as `open_model`.

    Raise UserError if it has no masked-LM model or no vocabulary.
    """
    model, report, tokenizer = open_model(source)
    has_head = not any(name.startswith(_HEAD) for name in report.missing)
    if not has_head or not isinstance(model, BertForMaskedLM | BertForPreTraining):
        reason = "has no masked-LM head"
        raise UserError(
            "checkpoint.shape", source, reason, "Give a model that was pre-trained, not fine-tuned"
        )
    model.train(False)
    return model, tokenizer


def fill(model: AnyBert, tokenizer: Tokenizer, text: str, top: int = 5) -> list[tuple[str, float]]:
    """Return the ``top`` most probable entries for the mask of a text, each with its probability.

    The mask is [MASK], or the tokenizer's own mask token. Raise UserError if the text does not have
    exactly one, or is too long for the model.
    """
    before, after = check_text(text, tokenizer.mask_token)
    tokens = tokenizer.encode_around_mask(before, after)
    return fill_tokens(model, tokenizer, tokens, tokens.index(tokenizer.mask_id), top)


def check_text(text: str, mask: str = MASK) -> list[str]:
    """Return the text before and after its mask, which is ``mask``, or [MASK] if that does not
    occur. Raise UserError if it has none, or several.
    """
    written = mask if mask in text or MASK not in text else MASK
    parts = text.split(written)
    if len(parts) != 2:
        reason = f"has {written} {len(parts) - 1} times" if len(parts) > 2 else f"has no {mask}"
        raise UserError(
            "config.value",
            f"text {shortened(text, _MOST_TEXT)!r}",
            reason,
            f"Write {mask} once, in place of a word",
        )
    return parts


@torch.no_grad()
def fill_tokens(
    model: AnyBert, tokenizer: Tokenizer, tokens: Sequence[int], place: int, top: int
) -> list[tuple[str, float]]:
    """Like `fill`, for tokens without [CLS] and [SEP]. The token at index ``place`` is the mask."""
    config = model.config
    size = tokenizer.vocab_size
    if not 1 <= top <= size:
        raise UserError(
            "config.range",
            f"top {top}",
            "is out of range",
            f"Use 1 to {size}, the size of the vocabulary",
        )
    row = [tokenizer.cls_id, *tokens, tokenizer.sep_id]
    if len(row) > config.max_position_embeddings:
        reason = f"is {len(row)} tokens long, but the model allows {config.max_position_embeddings}"
        raise UserError("data.too-long", "text", reason, "Give less text around the [MASK]")
    rows = Ragged.from_rows([(row, len(row), False, [place + 1], [0])], tokenizer.dtype)
    batch = HostBatch.of_sequences(rows, np.zeros(1, np.int64), len(row))
    device = next(parameter for _, parameter in model.named_parameters()).device
    logits: MaskedLogits = model(batch.to(device), None)  # type: ignore[operator]
    probabilities, ids = logits.masked[0, :size].float().softmax(dim=0).topk(top)
    return [
        (tokenizer.show(number), p)
        for number, p in zip(ids.tolist(), probabilities.tolist(), strict=True)
    ]
