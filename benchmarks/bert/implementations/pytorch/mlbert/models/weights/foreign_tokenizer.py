"""Carry a tokenizer that is not BERT's plain WordPiece along with the weights it belongs to.

Conversions of weights need no tokens. They copy the files as they are
(`mlbert.data.formats.tokenizer_files.copy_tokenizer_files`), and take the special tokens'
ids for a config.json from them, also of a tokenizer with which nothing could be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbert.data.formats.library_tokenizer import load_library, token_content
from mlbert.data.formats.tokenizer import check_model_rows
from mlbert.data.formats.tokenizer_files import (
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    is_plain,
    read_tokenizer_files,
)
from mlbert.data.formats.wordpiece import read_entries
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json

_REMEDY = "Restore or remove the file"
# Of config.json -> of tokenizer_config.json.
_SPECIAL_TOKENS = {
    "pad_token_id": "pad_token",
    "bos_token_id": "cls_token",
    "eos_token_id": "sep_token",
    "cls_token_id": "cls_token",
    "sep_token_id": "sep_token",
}


def is_foreign(vocabulary: Path) -> bool:
    """Return whether a vocabulary is of a tokenizer that the library `tokenizers` runs. A damaged
    one is not; `mlbert.data.formats.tokenizer.load_tokenizer` says why.
    """
    return vocabulary.is_file() and not is_plain(vocabulary)


def check_foreign(vocabulary: Path, vocab_size: int) -> None:
    """Raise UserError if a foreign tokenizer has more ids than the model, or far fewer, or if the
    library cannot read it.
    """
    if vocabulary.suffix == ".json":
        content = read_json(vocabulary, _REMEDY)
        if vocabulary.name == TOKENIZER_JSON:
            load_library(content, vocabulary)
        ids = _ids_in(content)
    else:
        ids = read_entries(vocabulary)
    entries = 1 + max(ids.values(), default=-1)
    remedy = "Give the tokenizer that the model was trained with"
    check_model_rows(entries, vocab_size, vocabulary, remedy)


def special_ids(vocabulary: Path) -> dict[str, object]:
    """Return the special tokens' ids by their names in a config.json, None for missing ones."""
    try:
        found = read_tokenizer_files(vocabulary)
    except UserError:
        return _named_ids(vocabulary)
    frame = found.special.frame
    pad = found.special.pad
    return {
        "pad_token_id": None if pad is None else found.vocabulary.get(pad),
        "bos_token_id": frame.first,
        "eos_token_id": frame.last,
        "cls_token_id": frame.first,
        "sep_token_id": frame.last,
    }


def _named_ids(vocabulary: Path) -> dict[str, object]:
    ids = _ids(vocabulary)
    file = vocabulary.with_name(TOKENIZER_CONFIG)
    config = read_json(file, _REMEDY) if file.is_file() else {}
    found: dict[str, object] = {}
    for name, token_name in _SPECIAL_TOKENS.items():
        text = token_content(config.get(token_name))
        found[name] = ids.get(text) if isinstance(text, str) else None
    return found


def _ids(vocabulary: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's entries and added tokens."""
    if vocabulary.suffix != ".json":
        return read_entries(vocabulary)
    return _ids_in(read_json(vocabulary, _REMEDY))


def _ids_in(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the entries and added tokens in a tokenizer.json's content."""
    vocab = content["model"].get("vocab")
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids |= vocab
    elif isinstance(vocab, list):  # Unigram: entries with their scores, in order
        ids |= {str(entry[0]): number for number, entry in enumerate(vocab)}
    for token in content.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return ids
