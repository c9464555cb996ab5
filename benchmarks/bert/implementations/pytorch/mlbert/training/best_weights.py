"""The weights of the best evaluation, and when to stop because none was better for long.

    best/best.json                 the metric of each evaluation, and the step of the best one
    best/step_00000120.safetensors its weights

The files belong to the run: one that is resumed continues with them, and counts the evaluations up
to its checkpoint only.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically, write_tensors, writing
from mlbert.host.json_files import read_json

_RECORD = "best.json"
_WEIGHTS = "weights"
_WORST = -sys.float_info.max  # stands for a metric that is not a number
_REMEDY = "Free space, or name another folder"


class BestWeights:
    """The best weights of one run, by a metric of which more is better.

    Args:
        folder: of the files, created at the first evaluation.
        patience: evaluations without improvement after which to stop.
    """

    def __init__(self, folder: Path, patience: int) -> None:
        self._folder = folder
        self._patience = patience
        self._metrics: dict[int, float] = {}
        self.step: int | None = None

    def resume(self) -> None:
        """Read what an earlier part of the run wrote, if anything.

        Raises UserError if it is damaged.
        """
        path = self._folder / _RECORD
        if not path.exists():
            return
        record = read_json(path, "Start anew in another folder")
        try:
            self._metrics = {int(step): float(value) for step, value in record["metrics"].items()}
            self.step = int(record["step"])
        except (AttributeError, KeyError, TypeError, ValueError):
            reason = "is not the record of the best weights"
            raise UserError("run.damaged", path, reason, "Start anew in another folder") from None

    def evaluated(self, step: int, metric: float, weights: Tensor) -> None:
        """Note an evaluation after ``step``, and keep the exact weights if it is the best: of equal
        ones the last, which was trained with a lower rate.

        Raises UserError if they cannot be written.
        """
        if math.isnan(metric):
            metric = _WORST
        is_best = self.step is None or metric >= self._metrics[self.step] or step == self.step
        self._metrics[step] = metric
        with writing(self._folder, _REMEDY):
            self._folder.mkdir(exist_ok=True)
        if is_best:
            self.step = step
            self._write(step, weights)
        record = {"step": self.step, "metrics": self._metrics}
        write_atomically(self._folder / _RECORD, json.dumps(record, indent=1) + "\n")
        for other in self._folder.glob("step_*.safetensors"):
            if other != self._file(self.step):
                other.unlink(missing_ok=True)

    def stop_reason(self, step: int) -> str | None:
        """Return why a run that has reached ``step`` must end, or None."""
        if self.step is None:
            return None
        best = self._metrics[self.step]
        first = min(other for other, metric in self._metrics.items() if metric == best)
        since = sum(first < other <= step for other in self._metrics)
        if since < self._patience:
            return None
        return f"no better evaluation since step {first}"

    def load(self) -> Tensor:
        """Return the best weights, float32 [numel] on the host.

        Raises UserError if they are damaged.
        """
        path = self._file(self.step)
        try:
            return load_file(path)[_WEIGHTS]
        except (OSError, SafetensorError, KeyError) as error:
            reason = f"is damaged ({error})"
            raise UserError("run.damaged", path, reason, "Start anew in another folder") from None

    def _file(self, step: int | None) -> Path:
        assert step is not None, "there was no evaluation"
        return self._folder / f"step_{step:08d}.safetensors"

    def _write(self, step: int, weights: Tensor) -> None:
        on_host = weights.detach().to("cpu", torch.float32).contiguous()
        data = on_host.view(torch.uint8).numpy().data
        with writing(self._folder, _REMEDY):
            partial = self._folder / ".partial.safetensors"
            write_tensors(partial, [(_WEIGHTS, str(on_host.dtype), tuple(on_host.shape), data)])
            partial.rename(self._file(step))
