"""Tokenizers by name: a vocabulary with its special tokens, from text to ids and back.

The names of Google's uncased English models need no network: their common vocabulary comes with this package.

The vocabulary of a ``tokenizer.json``: fast tokenizers of Hugging Face save that file and no vocab.txt.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.ragged import offsets_of
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, NativeWordPiece, WordPieceTokenizer, load_vocabulary, numbered
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json, shown

VOCAB_FILE, TOKENIZER_CONFIG = "vocab.txt", "tokenizer_config.json"
UNCASED_FILE = Path(__file__).parent / "vocabularies" / "bert-uncased.txt"
UNCASED_NAMES = ("bert-base-uncased", "bert-large-uncased", "prajjwal1/bert-tiny")
_OWNER = "google-bert/"
_REMEDY = "Give a vocab.txt or the folder of one"
_HUB_SECONDS = 5.0
_FIRST = "!"  # a text of one token, always
_LINE_END = "\n"
_BLANKED = bytes.maketrans(b"\n\r", b"  ")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary file and what is made with it; can be used by several threads, each with a copy (`clone`)."""

    name: str  # as it was asked for
    vocabulary: dict[str, int]  # from entry to id
    file: Path  # the vocabulary
    sha256: str  # of that file
    lower_case: bool = True

    @property
    def identity(self) -> str:
        """Equal where the same text gives the same ids."""
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
        """Entries by their ids."""
        return sorted(self.vocabulary, key=self.vocabulary.__getitem__)

    def clone(self) -> Tokenizer:
        """The same without what one thread's use leaves behind."""
        return Tokenizer(self.name, self.vocabulary, self.file, self.sha256, self.lower_case)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        return self._plain.encode(text)

    def encode_all(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """uint16 [T], the ids of all texts, and int64 [texts+1], where each begins; as `encode`, which it calls where
        nothing can be compiled."""
        if self._native is None:
            rows = [self.encode(text) for text in texts]
            return np.asarray([token for row in rows for token in row], np.uint16), offsets_of([*map(len, rows)])
        if not texts:
            return np.empty(0, np.uint16), np.zeros(1, np.int64)
        # A line for each text; as lines without a token would be left out, each begins with one.
        lines = "\n".join([f"{_FIRST} {text.replace(_LINE_END, ' ')}" for text in texts]).replace("\r", " ")
        return self._of_lines(self._native, lines.encode(), len(texts))

    def encode_records(self, records: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_all` without the work for each text: of texts in UTF-8 that each stand behind 4 bytes of anything;
        uint8 [bytes], and int64 [texts+1] where each begins. Raises UnicodeDecodeError: one is not UTF-8."""
        if self._native is None:
            data = records.tobytes()
            edges = starts.tolist()
            return self.encode_all([data[first + 4 : end].decode() for first, end in pairwise(edges)])
        lines = np.frombuffer(bytearray(records.tobytes().translate(_BLANKED)), np.uint8)
        for place, byte in enumerate(b"\n" + _FIRST.encode() + b"  "):
            lines[starts[:-1] + place] = byte
        return self._of_lines(self._native, lines[1:].tobytes(), len(starts) - 1)

    def _of_lines(self, native_tokenizer: NativeWordPiece, lines: bytes, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of lines that each begin with `_FIRST`, without it."""
        parsed = native_tokenizer.parse(lines, self.name)
        starts = parsed.sentences
        assert len(starts) == count + 1, "one sentence for each text"
        return np.delete(parsed.tokens, starts[:-1]), starts - np.arange(len(starts))

    def decode(self, ids: Sequence[int]) -> str:
        """Entries with blanks between, pieces of words joined; for people."""
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


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a vocab.txt, of a folder with one, or of a model's name.

    Names in `UNCASED_NAMES`, also after ``google-bert/``, are known here; others are looked for in the Hugging Face
    hub where its package is installed. ``do_lower_case`` of a tokenizer_config.json beside the file counts.

    Raises UserError: no such file or model, or it is no vocabulary of BERT.
    """
    short = str(name).removeprefix(_OWNER)
    path = Path(name)
    if path.is_dir():
        path = path / VOCAB_FILE
    elif not path.exists() and short in UNCASED_NAMES:
        path = UNCASED_FILE
    elif not path.exists() and (path.suffix or path.is_absolute() or str(name).count("/") > 1):
        raise UserError(
            "file.missing", path, "there is no such file", f"{_REMEDY}, or the name of a model, as {UNCASED_NAMES[0]}"
        )
    elif not path.exists():
        path = _fetched(str(name))
    return Tokenizer(str(name), load_vocabulary(path), path, file_sha256(path), lower_cases(path))


def lower_cases(vocabulary: Path) -> bool:
    """Whether texts are read in the uncased form: what the tokenizer_config.json beside a vocabulary says, else yes.

    Raises UserError where that file is damaged.
    """
    config, remedy = vocabulary.with_name(TOKENIZER_CONFIG), "Restore or remove the file"
    if not config.exists():
        return True
    found = read_json(config, remedy).get("do_lower_case", True)
    if not isinstance(found, bool):
        raise UserError("config.value", config, f"do_lower_case is {shown(found)}, not true or false", remedy)
    return found


def _fetched(name: str) -> Path:
    """A model's vocab.txt in the hub's own cache, its configuration beside it where there is one."""
    subject = f"tokenizer {name!r}"
    if problem := hub_problem():
        raise UserError("network.unreachable", subject, f"is no file and not known here, and {problem}", _REMEDY)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = Path(hf_hub_download(name, VOCAB_FILE))
    except Exception as error:
        reason = f"has no {VOCAB_FILE} that can be fetched ({type(error).__name__})"
        raise UserError("network.unreachable", subject, reason, _REMEDY) from None
    try:
        hf_hub_download(name, TOKENIZER_CONFIG)
    except EntryNotFoundError:
        pass  # lower case, then
    except Exception as error:
        reason = f"has a {TOKENIZER_CONFIG} that cannot be fetched ({type(error).__name__})"
        raise UserError("network.unreachable", subject, reason, _REMEDY) from None
    return path


def hub_problem() -> str | None:
    """Why the Hugging Face hub cannot be used, in words that follow "and"; None where it answers. The hub's own
    functions try again and again, for half a minute."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return "the package huggingface_hub is not installed"
    if constants.HF_HUB_OFFLINE:
        return "the Hugging Face hub is switched off (HF_HUB_OFFLINE)"
    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_SECONDS):
            return None
    except (OSError, ValueError) as error:
        return f"the Hugging Face hub does not answer ({getattr(error, 'reason', None) or error})"


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
