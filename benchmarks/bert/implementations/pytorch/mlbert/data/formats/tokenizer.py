"""Tokenizers by name, vocab.txt or ``tokenizer.json``: a vocabulary with special tokens that maps text to ids and back.

Google's uncased English models need no network, because this package includes their common vocabulary. Hugging Face's
fast tokenizers are saved as ``tokenizer.json`` without a vocab.txt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import file_sha256, vocabulary_sha256
from mlbert.data.formats.ragged import flattened
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    NativeWordPiece,
    WordPieceTokenizer,
    load_vocabulary,
    numbered,
)
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import AddressError, read_pieces
from mlbert.host.json_files import read_json, shown

VOCAB_FILE, TOKENIZER_CONFIG = "vocab.txt", "tokenizer_config.json"
VOCABULARY_SHA256 = "vocabulary_sha256"  # in the configuration that a model's folder has
UNCASED_FILE = Path(__file__).parent / "vocabularies" / "bert-uncased.txt"
UNCASED_NAMES = ("bert-base-uncased", "bert-large-uncased", "prajjwal1/bert-tiny")
_OWNER = "google-bert/"
_REMEDY = "Give a vocab.txt or the folder of one"
_HUB_SECONDS = 5.0
_FIRST = "!"  # always one token
_LINE_END = "\n"
_BLANKED = bytes.maketrans(b"\n\r", b"  ")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer made from a vocabulary file. Each thread needs its own copy (`clone`)."""

    name: str  # as requested
    vocabulary: dict[str, int]  # entry -> id
    file: Path  # the vocabulary file
    sha256: str  # of the vocabulary file
    lower_case: bool = True

    @property
    def identity(self) -> str:
        """Identifier that is equal for tokenizers that produce the same ids."""
        return self.sha256 if self.lower_case else f"{self.sha256}-cased"

    @property
    def cls_id(self) -> int:
        """Id of [CLS]."""
        return self.vocabulary["[CLS]"]

    @property
    def sep_id(self) -> int:
        """Id of [SEP]."""
        return self.vocabulary["[SEP]"]

    @property
    def mask_id(self) -> int:
        """Id of [MASK]."""
        return self.vocabulary["[MASK]"]

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of [PAD], [UNK], [CLS], [SEP] and [MASK]."""
        return tuple(self.vocabulary[token] for token in SPECIAL_TOKENS)

    @cached_property
    def entries(self) -> list[str]:
        """Entries in the order of their ids."""
        return sorted(self.vocabulary, key=self.vocabulary.__getitem__)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[object, ...]]:
        """Copy and pickle without cached state: compiled code cannot be sent to another process."""
        return Tokenizer, (self.name, self.vocabulary, self.file, self.sha256, self.lower_case)

    def clone(self) -> Tokenizer:
        """Return a copy without cached state, for another thread."""
        return copy.copy(self)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._plain.encode(text)

    def encode_all(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return uint16 [T], the ids of all texts, and int64 [texts+1], the start of each. Uses compiled code if
        possible, with the same result as `encode`."""
        if self._native is None:
            return flattened([self.encode(text) for text in texts])
        if not texts:
            return np.empty(0, np.uint16), np.zeros(1, np.int64)
        # One line per text. Lines without tokens would be dropped, so each starts with an extra token.
        lines = "\n".join([f"{_FIRST} {text.replace(_LINE_END, ' ')}" for text in texts]).replace(
            "\r", " "
        )
        return self._of_lines(self._native, lines.encode(), len(texts))

    def encode_records(
        self, records: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode like `encode_all`, without per-text overhead, UTF-8 texts that each follow 4 arbitrary bytes.

        ``records`` is uint8 [bytes], ``starts`` int64 [texts+1], the start of each. Raises UnicodeDecodeError if a text
        is not UTF-8.
        """
        if self._native is None:
            data = records.tobytes()
            return self.encode_all(
                [data[first + 4 : end].decode() for first, end in pairwise(starts.tolist())]
            )
        lines = np.frombuffer(bytearray(records.tobytes().translate(_BLANKED)), np.uint8)
        for place, byte in enumerate(b"\n" + _FIRST.encode() + b"  "):
            lines[starts[:-1] + place] = byte
        return self._of_lines(self._native, lines[1:].tobytes(), len(starts) - 1)

    def _of_lines(
        self, native_tokenizer: NativeWordPiece, lines: bytes, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of lines that each start with `_FIRST`, without that token."""
        parsed = native_tokenizer.parse(lines, self.name)
        starts = parsed.sentences
        assert len(starts) == count + 1, "one sentence for each text"
        return np.delete(parsed.tokens, starts[:-1]), starts - np.arange(len(starts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return readable text: entries separated by spaces, with word pieces joined."""
        return " ".join(self.entries[number] for number in ids).replace(" ##", "")

    @cached_property
    def _plain(self) -> WordPieceTokenizer:
        return WordPieceTokenizer(self.vocabulary, self.lower_case)

    @cached_property
    def _native(self) -> NativeWordPiece | None:
        try:
            return NativeWordPiece(self._plain)
        except native.NativeUnavailable:
            return None


def load_tokenizer(name: str | Path, lower_case: bool | None = None) -> Tokenizer:
    """Load the tokenizer of a vocab.txt, a folder with one, or a model name.

    Names in `UNCASED_NAMES`, with or without ``google-bert/``, are built in. Others are fetched from the Hugging Face
    hub if its package is installed. Without ``lower_case``, ``do_lower_case`` in a tokenizer_config.json in the same
    folder is respected.

    Raises UserError if there is no such file or model, or it is not a BERT vocabulary.
    """
    short = str(name).removeprefix(_OWNER)
    path = Path(name)
    if path.is_dir():
        path = path / VOCAB_FILE
    elif not path.exists() and short in UNCASED_NAMES:
        path = UNCASED_FILE
    elif not path.exists() and (path.suffix or path.is_absolute() or str(name).count("/") > 1):
        reason = "there is no such file"
        raise UserError(
            "file.missing",
            path,
            reason,
            f"{_REMEDY}, or the name of a model, as {UNCASED_NAMES[0]}",
        )
    elif not path.exists():
        path = _fetched(str(name))
    is_lower = lower_cases(path) if lower_case is None else lower_case
    return Tokenizer(str(name), load_vocabulary(path), path, vocabulary_sha256(path), is_lower)


def lower_cases(vocabulary: Path) -> bool:
    """Return ``do_lower_case`` of the tokenizer_config.json next to a vocabulary, or True without one.

    Raises UserError if that file is damaged, or names another vocabulary.
    """
    config, remedy = vocabulary.with_name(TOKENIZER_CONFIG), "Restore or remove the file"
    if not config.exists():
        return True
    values = read_json(config, remedy)
    if values.get(VOCABULARY_SHA256) not in (None, vocabulary_sha256(vocabulary)):
        reason = f"is not the vocabulary whose {VOCABULARY_SHA256} is in {TOKENIZER_CONFIG}"
        raise UserError(
            "vocabulary.mismatch", vocabulary, reason, "Restore it: the weights belong to its order"
        )
    found = values.get("do_lower_case", True)
    if not isinstance(found, bool):
        raise UserError(
            "config.value", config, f"do_lower_case is {shown(found)}, not true or false", remedy
        )
    return found


def _fetched(name: str) -> Path:
    """Fetch a model's vocab.txt, and its configuration if it has one, to the hub's cache; return the vocab.txt."""
    subject = f"tokenizer {name!r}"
    if problem := hub_problem():
        raise UserError(
            "network.unreachable",
            subject,
            f"is not a file or a built-in name, and {problem}",
            _REMEDY,
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    paths = []
    for file in (VOCAB_FILE, TOKENIZER_CONFIG):
        try:
            paths.append(Path(hf_hub_download(name, file)))
        except Exception as error:
            if file == TOKENIZER_CONFIG and isinstance(error, EntryNotFoundError):
                continue  # defaults to lower case
            reason = f"has no {file} that can be fetched ({type(error).__name__})"
            raise UserError("network.unreachable", subject, reason, _REMEDY) from None
    return paths[0]


def hub_problem() -> str | None:
    """Return why the Hugging Face hub is unavailable, phrased to follow "and", or None. Checked separately because the
    hub's functions retry for half a minute."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return "the package huggingface_hub is not installed"
    if constants.HF_HUB_OFFLINE:
        return "the Hugging Face hub is switched off (HF_HUB_OFFLINE)"
    try:
        next(read_pieces(constants.ENDPOINT, attempts=2, seconds=_HUB_SECONDS))
    except AddressError as error:
        return f"the Hugging Face hub does not answer ({error.reason})"
    return None


TOKENIZER_JSON = "tokenizer.json"


def read_tokenizer_json(file: Path) -> tuple[list[str], bool]:
    """Return the entries in the order of their ids, and whether text is lowercased. Raises UserError if the file is
    damaged, or not of a WordPiece tokenizer."""
    remedy = "Restore it, or put the vocab.txt next to it"
    found = read_json(file, remedy)
    try:
        if (kind := found["model"].get("type", "WordPiece")) != "WordPiece":
            reason = f"is of a {shown(kind)} tokenizer"
            raise UserError(
                "vocabulary.format", file, reason, "Choose a model with BERT's WordPiece"
            )
        ids = {int(number): str(entry) for entry, number in found["model"]["vocab"].items()}
        is_lower = bool((found.get("normalizer") or {}).get("lowercase", False))
        return [ids[number] for number in range(len(ids))], is_lower
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "vocabulary.format", file, f"holds no WordPiece vocabulary ({error!r})", remedy
        ) from None


def load_tokenizer_json(file: Path) -> Tokenizer:
    """Load a tokenizer.json. Raises UserError as `read_tokenizer_json`, or if it is not a BERT vocabulary."""
    entries, is_lower = read_tokenizer_json(file)
    return Tokenizer(str(file), numbered(entries, file), file, file_sha256(file), is_lower)
