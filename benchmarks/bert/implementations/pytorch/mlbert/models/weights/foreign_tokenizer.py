"""Carry a tokenizer that is not BERT's WordPiece along with the weights it belongs to.

Conversions of weights need no tokens. They copy the files as they are, and take the special tokens'
ids for a config.json from them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbert.data.formats.tokenizer import MOST_SPARE_ROWS
from mlbert.data.formats.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_FILES, TOKENIZER_JSON
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
    """Return whether a vocabulary is a tokenizer.json of another kind than WordPiece. A damaged one
    is not; `mlbert.data.formats.tokenizer.load_tokenizer` says why.
    """
    if vocabulary.name != TOKENIZER_JSON or not vocabulary.is_file():
        return False
    try:
        model = read_json(vocabulary, _REMEDY).get("model")
    except UserError:
        return False
    return isinstance(model, dict) and model.get("type", "WordPiece") != "WordPiece"


def check_foreign(vocabulary: Path, vocab_size: int) -> None:
    """Raise UserError if a foreign tokenizer has more ids than the model, or far fewer."""
    ids = _ids(read_json(vocabulary, _REMEDY))
    entries = 1 + max(ids.values(), default=-1)
    if not 0 <= vocab_size - entries < MOST_SPARE_ROWS:
        reason = f"has {entries} entries, the model has vocab_size {vocab_size}"
        remedy = "Give the tokenizer that the model was trained with"
        raise UserError("vocabulary.mismatch", vocabulary, reason, remedy)


def copy_foreign(vocabulary: Path, folder: Path) -> None:
    """Copy a foreign tokenizer's files to a folder. Raise OSError."""
    for name in TOKENIZER_FILES:
        file = vocabulary.with_name(name)
        if file.is_file():
            shutil.copyfile(file, folder / name)


def special_ids(vocabulary: Path) -> dict[str, object]:
    """Return the special tokens' ids by their names in a config.json, None for missing ones."""
    ids = _ids(read_json(vocabulary, _REMEDY))
    file = vocabulary.with_name(TOKENIZER_CONFIG)
    config = read_json(file, _REMEDY) if file.is_file() else {}
    found: dict[str, object] = {}
    for name, token_name in _SPECIAL_TOKENS.items():
        token = config.get(token_name)
        text = token.get("content") if isinstance(token, dict) else token
        found[name] = ids.get(text) if isinstance(text, str) else None
    return found


def _ids(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer.json's entries and added tokens."""
    vocab = content["model"].get("vocab")
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids |= vocab
    elif isinstance(vocab, list):  # Unigram: entries with their scores, in order
        ids |= {str(entry[0]): number for number, entry in enumerate(vocab)}
    for token in content.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return ids
