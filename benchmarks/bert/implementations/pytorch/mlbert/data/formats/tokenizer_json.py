"""The vocabulary of a ``tokenizer.json``: fast tokenizers of Hugging Face save that file and no vocab.txt."""

from __future__ import annotations

from pathlib import Path

from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.wordpiece import numbered
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json, shown

TOKENIZER_JSON = "tokenizer.json"


def read_tokenizer_json(file: Path) -> tuple[list[str], bool]:
    """Entries by their ids, and whether texts are read in the uncased form. Raises UserError: the file is damaged, or
    is no WordPiece tokenizer's."""
    remedy = "Restore it, or put the vocab.txt beside it"
    found = read_json(file, remedy)
    try:
        if (kind := found["model"].get("type", "WordPiece")) != "WordPiece":
            raise UserError(
                "vocabulary.format", file, f"is of a {shown(kind)} tokenizer", "Choose a model with BERT's WordPiece"
            )
        ids = {int(number): str(entry) for entry, number in found["model"]["vocab"].items()}
        is_lower = bool((found.get("normalizer") or {}).get("lowercase", False))
        return [ids[number] for number in range(len(ids))], is_lower
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("vocabulary.format", file, f"holds no WordPiece vocabulary ({error!r})", remedy) from None


def load_tokenizer_json(file: Path) -> Tokenizer:
    """`read_tokenizer_json` as a tokenizer. Raises UserError as that, or it is no BERT's."""
    entries, is_lower = read_tokenizer_json(file)
    return Tokenizer(str(file), numbered(entries, file), file, file_sha256(file), is_lower)
