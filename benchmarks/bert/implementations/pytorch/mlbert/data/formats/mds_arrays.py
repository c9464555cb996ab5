"""Token ids of an MDS shard that are read where they are stored, without a copy.

Sets that were tokenized when they were written store an array for each text, as
`mlbert.data.formats.mds_tokens` describes. One pass over the sizes in a shard finds all arrays; the
ids themselves are read when a text is used. `stored_tokens` returns None for a shard that it does
not understand. Its samples are then decoded one by one, which also names the damaged one.

Legend: n texts of a shard, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.mds_tokens import AXIS, ArrayForm, array_form


@dataclass(frozen=True)
class StoredTokens:
    """The texts of one shard.

    Attributes:
        content: uint8 [bytes], the shard's samples.
        dtype: of the stored ids, an integer type.
        starts: int64 [n], where the ids of each text begin in ``content``.
        lengths: int64 [n], tokens of each text.
    """

    content: np.ndarray
    dtype: np.dtype
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, without the mapped content."""
        return self.starts.nbytes + self.lengths.nbytes

    def text(self, place: int) -> np.ndarray:
        """Return the tokens of one text in the stored type. They may be no entries of the
        vocabulary.
        """
        start = self.starts[place]
        end = start + self.lengths[place] * self.dtype.itemsize
        return self.content[start:end].view(self.dtype)


def stored_tokens(
    reader: MdsReader, number: int, column: str, pad_id: int | None
) -> StoredTokens | None:
    """Find the token ids in shard ``number``.

    Args:
        reader: the opened set.
        number: of the shard in the set.
        column: with arrays of ids.
        pad_id: id that is dropped at the end of each text; None if there is no padding.

    Returns None if the column has no one-dimensional arrays of one integer type, a sample is
    damaged, or a text is empty. Raises UserError as `MdsReader.shard_bytes`.
    """
    form = array_form(reader.columns[column])
    if form is None:
        return None
    found = reader.column_places(number, column)
    if found is None:
        return None
    content, starts, ends = found
    dtype = form.dtype
    if dtype is None:
        dtype = _common_dtype(content, starts, ends)
        starts = starts + 1
    if dtype is None:
        return None
    counts = None
    if not form.has_shape:
        shapes = _shapes(content, starts, ends)
        if shapes is None:
            return None
        starts, counts = shapes
    num_bytes = ends - starts
    lengths = num_bytes // dtype.itemsize
    is_whole = (num_bytes > 0) & (num_bytes % dtype.itemsize == 0)
    if counts is not None:
        is_whole &= lengths == counts
    if not is_whole.all():
        return None
    tokens = StoredTokens(content, dtype, starts, lengths)
    if pad_id is not None:
        _drop_padding(tokens, pad_id)
    if (tokens.lengths == 0).any():
        return None
    return tokens


def _common_dtype(content: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.dtype | None:
    """Return the type that the first byte of every value names, or None."""
    if (starts == ends).any():
        return None
    codes = np.unique(content[starts])
    return ArrayForm.dtype_of(int(codes[0])) if len(codes) == 1 else None


def _shapes(
    content: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return where the numbers of each value begin, int64 [n], and how many its shape has, int64
    [n]; None if a value has another number of axes than one.
    """
    if (starts >= ends).any():
        return None
    axes, codes = np.divmod(content[starts].astype(np.int64), AXIS)
    widths = 1 << codes
    first = starts + 1
    after = first + widths
    if (axes != 1).any() or (after > ends).any():
        return None
    counts = np.empty(len(starts), np.int64)
    for width in np.unique(widths).tolist():
        mine = widths == width
        bytes_of_count = content[first[mine, None] + np.arange(width)]
        counts[mine] = np.ascontiguousarray(bytes_of_count).view(f"<u{width}")[:, 0]
    return after, counts


def _drop_padding(tokens: StoredTokens, pad_id: int) -> None:
    """Shorten the texts that end with padding, in place."""
    size = tokens.dtype.itemsize
    last_ids = tokens.content[
        (tokens.starts + (tokens.lengths - 1) * size)[:, None] + np.arange(size)
    ]
    is_padded = np.ascontiguousarray(last_ids).view(tokens.dtype)[:, 0] == pad_id
    for place in np.flatnonzero(is_padded).tolist():
        kept = np.flatnonzero(tokens.text(place) != pad_id)
        tokens.lengths[place] = kept[-1] + 1 if len(kept) else 0
