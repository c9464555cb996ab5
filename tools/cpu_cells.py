"""The measurements of a record of a processor; see `cpu_record`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from measured_model import Measured

COMPARE = "compare"
PARTS = "parts"
SWEEP = "sweep"
SEQUENCES = (8, 32, 128)
MODELS = {
    "demo": Measured(compared=32, pairs=31, swept_layers=1),
    "base": Measured(compared=8, pairs=3, swept_layers=4),
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
        sizes = f"{self.threads}threads_{self.sequences}sequences"
        return f"{self.model}_{self.precision}_{self.kind}_{sizes}"

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
