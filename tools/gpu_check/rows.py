"""Measure rows one by one into a JSON file; a row that fails is recorded,
and the next one still runs.

The file is written before and after each row and names the row that is running. If the process
crashes or is killed, its rows are kept. When it is started again, it records the row that was
running as failed and continues with the next.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_check.hardware import synchronize
from mlbert.host.files import write_atomically

LOST = "the process ended in this row"

Measurement = Callable[[], dict[str, Any]]
Row = tuple[str, Measurement]  # name and measurement


class DeviceLost(RuntimeError):
    """The device no longer works in this process."""


class Rows:
    """The rows of one file.

    Args:
        path: JSON file; rows that it already has are kept and not measured again.
        device: checked after a row has failed.
        facts: written first.
    """

    def __init__(self, path: Path, device: torch.device, facts: Mapping[str, object]) -> None:
        self.path = path
        self.device = device
        self.content: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {**facts, "rows": {}}
        )
        if running := self.content.pop("running", None):
            self.content["rows"][running] = {"error": LOST}
        self._write()

    def measure_all(self, rows: Iterable[Row]) -> None:
        """Measure the rows in order. Raises as `measure`."""
        for name, row in rows:
            self.measure(name, row)

    def measure(self, name: str, row: Measurement) -> None:
        """Measure one row.

        Raises:
            DeviceLost: it failed, and this process can measure no further rows; a new process can.
        """
        if name in self.content["rows"]:
            return
        self.content["running"] = name
        self._write()
        started = time.perf_counter()
        try:
            result = row()
        except Exception:
            result = {"error": traceback.format_exc()}
        result["wall_seconds"] = round(time.perf_counter() - started, 3)
        del self.content["running"]
        self.content["rows"][name] = result
        self._write()
        if "error" in result:
            self._check_device()

    def _check_device(self) -> None:
        try:
            synchronize(self.device)
            torch.ones(1, device=self.device).sum().item()
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self.content, indent=1) + "\n")
