"""Whether ids were made with a vocabulary: told by what the ids say, where the data does not name its own.

Entries that begin with ## go on with a word, and WordPiece ends a word at punctuation: with the right vocabulary no ##
follows punctuation, with another one as many as follow anything else. Legend: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, UNKNOWN, is_punctuation
from mlbert.host.errors import UserError

_LEAST = 100  # of what a rate is judged by
_MISPLACED = 0.05  # of the tokens behind punctuation; measured: 0 with the right vocabulary, 0.1 and more with others
_UNKNOWN_TOKENS = 1000  # and more of a text tell whether its vocabulary fits
WARN_UNKNOWN, REFUSE_UNKNOWN = 0.05, 0.5  # share of [UNK]; English with the benchmark's vocabulary: below 0.003


def another_vocabulary(rows: Ragged, vocabulary: Mapping[str, int]) -> str | None:
    """Why sequences were made with another vocabulary than this (entry -> id), as words that follow a file's name."""
    if not len(rows) or int(rows.lengths.min()) < 1:
        return None
    for name, places in (("[CLS]", rows.offsets[:-1]), ("[SEP]", rows.offsets[1:] - 1)):
        if (rows.tokens[places] == vocabulary[name]).mean() < 0.5:
            where = "begin" if name == "[CLS]" else "end"
            return f"was made with another vocabulary: its sequences do not {where} with this one's {name}"
    size = max(len(vocabulary), 1 + int(max(rows.tokens.max(initial=0), rows.masked_labels.max(initial=0))))
    goes_on, ends = np.zeros(size, bool), np.zeros(size, bool)
    for entry, number in vocabulary.items():
        goes_on[number] = entry.startswith("##")
        ends[number] = len(entry) == 1 and is_punctuation(entry)
    tokens = rows.tokens.copy()  # as they were before masking
    masked = np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets)) + rows.masked_positions
    tokens[masked] = rows.masked_labels
    behind = np.flatnonzero(ends[tokens[:-1]]) + 1  # a sequence ends with [SEP], which is no punctuation
    if len(behind) < _LEAST or (share := goes_on[tokens[behind]].mean()) < _MISPLACED:
        return None
    return f"was made with another vocabulary: {share:.0%} of its words would go on behind punctuation with this one"


def unknown_share(tokens: np.ndarray, vocabulary: Mapping[str, int], subject: Path | str, vocab_name: str) -> float:
    """Share of [UNK] among the tokens (uint16 [T]) of a text; 0 for a short one. Raises UserError where it is most:
    nothing can be learnt of them."""
    if len(tokens) < _UNKNOWN_TOKENS:
        return 0.0
    share = np.count_nonzero(tokens == vocabulary[UNKNOWN]) / len(tokens)
    if share > REFUSE_UNKNOWN:
        reason = f"{share:.0%} of its words are not in the vocabulary {vocab_name}"
        raise UserError(
            "vocabulary.other-language",
            subject,
            reason,
            "Give a vocabulary of its language, and --cased where that keeps case",
        )
    return share


def keeps_case(vocabulary: Mapping[str, int]) -> bool:
    """Whether a vocabulary has words with capitals, which texts in lower case never give."""
    return sum(entry != entry.lower() and entry not in SPECIAL_TOKENS for entry in vocabulary) > len(vocabulary) // 20
