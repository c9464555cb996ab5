"""Write loss, learning rate and accuracy as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from mlbert.runs.events import Events
from mlbert.runs.progress import RunOutcome, TrainState


class Summaries(Events):
    """Write to ``folder``; points are numbered by optimizer step."""

    def __init__(self, folder: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def step(
        self,
        state: TrainState,
        loss: float,
        lr: float,
        grad_norm: float,
        ranks: Sequence[float] = (),
    ) -> None:
        """Write the loss, learning rate and gradient norm of a log point."""
        with self._writer.as_default(step=state.step):
            for name, value in {"loss": loss, "learning_rate": lr, "grad_norm": grad_norm}.items():
                tf.summary.scalar(name, value)

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Write the metrics of an evaluation."""
        with self._writer.as_default(step=state.step):
            for name, value in metrics.items():
                tf.summary.scalar(f"eval/{name}", value)

    def stop(self, outcome: RunOutcome) -> None:
        """Close the writer; call it last."""
        self._writer.close()
