"""The order of an MDS set's samples: the elastically deterministic order of MosaicML Streaming.

An epoch's order depends only on the sizes of the shards, the seed, the epoch and the number of
canonical nodes. It can therefore continue on another number of ranks. Which place of a shuffled
order (`mlbert.data.formats.mds_shuffles`) comes at which position of the epoch is a formula,
`places_at`.

Formulas: the documentation of MosaicML Streaming ("Shuffling", "Elastic determinism") and the API
reference of its ``streaming.base.partition.orig``, version 0.13.

Legend: N samples, F shards, K canonical nodes, L positions of an epoch.
"""

from __future__ import annotations

import numpy as np

from mlbert.data.formats.mds_shuffles import Shuffle, naive, of_spans, py1b, py1br, py1e, py1s, py2s
from mlbert.host.errors import UserError

SHUFFLES: dict[str, Shuffle] = {
    "naive": naive,
    "py1s": of_spans(py1s),
    "py2s": py2s,
    "py1b": of_spans(py1b),
    "py1br": of_spans(py1br),
    "py1e": of_spans(py1e),
}


def epoch_length(num_samples: int, canonical_nodes: int) -> int:
    """Return the positions of an epoch, L = K * ceil(N / K).

    Raises UserError if there are fewer samples than canonical nodes.
    """
    if num_samples < canonical_nodes:
        reason = f"is more than the {num_samples} samples of the set"
        raise UserError(
            "config.conflict", f"canonical_nodes {canonical_nodes}", reason, "Choose fewer"
        )
    return canonical_nodes * -(-num_samples // canonical_nodes)


def places_at(positions: np.ndarray, num_samples: int, canonical_nodes: int) -> np.ndarray:
    """Return the places (int64 [n], 0 to N - 1) of the shuffled samples that all ranks together use
    at these positions (int64 [n], 0 to L - 1) of an epoch.

    The N places are cut into K rows, which are read column by column.
    A row that is one short repeats its last place.
    """
    column, row = np.divmod(positions, canonical_nodes)
    first = row * num_samples // canonical_nodes
    end = (row + 1) * num_samples // canonical_nodes
    return np.minimum(first + column, end - 1)


def shuffle_into(
    samples: np.ndarray,
    shard_sizes: np.ndarray,
    *,
    shuffle: str,
    epoch: int,
    canonical_nodes: int,
    seed: int,
) -> None:
    """Fill ``samples`` (int [N]) with the shuffled samples of an epoch.

    Args:
        shard_sizes: int64 [F], samples of each shard, 1 or more.
        shuffle: a name in `SHUFFLES`.
        canonical_nodes: K, which must stay the same when a run continues on another number of
            nodes.
    """
    block_size = max(4_000_000 // canonical_nodes, 1 << 18)  # Streaming's default
    SHUFFLES[shuffle](samples, shard_sizes, canonical_nodes, seed, epoch, block_size)
