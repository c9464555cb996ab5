"""A list of measurements, each on its own: written at once, its failure recorded, the rest goes on.

The file always holds what is known so far, and which row is being measured, so a process that is killed or hangs
leaves its results and the name of the culprit; run again, it goes on behind that row.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_check.hardware import synchronize
from mlbert.host.files import write_atomically

LOST = "the process ended in this row"


class DeviceLost(RuntimeError):
    """The device answers no more in this process."""


class Rows:
    """The rows of one file.

    Args:
        path: JSON; what it holds from an earlier run is kept, and those rows are not measured again.
        device: checked after a row has failed.
        facts: written at the head.
    """

    def __init__(self, path: Path, device: torch.device, facts: Mapping[str, object]) -> None:
        self.path, self.device = path, device
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {**facts, "rows": {}}
        if running := self.content.pop("running", None):
            self.content["rows"][running] = {"error": LOST}
        self.write()

    def measure(self, name: str, row: Callable[[], dict[str, Any]]) -> None:
        """Runs one row.

        Raises:
            DeviceLost: it failed so that no other row can run in this process; a new one can go on.
        """
        if name in self.content["rows"]:
            return
        self.content["running"] = name
        self.write()
        started = time.perf_counter()
        try:
            result = row()
        except Exception:
            result = {"error": traceback.format_exc()}
        result["wall_seconds"] = round(time.perf_counter() - started, 3)
        del self.content["running"]
        self.content["rows"][name] = result
        self.write()
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

    def write(self) -> None:
        """Puts `content` into the file."""
        write_atomically(self.path, json.dumps(self.content, indent=1) + "\n")
