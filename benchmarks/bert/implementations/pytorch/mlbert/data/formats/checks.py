"""Are the values of a set what they must be? Each rule gives the sequences that break it.

Legend: S sequences, T tokens, M masked tokens, P packs.

Whether ids were made with a vocabulary: told by what the ids say, where the data does not name its own.

Entries that begin with ## go on with a word, and WordPiece ends a word at punctuation: with the right vocabulary no ##
follows punctuation, with another one as many as follow anything else. Legend: S sequences, T tokens.
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


def row_problems(rows: Ragged, info: StoreInfo) -> dict[str, np.ndarray]:
    """Rules that reading relies on: {what is wrong: int64, numbers of the sequences, ascending; one may come several
    times}. Limits are those of ``info``; without a vocabulary size, token ids are not judged."""
    lengths, masked = rows.lengths, np.diff(rows.masked_offsets)
    after_end = rows.masked_positions >= np.repeat(lengths, np.maximum(masked, 0))
    problems = {
        "is empty or longer than max_seq_length": np.flatnonzero((lengths < 1) | (lengths > info.max_seq_length)),
        "has more masked tokens than max_predictions": np.flatnonzero(masked > info.max_predictions),
        "has a first segment longer than itself": np.flatnonzero(rows.first_lengths > lengths),
        "has a next-sentence label other than 0 or 1": np.flatnonzero(rows.next_sentence > 1),
        "has a masked position after its end": _sequence_of(rows.masked_offsets, after_end),
    }
    if info.vocab_size is not None:
        problems["has a token outside the vocabulary"] = _sequence_of(rows.offsets, rows.tokens >= info.vocab_size)
        labels = rows.masked_labels >= info.vocab_size
        problems["has a label outside the vocabulary"] = _sequence_of(rows.masked_offsets, labels)
    return problems


def mask_problems(rows: Ragged) -> dict[str, np.ndarray]:
    """Rules of masking that training does not need to hold; as `row_problems`."""
    falling = np.zeros(len(rows.masked_positions), bool)
    falling[1:] = rows.masked_positions[1:] <= rows.masked_positions[:-1]
    starts = rows.masked_offsets[:-1]
    falling[starts[starts < len(falling)]] = False
    return {
        "has no masked token": np.flatnonzero(np.diff(rows.masked_offsets) < 1),
        "has masked positions that do not ascend": _sequence_of(rows.masked_offsets, falling),
        "has its first token masked": _sequence_of(rows.masked_offsets, rows.masked_positions == 0),
    }


def pack_problems(rows: Ragged, pack_offsets: np.ndarray, max_tokens: int) -> dict[str, np.ndarray]:
    """Packs (int64 [P+1] offsets into ``rows``) that are empty, do not follow each other or hold too much."""
    borders = np.clip(pack_offsets, 0, len(rows))
    tokens = np.diff(rows.offsets[borders])
    wrong = np.diff(pack_offsets) < 1
    if len(pack_offsets) == 0 or pack_offsets[0] != 0 or pack_offsets[-1] != len(rows):
        wrong[:] = True
    return {
        "is empty or does not follow the pack before it": np.flatnonzero(wrong),
        f"holds more than {max_tokens} tokens": np.flatnonzero(tokens > max_tokens),
    }


def first_problem(rows: Ragged, info: StoreInfo, pack_offsets: np.ndarray | None = None) -> str | None:
    """The first rule broken, as words that follow a file's name; None when all is well."""
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
    """Values that a model can take, of sequences about to be used: shards may have changed since they were checked.
    ``vocab_size`` is the model's. Raises UserError naming the set."""
    model = replace(info, vocab_size=vocab_size, max_predictions=info.max_seq_length)  # masks may be drawn anew
    broken = [problem for problem, where in row_problems(rows, model).items() if len(where)]
    if not broken:
        return
    largest = max(int(array.max(initial=0)) for array in (rows.tokens, rows.masked_labels))
    if vocab_size is not None and largest >= vocab_size and info.vocab_size is None:
        reason = f"holds token id {largest}, the model's vocabulary has {vocab_size} entries"
        raise UserError(
            "data.model-mismatch", info.folder, reason, "Set BERT_CONFIG to a configuration of the data's vocabulary"
        )
    raise UserError(
        "data.damaged", info.folder, f"holds a sequence that {broken[0]}", "`mlbert prepare verify` names the file"
    )


def _sequence_of(offsets: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Numbers of the sequences that the elements marked in ``wrong`` (bool) belong to."""
    return np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1


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
