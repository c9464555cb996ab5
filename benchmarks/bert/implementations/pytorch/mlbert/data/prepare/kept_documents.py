"""Choose which of many documents are kept: the first of those with the same letters.

Memory does not grow with the number of documents, except for one byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

MOST_TOGETHER = 1 << 23  # documents compared at a time, about


def first_of_each(digests: Callable[[], Iterable[np.ndarray]], count: int) -> np.ndarray:
    """Return bool [count], whether no earlier document has the same digest.

    Args:
        digests: called for each range of digests that is compared; returns all digests in order, in
            parts, uint64.
        count: number of all documents.
    """
    is_first = np.ones(count, bool)
    num_ranges = -(-count // MOST_TOGETHER)
    edges = [(number << 64) // max(1, num_ranges) for number in range(num_ranges + 1)]
    for low, end in pairwise(edges):
        found = []
        places = []
        first = 0
        for part in digests():
            mine = np.flatnonzero((part >= np.uint64(low)) & (part <= np.uint64(end - 1)))
            found.append(part[mine])
            places.append(first + mine)
            first += len(part)
        values = np.concatenate(found)
        order = np.argsort(values, kind="stable")
        is_repeat = values[order][1:] == values[order][:-1]
        is_first[np.concatenate(places)[order[1:][is_repeat]]] = False
    return is_first
