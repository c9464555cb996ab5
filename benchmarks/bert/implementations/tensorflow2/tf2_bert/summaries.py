"""Loss, rate and accuracy as TensorBoard's event files, written by TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from mlbert.runs.events import Events
from mlbert.runs.progress import RunOutcome, TrainState


class Summaries(Events):
    """Writes into ``folder``; the step of a point is the optimizer step."""

    def __init__(self, folder: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def step(self, state: TrainState, loss: float, lr: float, grad_norm: float) -> None:
        """A log point."""
        with self._writer.as_default(step=state.step):
            for name, value in {"loss": loss, "learning_rate": lr, "grad_norm": grad_norm}.items():
                tf.summary.scalar(name, value)

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """An evaluation's metrics."""
        with self._writer.as_default(step=state.step):
            for name, value in metrics.items():
                tf.summary.scalar(f"eval/{name}", value)

    def stop(self, outcome: RunOutcome) -> None:
        """Nothing comes after it."""
        self._writer.close()
