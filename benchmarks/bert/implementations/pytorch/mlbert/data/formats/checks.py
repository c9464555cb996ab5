"""Checks of a set's values; each rule returns the sequences that break it.

`another_vocabulary` checks data that does not record its vocabulary. WordPiece ends a word at
punctuation, so with the right vocabulary no ## entry follows punctuation; with a wrong one, ##
entries are as frequent there as elsewhere.

Legend: S sequences, T tokens, M masked tokens, P packs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlbert.data.formats.base import StoreInfo
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, UNKNOWN, is_punctuation
from mlbert.host.errors import UserError

_LEAST = 100  # tokens after punctuation; with fewer, no verdict
# Share of ## entries after punctuation. Measured: 0 with the right vocabulary,
# at least 0.1 with others.
_MISPLACED = 0.05
_UNKNOWN_TOKENS = 1000  # minimum tokens of a text to judge its vocabulary
# Shares of [UNK] in a text; English with the benchmark's vocabulary has less than 0.003.
WARN_UNKNOWN = 0.05  # above it, warn
REFUSE_UNKNOWN = 0.5  # above it, refuse: nothing can be learned


def row_problems(rows: Ragged, info: StoreInfo) -> dict[str, np.ndarray]:
    """Check the rules that readers rely on, with the limits of ``info``.

    Token ids are checked only if it has a vocabulary size. Returns {problem: int64 sequence
    numbers, ascending, possibly repeated}.
    """
    lengths = rows.lengths
    masked = np.diff(rows.masked_offsets)
    after_end = rows.masked_positions >= np.repeat(lengths, np.maximum(masked, 0))
    problems = {
        "is empty or longer than max_seq_length": np.flatnonzero(
            (lengths < 1) | (lengths > info.max_seq_length)
        ),
        "has more masked tokens than max_predictions": np.flatnonzero(
            masked > info.max_predictions
        ),
        "has a first segment longer than itself": np.flatnonzero(rows.first_lengths > lengths),
        "has a next-sentence label other than 0 or 1": np.flatnonzero(rows.next_sentence > 1),
        "has a masked position after its end": sequences_of(rows.masked_offsets, after_end),
    }
    if info.vocab_size is not None:
        problems["has a token outside the vocabulary"] = sequences_of(
            rows.offsets, rows.tokens >= info.vocab_size
        )
        labels = rows.masked_labels >= info.vocab_size
        problems["has a label outside the vocabulary"] = sequences_of(rows.masked_offsets, labels)
    return problems


def mask_problems(rows: Ragged) -> dict[str, np.ndarray]:
    """Check the rules of masking that training does not rely on.

    Returns the same as `row_problems`.
    """
    falling = np.zeros(len(rows.masked_positions), bool)
    falling[1:] = rows.masked_positions[1:] <= rows.masked_positions[:-1]
    starts = rows.masked_offsets[:-1]
    falling[starts[starts < len(falling)]] = False
    return {
        "has no masked token": np.flatnonzero(np.diff(rows.masked_offsets) < 1),
        "has masked positions that do not ascend": sequences_of(rows.masked_offsets, falling),
        "has its first token masked": sequences_of(rows.masked_offsets, rows.masked_positions == 0),
    }


def pack_problems(rows: Ragged, pack_offsets: np.ndarray, max_tokens: int) -> dict[str, np.ndarray]:
    """Find packs (int64 [P+1] offsets into ``rows``) that are empty, not adjacent or too large.

    Returns {problem: int64 pack numbers}.
    """
    tokens = np.diff(rows.offsets[np.clip(pack_offsets, 0, len(rows))])
    wrong = np.diff(pack_offsets) < 1
    if len(pack_offsets) == 0 or pack_offsets[0] != 0 or pack_offsets[-1] != len(rows):
        wrong[:] = True
    return {
        "is empty or does not follow the pack before it": np.flatnonzero(wrong),
        f"holds more than {max_tokens} tokens": np.flatnonzero(tokens > max_tokens),
    }


def first_problem(
    rows: Ragged, info: StoreInfo, pack_offsets: np.ndarray | None = None
) -> str | None:
    """Return the first broken rule, phrased to follow a file's name, or None."""
    if (rows.lengths < 0).any() or (np.diff(rows.masked_offsets) < 0).any():
        return "has offsets that fall"
    for problem, where in row_problems(rows, info).items():
        if len(where):
            return f"sequence {int(where[0])} {problem}"
    if pack_offsets is not None and info.max_pack_tokens is not None:
        for problem, where in pack_problems(rows, pack_offsets, info.max_pack_tokens).items():
            if len(where):
                return f"pack {int(where[0])} {problem}"
    return None


def check_rows(rows: Ragged, info: StoreInfo, vocab_size: int | None) -> None:
    """Check that a model with ``vocab_size`` entries can use these sequences.

    Done before every use, because shards may have changed since they were opened.
    Raises UserError naming the set.
    """
    # Not limited by it.
    model = replace(info, vocab_size=vocab_size, max_predictions=info.max_seq_length)
    broken = [problem for problem, where in row_problems(rows, model).items() if len(where)]
    if not broken:
        return
    largest = max(int(array.max(initial=0)) for array in (rows.tokens, rows.masked_labels))
    if vocab_size is not None and largest >= vocab_size and info.vocab_size is None:
        reason = f"holds token id {largest}, the model's vocabulary has {vocab_size} entries"
        remedy = "Set BERT_CONFIG to a configuration of the data's vocabulary"
        raise UserError("data.model-mismatch", info.folder, reason, remedy)
    reason = f"holds a sequence that {broken[0]}"
    raise UserError("data.damaged", info.folder, reason, "`mlbert prepare verify` names the file")


def sequences_of(offsets: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Return the numbers of the sequences with elements marked in ``wrong`` (bool)."""
    return np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1


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
                f"was made with another vocabulary: its sequences do not {where} "
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
        f"was made with another vocabulary: {share:.0%} "
        "of the tokens after punctuation would continue a word"
    )


def unknown_share(
    tokens: np.ndarray, vocabulary: Mapping[str, int], subject: Path | str, vocab_name: str
) -> float:
    """Return the share of [UNK] among the tokens (uint16 [T]) of a text; 0 if the text is short.

    Raises UserError if most are [UNK], because nothing can be learned from them.
    """
    if len(tokens) < _UNKNOWN_TOKENS:
        return 0.0
    share = np.count_nonzero(tokens == vocabulary[UNKNOWN]) / len(tokens)
    if share > REFUSE_UNKNOWN:
        reason = f"{share:.0%} of its words are not in the vocabulary {vocab_name}"
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
