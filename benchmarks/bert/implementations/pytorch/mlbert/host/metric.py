"""What is declared of a metric; `mlbert.host.metrics` declares them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number of a run's steps or evaluations.

    Attributes:
        title: of its figure and column in a report. Without one, a report does not have it.
        logger_name: its name in TensorBoard and Weights & Biases, if that is another (Composer's).
    """

    title: str = ""
    logger_name: str = ""
