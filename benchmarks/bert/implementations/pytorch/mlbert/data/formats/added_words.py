"""Add words to a tokenizer: each becomes one token, and every other text keeps its ids.

A word is an added token of the library `tokenizers` that matches full words only, after the
normalizer (so also in capitals, if the tokenizer ignores case), and takes the space before it if
the tokenizer has tokens for spaces. Entries of the vocabulary are left as they are: a new one would
also be found at the beginning of longer words.

The ids of unused entries, ``[unused0]`` and so on, are taken first if they are the last ones of the
vocabulary, as those of ModernBERT are. Then come new ids. The vocabulary is filled up with unused
entries to a multiple of 64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from mlbert.data.formats.library_tokenizer import (
    BERT_NAMES,
    bert_content,
    load_library,
    set_bert_template,
)
from mlbert.data.formats.tokenizer import Tokenizer
from mlbert.data.formats.tokenizer_files import (
    RULE_NAMES,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    VOCABULARY_SHA256,
)
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import read_json, shown

MULTIPLE = 64  # of the number of entries, for the speed of matrix products
UNUSED = "[unused{}]"
_UNUSED = re.compile(r"\[unused(\d+)\]")
_LONGEST = 100  # characters of a word
_ONE_WORD = "Give one word per line, in UTF-8"
_BEFORE = "a"  # of a word that is tried
_AFTER = "b"
# Keys of a tokenizer_config.json that tokenizer.json has instead, or that no longer hold.
_NOT_KEPT = (
    *RULE_NAMES,
    VOCABULARY_SHA256,
    "added_tokens_decoder",
    "auto_map",
    "tokenizer_class",
)


@dataclass(frozen=True)
class AddedWords:
    """A tokenizer with added words.

    Attributes:
        library: the new tokenizer.
        pieces: new id of a word -> the ids that it had before.
        shared: words that are now one token, with the id of an equal piece inside other words.
        known: words that are one token already and were not added.
        size: entries, with unused ones.
    """

    library: tokenizers.Tokenizer
    pieces: dict[int, list[int]]
    shared: list[str]
    known: list[str]
    size: int


def round_up(size: int) -> int:
    """Return the next multiple of `MULTIPLE`."""
    return -(-size // MULTIPLE) * MULTIPLE


def read_words(file: Path) -> list[str]:
    """Return the words of a file, one a line, each once.

    Raises UserError: the file is unreadable or not UTF-8, or a line is not one word.
    """
    try:
        lines = read_plain(file, _ONE_WORD).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError("data.encoding", file, "is not UTF-8", _ONE_WORD) from None
    words: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if len(parts) > 1 or len(line.strip()) > _LONGEST:
            reason = f"line {number} is not one word: {shown(line.strip())}"
            raise UserError("data.row", file, reason, _ONE_WORD)
        words |= dict.fromkeys(parts)
    if not words:
        raise UserError("data.empty", file, "contains no words", _ONE_WORD)
    return list(words)


def add_words(tokenizer: Tokenizer, words: Iterable[str], rows: int = 0) -> AddedWords:
    """Return a tokenizer with more words.

    Args:
        tokenizer: which is not changed.
        words: words, as of `read_words`.
        rows: of the model's embedding; there are at least as many entries.

    Raises:
        UserError: a word cannot be one token of this tokenizer, or its ids have gaps.
    """
    old = as_library(tokenizer)
    if {*old.get_vocab().values()} != {*range(old.get_vocab_size())}:
        reason = "has ids without an entry, so none can be added"
        remedy = "Choose a tokenizer with an entry for each id"
        raise UserError("vocabulary.unsupported", tokenizer.file, reason, remedy)
    pieces_of: dict[str, list[int]] = {}
    known: list[str] = []
    for word in words:
        pieces = _encode(old, f" {word}")
        if len(pieces) == 1 and pieces[0] != tokenizer.unknown_id:
            known.append(word)
        else:
            pieces_of[word] = pieces
    shared = [word for word in pieces_of if old.token_to_id(word) is not None]
    num_new = len(pieces_of) - len(shared)
    content = json.loads(old.to_str())
    unused = _take_unused(content, old)
    first = old.get_vocab_size() - len(unused)
    needed = max(first + num_new, old.get_vocab_size(), rows)
    size = round_up(needed)
    fillers = _fillers(unused, num_new, size - first - num_new)
    new = _with_tokens(content, pieces_of, fillers, old, tokenizer.file)
    for word, pieces in pieces_of.items():
        if not _is_one_token(new, old, word):
            reason = f"cannot have {shown(word)} as one token ({len(pieces)} pieces)"
            remedy = "Leave the word out"
            raise UserError("vocabulary.unsupported", tokenizer.file, reason, remedy)
    ids = new.get_vocab()
    numbers = {ids[word]: pieces for word, pieces in pieces_of.items() if word not in shared}
    return AddedWords(new, numbers, shared, known, size)


def as_library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library with the same ids."""
    if tokenizer.library is not None:
        return tokenizer.library
    rules = tokenizer.rules
    assert rules is not None, "a plain tokenizer has rules"
    content = bert_content(tokenizer.vocabulary, rules, BERT_NAMES)
    library = load_library(content, tokenizer.file)
    library.add_special_tokens([AddedToken(token, special=True) for token in BERT_NAMES.values()])
    set_bert_template(library, BERT_NAMES)
    return library


