"""Tokenizers by name, vocab.txt or ``tokenizer.json``:
a vocabulary with special tokens that maps text to ids and back.

BERT's plain WordPiece is run by our own code, compiled if possible; every other tokenizer by the
library `tokenizers`. `mlbert.data.formats.tokenizer_files` reads the files and chooses. Google's
uncased English models need no network, because this package includes their common vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers

from mlbert.data.formats.manifest import write_json
from mlbert.data.formats.ragged import flattened, ids_dtype
from mlbert.data.formats.special_tokens import SpecialTokens
from mlbert.data.formats.tokenizer_files import (
    MODEL_CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    VOCAB_FILE,
    copy_tokenizer_files,
    find_vocabulary,
    read_tokenizer_files,
)
from mlbert.data.formats.wordpiece import (
    NativeWordPiece,
    TextRules,
    WordPieceTokenizer,
)
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import AddressError, read_pieces, write_atomically, writing

UNCASED_FILE = Path(__file__).parent / "vocabularies" / "bert-uncased.txt"
UNCASED_NAMES = ("bert-base-uncased", "bert-large-uncased", "prajjwal1/bert-tiny")
MOST_SPARE_ROWS = 1024  # Megatron rounds up to 128 rows for each GPU of a model
_OWNER = "google-bert/"
_REMEDY = "Give a vocab.txt, a tokenizer.json, or the folder of one"
_HUB_SECONDS = 5.0
_FIRST = "!"  # always one token
_LINE_END = "\n"
_TOGETHER = 1024  # texts that the library encodes at a time
_CAPITAL = "A"
_NO_TEXT = "\ufffd"  # in the text of bytes that are a part of a character
_BLANKED = bytes.maketrans(b"\n\r", b"  ")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer made from a vocabulary file. Each thread needs its own copy (`clone`)."""

    name: str  # as requested
    vocabulary: dict[str, int]  # entry -> id, with the added tokens; ids may have gaps
    file: Path  # the vocabulary file: vocab.txt or tokenizer.json
    sha256: str  # see `mlbert.data.formats.tokenizer_files.TokenizerFiles`
    rules: TextRules | None  # of BERT's plain WordPiece; None for every other tokenizer
    special: SpecialTokens
    library: tokenizers.Tokenizer | None = field(default=None, compare=False)  # without ``rules``
    # Of a plain one, see `WordPieceTokenizer`; the library caches 10,000 words.
    cache_bytes: int | None = field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        """Return True for BERT's WordPiece, whose vocabulary and rules are all that it is."""
        return self.rules is not None

    @property
    def kind(self) -> str:
        """The algorithm, for people: WordPiece, BPE, Unigram or WordLevel."""
        return "WordPiece" if self.library is None else type(self.library.model).__name__

    @cached_property
    def lower_case(self) -> bool:
        """Return True if text is lowercased."""
        if self.rules is not None:
            return self.rules.lower_case
        assert self.library is not None
        normalizer = self.library.normalizer
        return normalizer is not None and normalizer.normalize_str(_CAPITAL).islower()

    @property
    def identity(self) -> str:
        """Identifier that is equal for tokenizers that produce the same ids."""
        parts = [self.sha256]
        if self.rules is None:
            return "-".join([*parts, "tokenizers"])
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
        and `transformers` read the rules of a plain tokenizer.
        """
        assert self.rules is not None, "other tokenizers have their own file"
        values: dict[str, object] = {"do_lower_case": self.rules.lower_case}
        if self.rules.strip_accents != self.rules.lower_case:
            values["strip_accents"] = self.rules.strip_accents
        if not self.rules.split_cjk:
            values["tokenize_chinese_chars"] = False
        return values

    @cached_property
    def vocab_size(self) -> int:
        """Rows that a model needs: 1 more than the highest id."""
        return 1 + max(self.vocabulary.values())

    @property
    def dtype(self) -> np.dtype:
        """Type of ids in stores and caches: uint16, or uint32 for more than 65,536 of them."""
        return ids_dtype(self.vocab_size)

    @property
    def cls_id(self) -> int:
        """Id before a text, such as [CLS]."""
        return self.special.frame.first

    @property
    def sep_id(self) -> int:
        """Id after a text, such as [SEP]."""
        return self.special.frame.last

    @property
    def mask_token(self) -> str:
        """Entry such as [MASK]. Raises UserError if the tokenizer has none."""
        return self._named(self.special.mask, "mask")

    @property
    def mask_id(self) -> int:
        """Id of `mask_token`. Raises UserError as it does."""
        return self.vocabulary[self.mask_token]

    @property
    def pad_id(self) -> int:
        """Id such as that of [PAD]. Raises UserError if the tokenizer has none."""
        return self.vocabulary[self._named(self.special.pad, "pad")]

    @property
    def unknown_id(self) -> int | None:
        """Id such as that of [UNK], or None if there is none."""
        return None if self.special.unknown is None else self.vocabulary[self.special.unknown]

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the special tokens, which are never masked."""
        return self.special.ids

    @cached_property
    def replacement_ids(self) -> np.ndarray | None:
        """Ids that may replace a masked token at random, ascending in the tokenizer's dtype: all
        that are not special. None for BERT's WordPiece, where they are the whole vocabulary.
        """
        if self.is_plain:
            return None
        return np.asarray(sorted({*self.vocabulary.values()} - {*self.special_ids}), self.dtype)

    def _named(self, token: str | None, role: str) -> str:
        if token is None or token not in self.vocabulary:
            remedy = f'Name it in its tokenizer_config.json: "{role}_token"'
            raise UserError("vocabulary.unsupported", self.file, f"has no {role} token", remedy)
        return token

    @cached_property
    def entries(self) -> list[str]:
        """Entries in the order of their ids, empty for an id without one."""
        found = [""] * self.vocab_size
        for entry, number in self.vocabulary.items():
            found[number] = entry
        return found

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[object, ...]]:
        """Copy and pickle without cached state: compiled code cannot be sent to another process."""
        values = (
            self.name,
            self.vocabulary,
            self.file,
            self.sha256,
            self.rules,
            self.special,
            self.library,
            self.cache_bytes,
        )
        return Tokenizer, values

    def load(self) -> None:
        """Load what encoding needs, which processes forked afterwards share."""
        if self.is_plain:
            _ = self._native

    def clone(self) -> Tokenizer:
        """Return a copy without cached state, for another thread."""
        return copy.copy(self)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        if self.library is not None:
            return self.library.encode(text, add_special_tokens=False).ids
        return self._plain.encode(text)

    def encode_around_mask(self, before: str, after: str) -> list[int]:
        """Return the ids of a text with a mask token between its two parts.

        A mask token of the library may take the space before it, as its file says.
        """
        if self.library is not None:
            return self.encode(f"{before}{self.mask_token}{after}")
        return [*self.encode(before), self.mask_id, *self.encode(after)]

    def encode_all(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts in the tokenizer's dtype [T], and int64 [texts+1], the start
        of each.

        Uses compiled code if possible, with the same result as `encode`.
        """
        if self.library is not None:
            found: list[list[int]] = []
            for first in range(0, len(texts), _TOGETHER):
                some = list(texts[first : first + _TOGETHER])
                encodings = self.library.encode_batch_fast(some, add_special_tokens=False)
                found += [encoding.ids for encoding in encodings]
            return flattened(found, self.dtype)
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

    def encode_lines(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of all texts as `encode_all`; int64 [lines+1], the start of each line; and
        int64 [texts], the lines of each text.

        The library sees the whole text, in which a token may begin with the end of a line.
        """
        lines = [text.splitlines(keepends=self.library is not None) for text in texts]
        counts = np.asarray([len(some) for some in lines], np.int64)
        if self.library is None:
            ids, starts = self.encode_all([line for some in lines for line in some])
            return ids, starts, counts
        encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        found: list[list[int]] = []
        starts_of_lines = [np.zeros(1, np.int64)]
        done = 0
        for encoding, some in zip(encodings, lines, strict=True):
            found.append(encoding.ids)
            begins = np.asarray([first for first, _ in encoding.offsets], np.int64)
            ends = np.cumsum([len(line) for line in some], dtype=np.int64)
            edges = np.searchsorted(np.maximum.accumulate(begins), ends)
            edges[len(edges) - 1 :] = len(begins)  # all tokens are in some line
            starts_of_lines.append(done + edges)
            done += len(begins)
        ids, _ = flattened(found, self.dtype)
        return ids, np.concatenate(starts_of_lines), counts

    def encode_records(
        self, records: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode like `encode_all`, without per-text overhead,
        UTF-8 texts that each follow 4 arbitrary bytes.

        ``records`` is uint8 [bytes], ``starts`` int64 [texts+1], the start of each. Raises
        UnicodeDecodeError if a text is not UTF-8.
        """
        if self.library is not None or self._native is None:
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
        """Return readable text; of a plain tokenizer entries separated by spaces, with word pieces
        joined.
        """
        if self.library is not None:
            return self.library.decode(list(ids), skip_special_tokens=False)
        return " ".join(self.entries[number] for number in ids).replace(" ##", "")

    def show(self, number: int) -> str:
        """Return an entry as people read it, without the marks of spaces and bytes.

        An entry of space only is in quotes, such as ``'\\n'``.
        """
        entry = self.entries[number]
        if self.library is None or number in self.special_ids:
            return entry
        text = self.library.decode([number])
        if text.isspace():
            return repr(text)
        text = text.strip()
        return text if text and _NO_TEXT not in text else entry

    @cached_property
    def _plain(self) -> WordPieceTokenizer:
        assert self.rules is not None
        return WordPieceTokenizer(self.vocabulary, rules=self.rules, cache_bytes=self.cache_bytes)

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
    respected; ``lower_case`` overrides the case of a plain WordPiece.

    Raises UserError if there is no such file or model, or it has a property that is not supported
    (`mlbert.data.formats.tokenizer_files`).
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
            f"{_REMEDY}, or the name of a model, such as {UNCASED_NAMES[0]}",
        )
    elif not path.exists():
        path = _fetched(str(name))
    found = read_tokenizer_files(path)
    rules = found.rules
    if rules is not None and lower_case is not None:
        rules = TextRules.plain(lower_case)
    return Tokenizer(
        str(name),
        found.vocabulary,
        found.file,
        found.sha256,
        rules,
        found.special,
        found.library,
    )


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer's files to a folder: of a plain one vocab.txt and its rules, of another one
    a copy of its files. Raises UserError if a file cannot be written.
    """
    if tokenizer.is_plain:
        write_atomically(folder / VOCAB_FILE, "\n".join(tokenizer.entries) + "\n")
        write_json(folder / TOKENIZER_CONFIG, tokenizer.config)
        return
    with writing(folder, "Name another folder"):
        copy_tokenizer_files(tokenizer.file, folder)


def check_for_masking(tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer lacks a token that pre-training, or the use of its model,
    needs.
    """
    _ = tokenizer.mask_id
    _ = tokenizer.pad_id


def lower_cases(vocabulary: Path) -> bool:
    """Return whether the tokenizer of a vocabulary lowercases text (True if no file says
    otherwise).

    Raises UserError as `load_tokenizer`, or if it does not treat accents and Chinese characters as
    Google's models do: samples with next-sentence pairs can only be prepared like that.
    """
    rules = read_tokenizer_files(vocabulary).rules
    if rules is None:
        reason = "is not BERT's plain WordPiece, which these samples require"
        remedy = "Give a vocabulary of a tokenizer with BERT's usual rules"
        raise UserError("vocabulary.unsupported", vocabulary, reason, remedy)
    if rules != TextRules.plain(rules.lower_case):
        name = "tokenize_chinese_chars" if rules.split_cjk is False else "strip_accents"
        value = rules.split_cjk if rules.split_cjk is False else rules.strip_accents
        raise UserError(
            "vocabulary.unsupported",
            vocabulary.with_name(TOKENIZER_CONFIG),
            f"has {name} {str(value).lower()}, which these samples do not allow",
            "Give a vocabulary of a tokenizer with BERT's usual rules",
        )
    return rules.lower_case


def check_model_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, subject: str | Path, remedy: str
) -> None:
    """Raise UserError unless a model's vocabulary rows are those of the tokenizer, and a few spare
    ones: programs round them up. Far more rows mean another vocabulary.
    """
    check_model_rows(tokenizer.vocab_size, vocab_size, subject, remedy)


def check_model_rows(entries: int, vocab_size: int, subject: str | Path, remedy: str) -> None:
    """See `check_model_vocabulary`; ``entries``: 1 more than the tokenizer's highest id."""
    if not 0 <= vocab_size - entries < MOST_SPARE_ROWS:
        reason = f"has {entries} entries, but the model has vocab_size {vocab_size}"
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
