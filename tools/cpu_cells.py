"""The measurements of a record of a processor; see `cpu_record`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COMPARE = "compare"
PARTS = "parts"
SWEEP = "sweep"
SEQUENCES = (8, 32, 128)


@dataclass(frozen=True)
class Measured:
    """A model to measure.

    Attributes:
        compared: sequences of a batch in comparisons.
        pairs: steps of each side, with that many sequences.
        swept_layers: layers in the measurements of threads and sequences, which take long for
            BERT-base with all of them.
        tuned_layers: layers with which the expert's form is chosen.
    """

    compared: int
    pairs: int
    swept_layers: int
    tuned_layers: int

    def pairs_of(self, sequences: int) -> int:
        """Return the steps to measure with a batch of this size: fewer if they take longer."""
        return max(1, min(self.pairs, self.pairs * self.compared // sequences))


MODELS = {
    "demo": Measured(compared=32, pairs=31, swept_layers=1, tuned_layers=1),
    "base": Measured(compared=8, pairs=3, swept_layers=4, tuned_layers=2),
}


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    model: str
    precision: str
    kind: str
    threads: int
    sequences: int

    @property
    def name(self) -> str:
        """Return the stem of its file's name."""
        words = (self.model, self.precision, self.kind)
        return "_".join([*words, f"{self.threads}threads", f"{self.sequences}sequences"])

    @classmethod
    def named(cls, name: str) -> Cell:
        """Return the measurement with a `name`."""
        model, precision, kind, threads, sequences = name.split("_")
        return cls(
            model,
            precision,
            kind,
            int(threads.removesuffix("threads")),
            int(sequences.removesuffix("sequences")),
        )


def cells_of(cores: int, precisions: Iterable[str]) -> list[Cell]:
    """Return all measurements of a machine with this many cores, the most important first."""
    cells = []
    for precision in precisions:
        for model, measured in MODELS.items():
            for kind in (COMPARE, PARTS):
                cells.append(Cell(model, precision, kind, cores, measured.compared))
    for precision in precisions:
        for model, measured in MODELS.items():
            for threads in sorted({1, min(2, cores), cores}):
                cells.append(Cell(model, precision, SWEEP, threads, measured.compared))
            for sequences in SEQUENCES:
                cells.append(Cell(model, precision, SWEEP, cores, sequences))
    return list(dict.fromkeys(cells))
