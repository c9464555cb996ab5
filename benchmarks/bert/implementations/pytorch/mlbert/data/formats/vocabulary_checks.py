"""Check whether token ids and a vocabulary belong together.

`another_vocabulary` checks data that does not record its vocabulary. WordPiece ends a word at
punctuation, so with the right vocabulary no ## entry follows punctuation; with a wrong one, ##
entries are as frequent there as elsewhere. `unknown_share` checks that a vocabulary fits a text.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, is_punctuation
from mlbert.host.errors import UserError

_LEAST = 100  # tokens after punctuation; with fewer, no verdict
# Share of ## entries after punctuation. Measured: 0 with the right vocabulary,
# at least 0.1 with others.
_MISPLACED = 0.05
_UNKNOWN_TOKENS = 1000  # minimum tokens of a text to judge its vocabulary
# Shares of [UNK] in a text; English with the benchmark's vocabulary has less than 0.003.
WARN_UNKNOWN = 0.05  # above it, warn
REFUSE_UNKNOWN = 0.5  # above it, refuse: nothing can be learned


def another_vocabulary(rows: Ragged, vocabulary: Mapping[str, int]) -> str | None:
    """Return evidence that sequences were made with a different vocabulary (entry -> id), phrased
    to follow a file's name, or None.
    """
    if not len(rows) or int(rows.lengths.min()) < 1:
        return None
    for name, places in (("[CLS]", rows.offsets[:-1]), ("[SEP]", rows.offsets[1:] - 1)):
        if (rows.tokens[places] == vocabulary[name]).mean() < 0.5:
            where = "begin" if name == "[CLS]" else "end"
            return (
                f"was made with a different vocabulary: its sequences do not {where} "
                f"with this one's {name}"
            )
    size = max(
        len(vocabulary), 1 + int(max(rows.tokens.max(initial=0), rows.masked_labels.max(initial=0)))
    )
    continues = np.zeros(size, bool)
    ends = np.zeros(size, bool)
    for entry, number in vocabulary.items():
        continues[number] = entry.startswith("##")
        ends[number] = len(entry) == 1 and is_punctuation(entry)
    tokens = rows.tokens.copy()  # as they were before masking
    masked = np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets)) + rows.masked_positions
    tokens[masked] = rows.masked_labels
    # Within a sequence: it ends with [SEP], not punctuation.
    after = np.flatnonzero(ends[tokens[:-1]]) + 1
    if len(after) < _LEAST or (share := continues[tokens[after]].mean()) < _MISPLACED:
        return None
    return (
        f"was made with a different vocabulary: {share:.0%} "
        "of the tokens after punctuation would continue a word"
    )


def unknown_share(
    tokens: np.ndarray, unknown: int | None, subject: Path | str, vocab_name: str
) -> float:
    """Return the share of the id ``unknown`` among the tokens (int [T]) of a text; 0 if the text is
    short, or the vocabulary has no such id.

    Raises UserError if most are [UNK], because nothing can be learned from them.
    """
    if unknown is None or len(tokens) < _UNKNOWN_TOKENS:
        return 0.0
    share = np.count_nonzero(tokens == unknown) / len(tokens)
    if share > REFUSE_UNKNOWN:
        reason = f"{share:.0%} of its tokens are unknown to {vocab_name}"
        remedy = "Give a vocabulary of its language, and --cased if that keeps case"
        raise UserError("vocabulary.other-language", subject, reason, remedy)
    return share


def keeps_case(vocabulary: Mapping[str, int]) -> bool:
    """Return True if the vocabulary has words with capital letters,
    which lowercased text never contains.
    """
    return (
        sum(entry != entry.lower() and entry not in SPECIAL_TOKENS for entry in vocabulary)
        > len(vocabulary) // 20
    )
