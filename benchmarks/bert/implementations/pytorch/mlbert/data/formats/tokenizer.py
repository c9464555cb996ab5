"""Tokenizers by name, vocab.txt or ``tokenizer.json``:
a vocabulary with special tokens that maps text to ids and back.

Google's uncased English models need no network, because this package includes their common
vocabulary. `mlbert.data.formats.tokenizer_files` reads the files, or says what in them is not
supported.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from mlbert.data.formats.ragged import flattened
from mlbert.data.formats.tokenizer_files import (
    MODEL_CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    VOCAB_FILE,
    find_vocabulary,
    read_tokenizer_files,
)
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    NativeWordPiece,
    TextRules,
    WordPieceTokenizer,
)
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import AddressError, read_pieces

UNCASED_FILE = Path(__file__).parent / "vocabularies" / "bert-uncased.txt"
UNCASED_NAMES = ("bert-base-uncased", "bert-large-uncased", "prajjwal1/bert-tiny")
MOST_SPARE_ROWS = 1024  # Megatron rounds up to 128 rows for each GPU of a model
_OWNER = "google-bert/"
_REMEDY = "Give a vocab.txt, a tokenizer.json, or the folder of one"
_HUB_SECONDS = 5.0
_FIRST = "!"  # always one token
_LINE_END = "\n"
_BLANKED = bytes.maketrans(b"\n\r", b"  ")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer made from a vocabulary file. Each thread needs its own copy (`clone`)."""

    name: str  # as requested
    vocabulary: dict[str, int]  # entry -> id
    file: Path  # the vocabulary file: vocab.txt or tokenizer.json
    sha256: str  # of the vocabulary as a vocab.txt
    rules: TextRules

    @property
    def lower_case(self) -> bool:
        """Return True if text is lowercased."""
        return self.rules.lower_case

    @property
    def identity(self) -> str:
        """Identifier that is equal for tokenizers that produce the same ids."""
        parts = [self.sha256]
        if not self.rules.lower_case:
            parts.append("cased")
        if self.rules.strip_accents != self.rules.lower_case:
            parts.append("no-accents" if self.rules.strip_accents else "accents")
        if not self.rules.split_cjk:
            parts.append("joined-cjk")
        return "-".join(parts)

    @property
    def config(self) -> dict[str, object]:
        """Content of a tokenizer_config.json from which `load_tokenizer`
        and `transformers` read these rules.
        """
        values: dict[str, object] = {"do_lower_case": self.rules.lower_case}
        if self.rules.strip_accents != self.rules.lower_case:
            values["strip_accents"] = self.rules.strip_accents
        if not self.rules.split_cjk:
            values["tokenize_chinese_chars"] = False
        return values

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
        return Tokenizer, (self.name, self.vocabulary, self.file, self.sha256, self.rules)

    def clone(self) -> Tokenizer:
        """Return a copy without cached state, for another thread."""
        return copy.copy(self)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._plain.encode(text)

    def encode_all(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return uint16 [T], the ids of all texts, and int64 [texts+1], the start of each.

        Uses compiled code if possible, with the same result as `encode`.
        """
        if self._native is None:
            return flattened([self.encode(text) for text in texts])
        if not texts:
            return np.empty(0, np.uint16), np.zeros(1, np.int64)
        # One line per text. Lines without tokens would be dropped,
        # so each starts with an extra token.
        lines = "\n".join([f"{_FIRST} {text.replace(_LINE_END, ' ')}" for text in texts]).replace(
            "\r", " "
        )
        return self._of_lines(self._native, lines.encode(), len(texts))

    def encode_records(
        self, records: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode like `encode_all`, without per-text overhead,
        UTF-8 texts that each follow 4 arbitrary bytes.

        ``records`` is uint8 [bytes], ``starts`` int64 [texts+1], the start of each. Raises
        UnicodeDecodeError if a text is not UTF-8.
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
        return WordPieceTokenizer(self.vocabulary, rules=self.rules)

    @cached_property
    def _native(self) -> NativeWordPiece | None:
        try:
            return NativeWordPiece(self._plain)
        except native.NativeUnavailable:
            return None


def load_tokenizer(name: str | Path, lower_case: bool | None = None) -> Tokenizer:
    """Load the tokenizer of a vocab.txt or tokenizer.json, a folder with one, or a model name.

    Names in `UNCASED_NAMES`, with or without ``google-bert/``, are built in. Others are fetched
    from the Hugging Face hub if its package is installed. The files next to the vocabulary are
    respected; ``lower_case`` overrides them.

    Raises UserError if there is no such file or model, it is not a BERT vocabulary, or it has a
    property that is not supported (`mlbert.data.formats.tokenizer_files`).
    """
    short = str(name).removeprefix(_OWNER)
    path = Path(name)
    if path.is_dir():
        path = find_vocabulary(path)
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
    found = read_tokenizer_files(path)
    rules = found.rules if lower_case is None else TextRules.plain(lower_case)
    return Tokenizer(str(name), found.vocabulary, found.file, found.sha256, rules)


def lower_cases(vocabulary: Path) -> bool:
    """Return whether the tokenizer of a vocabulary lowercases text (True if no file says
    otherwise).

    Raises UserError as `load_tokenizer`, or if it does not treat accents and Chinese characters as
    Google's models do: samples with next-sentence pairs can only be prepared like that.
    """
    rules = read_tokenizer_files(vocabulary).rules
    if rules != TextRules.plain(rules.lower_case):
        name = "tokenize_chinese_chars" if rules.split_cjk is False else "strip_accents"
        value = rules.split_cjk if rules.split_cjk is False else rules.strip_accents
        raise UserError(
            "vocabulary.unsupported",
            vocabulary.with_name(TOKENIZER_CONFIG),
            f"has {name} {str(value).lower()}, with which these samples cannot be made",
            "Give a vocabulary of a tokenizer with BERT's usual rules",
        )
    return rules.lower_case


def check_model_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, subject: str | Path, remedy: str
) -> None:
    """Raise UserError unless a model's vocabulary rows are those of the tokenizer, and a few spare
    ones: programs round them up. Far more rows mean another vocabulary.
    """
    entries = len(tokenizer.vocabulary)
    if not 0 <= vocab_size - entries < MOST_SPARE_ROWS:
        reason = f"has {entries} entries, the model has vocab_size {vocab_size}"
        raise UserError("vocabulary.mismatch", subject, reason, remedy)


def _fetched(name: str) -> Path:
    """Fetch the files of a model's tokenizer to the hub's cache; return the vocabulary."""
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

    found: dict[str, Path] = {}
    problem = ""
    for file in (*TOKENIZER_FILES, MODEL_CONFIG):
        try:
            found[file] = Path(hf_hub_download(name, file))
        except EntryNotFoundError as error:  # only one of the first two is needed
            problem = problem or type(error).__name__
        except Exception as error:
            reason = f"has no {file} that can be fetched ({type(error).__name__})"
            raise UserError("network.unreachable", subject, reason, _REMEDY) from None
    vocabulary = found.get(VOCAB_FILE) or found.get(TOKENIZER_JSON)
    if vocabulary is None:
        reason = f"has no {VOCAB_FILE} and no {TOKENIZER_JSON} ({problem})"
        raise UserError("network.unreachable", subject, reason, _REMEDY)
    return vocabulary


def hub_problem() -> str | None:
    """Return why the Hugging Face hub is unavailable, phrased to follow "and", or None.

    Checked separately because the hub's functions retry for half a minute.
    """
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
