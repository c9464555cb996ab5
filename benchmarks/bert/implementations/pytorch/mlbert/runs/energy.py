"""The energy of a run, from the counters that zeus reads (extra ``energy``):
NVML for GPUs, RAPL for processors.

One rank of each machine measures. What cannot be measured on every machine is left out.
A failure never ends a run.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence

PARTS = {"gpu": "GPUs", "cpu": "processors", "dram": "memory"}  # in summary.json, and for a person


class EnergyMeter:
    """Energy of this machine between `start` and `stop`.

    A meter that was not started adds nothing to the sums.

    Attributes:
        reason: why nothing is measured here; empty if zeus is not installed.
    """

    def __init__(self, num_gpus: int) -> None:
        self._num_gpus = num_gpus
        self._before: dict[str, float] | None = None
        self._started = time.monotonic()
        self.reason = "not every machine has a meter"

    def reject(self, reason: str) -> None:
        """Say why this run is not measured, if zeus is installed."""
        is_wanted = importlib.util.find_spec("zeus") is not None
        self.reason = reason if is_wanted else ""

    def start(self) -> None:
        """Read the counters. The first reading starts zeus's own process, which takes a second."""
        self._before = self._try_read()
        self._started = time.monotonic()

    def stop(self) -> list[float]:
        """Return numbers to sum over the ranks: joules of each part,
        the machines that measured it, seconds, and machines.
        """
        if self._before is None:
            return [0.0] * (2 * len(PARTS) + 2)
        seconds = time.monotonic() - self._started
        after = self._try_read()
        joules = [after.get(part, 0.0) - self._before.get(part, 0.0) for part in PARTS]
        is_measured = [part in self._before and part in after for part in PARTS]
        return [*joules, *map(float, is_measured), seconds, 1.0]

    def _try_read(self) -> dict[str, float]:
        try:
            found = _read(self._num_gpus)
        except ImportError:
            self.reason = ""  # without zeus, no measurement was asked for
        except Exception as error:  # whatever zeus and the drivers raise
            self.reason = f"{type(error).__name__}: {error}"
        else:
            if not found:
                self.reason = "this machine has no meter that this user may read"
            return found
        return {}


def _read(num_gpus: int) -> dict[str, float]:
    """Return the joules counted so far by part, without the parts that cannot be read."""
    from zeus.device import (
        get_cpus,
        get_gpus,
    )  # ZeusMonitor, which does the same, imports pandas and scikit-learn
    from zeus.device.exception import ZeusBaseCPUError

    found = {}
    if num_gpus:
        found["gpu"] = (
            sum(get_gpus().get_total_energy_consumption(index) for index in range(num_gpus)) / 1e3
        )
    try:
        zones = get_cpus().cpus
    except ZeusBaseCPUError:  # no RAPL, or only root may read it
        return found
    # The zone "psys" of laptops contains the processor's own zone.
    # zeus's daemon does not name zones.
    named = [
        zone for zone in zones if not hasattr(zone, "rapl_file") or zone.rapl_file.name != "psys"
    ]
    counted = [zone.get_total_energy_consumption() for zone in named]
    memory = [energy.dram_mj for energy in counted if energy.dram_mj is not None]
    parts = {"cpu": [energy.cpu_mj for energy in counted], "dram": memory}
    return found | {
        part: sum(millijoules) / 1e3 for part, millijoules in parts.items() if millijoules
    }


def summarize_energy(sums: Sequence[float]) -> dict[str, float]:
    """Return the numbers for ``summary.json`` from the sums of all `EnergyMeter.stop`; empty if
    nothing was measured on every machine.
    """
    *numbers, seconds, machines = sums
    joules = numbers[: len(PARTS)]
    measured = numbers[len(PARTS) :]
    pairs = zip(PARTS, joules, measured, strict=True)
    parts = {
        f"{part}_joules": round(used, 3)
        for part, used, count in pairs
        if count and count == machines
    }
    if not parts:
        return {}
    total = round(sum(parts.values()), 3)
    return {"energy_joules": total, "average_watts": round(total / seconds * machines, 3), **parts}


def energy_words(summary: dict[str, float], reason: str) -> str:
    """Return one line for the screen about the result of `summarize_energy`, or about why it is
    empty; no words if there is no reason to give.
    """
    if not summary and not reason:
        return ""
    if not summary:
        return f"energy: not measured: {reason}"
    parts = ", ".join(words for part, words in PARTS.items() if f"{part}_joules" in summary)
    return (
        f"energy: {summary['energy_joules']:,.0f} J, "
        f"{summary['average_watts']:,.1f} W on average ({parts})"
    )
