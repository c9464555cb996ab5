"""How the made runs of a benchmark look."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MadeBenchmark:
    """How a benchmark's runs look.

    Attributes:
        ruleset: official rules that accept the logs.
        runs: number of runs of a result.
        progress: key of the metadata that says how far the training is.
        every: distance of evaluations in it.
        first, target: quality at the first evaluation, and the one that ends a run.
        keys: hyper-parameters and other keys that the rules require.
    """

    ruleset: str
    runs: int
    progress: str
    every: int
    first: float
    target: float
    keys: Mapping[str, Any]
