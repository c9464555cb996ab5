"""A model that a record of a processor measures; see `cpu_record`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A model to measure.

    Attributes:
        compared: sequences of a batch in comparisons.
        pairs: steps of each side, with that many sequences.
        swept_layers: layers in the measurements of threads and sequences, which take long for
            BERT-base with all of them.
    """

    compared: int
    pairs: int
    swept_layers: int

    def pairs_of(self, sequences: int) -> int:
        """Return the steps to measure with a batch of this size: fewer if they take longer."""
        return max(1, min(self.pairs, self.pairs * self.compared // sequences))
