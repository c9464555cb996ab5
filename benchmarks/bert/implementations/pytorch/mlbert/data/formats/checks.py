"""Checks of a set's values; each rule returns the sequences that break it.

Legend: S sequences, T tokens, M masked tokens, P packs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlbert.data.formats.base import StoreInfo
from mlbert.data.formats.ragged import Ragged
from mlbert.host.errors import UserError


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
        "has a first segment longer than the whole sequence": np.flatnonzero(
            rows.first_lengths > lengths
        ),
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
        f"contains more than {max_tokens} tokens": np.flatnonzero(tokens > max_tokens),
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
        reason = f"contains token id {largest}, but the model's vocabulary has {vocab_size} entries"
        remedy = "Set BERT_CONFIG to a configuration of the data's vocabulary"
        raise UserError("data.model-mismatch", info.folder, reason, remedy)
    reason = f"contains a sequence that {broken[0]}"
    raise UserError("data.damaged", info.folder, reason, "`mlbert prepare verify` names the file")


def sequences_of(offsets: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Return the numbers of the sequences with elements marked in ``wrong`` (bool)."""
    return np.searchsorted(offsets, np.flatnonzero(wrong), side="right") - 1