def write_added_words(
    added: AddedWords, tokenizer: Tokenizer, folder: Path, max_length: int | None = None
) -> None:
    """Write the files of a tokenizer with added words to a folder, as `transformers` does.

    Args:
        added: the new tokenizer.
        tokenizer: the one without the words, whose other properties are kept.
        folder: which exists.
        max_length: ``model_max_length``, tokens, if the old files have none.

    Raises OSError.
    """
    file = tokenizer.file.with_name(TOKENIZER_CONFIG)
    config = read_json(file, "Restore or remove it") if file.is_file() else {}
    kept = {name: value for name, value in config.items() if name not in _NOT_KEPT}
    named = tokenizer.special.names(tokenizer.vocabulary)
    values: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **kept}
    if max_length is not None:
        values.setdefault("model_max_length", max_length)
    text = json.dumps(values, indent=2) + "\n"
    (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
    (folder / TOKENIZER_JSON).write_text(added.library.to_str(pretty=True) + "\n", "utf-8")


def _encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


def _take_unused(content: dict[str, Any], library: tokenizers.Tokenizer) -> list[str]:
    """Remove the unused entries at the end of a vocabulary from the content of its tokenizer.json;
    return them in the order of their ids.
    """
    unused: list[str] = []
    number = library.get_vocab_size() - 1
    while (entry := library.id_to_token(number)) is not None and _UNUSED.fullmatch(entry):
        unused.insert(0, entry)
        number -= 1
    names = {*unused}
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        content["model"]["vocab"] = {
            entry: number for entry, number in vocab.items() if entry not in names
        }
    else:
        content["model"]["vocab"] = [pair for pair in vocab if pair[0] not in names]
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in names
    ]
    return unused


def _fillers(unused: Sequence[str], num_taken: int, count: int) -> list[str]:
    """Return the names of the unused entries that are left, and of new ones."""
    kept = list(unused[num_taken:])
    numbers = [int(found[1]) for name in unused if (found := _UNUSED.fullmatch(name))]
    next_number = max(numbers, default=-1) + 1
    return [*kept, *(UNUSED.format(next_number + n) for n in range(count - len(kept)))]


def _with_tokens(
    content: dict[str, Any],
    words: Iterable[str],
    fillers: Sequence[str],
    old: tokenizers.Tokenizer,
    file: Path,
) -> tokenizers.Tokenizer:
    """Return a tokenizer with these tokens. How a word takes the space before it depends on the
    normalizer and the pre-tokenizer, so the ways are tried on the first word.
    """
    words = list(words)
    made = load_library(content, file)
    for normalized, lstrip in ((True, False), (True, True), (False, False), (False, True)):
        made = load_library(content, file)
        made.add_tokens(
            [
                AddedToken(word, single_word=True, lstrip=lstrip, normalized=normalized)
                for word in words
            ]
        )
        if not words or _is_one_token(made, old, words[0]):
            break
    made.add_tokens([AddedToken(name, normalized=False) for name in fillers])
    return made


def _is_one_token(new: tokenizers.Tokenizer, old: tokenizers.Tokenizer, word: str) -> bool:
    """Return whether a word is one token between two others, which are as before."""
    before = _encode(old, _BEFORE)
    after = _encode(old, f" {_AFTER}")
    found = _encode(new, f"{_BEFORE} {word} {_AFTER}")
    number = new.token_to_id(word)
    return found == [*before, number, *after] and _encode(new, word) == [number]
