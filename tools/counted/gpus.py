"""The GPUs for which a step can be counted and modelled: their properties and sustained rates.

Sustained rates are for products and copies of this model's sizes, not from the data sheet:

    bandwidth     4.2 of 4.8 TB/s for a copy on an H200; for other GPUs the same share of the data sheet's value
    products      675 (bfloat16) and 980 (FP8) TFLOP/s on an H200: an expert's estimate for products with inner
                  dimensions of 1,024 and 4,096; the H100 has the same multiprocessors and is assumed to be as fast
    clock         1.75 GHz; 64 x 64 elements of 4 bytes take 900 clocks of a multiprocessor's share of 4.2 TB/s
    attention     104 us per sequence of 254.4 tokens, forward and backward with dropout: an expert's estimate of
                  150 us for kernels whose instructions took at least 108.5 us, scaled to the 75.2 us of the current
                  kernels (tools/attention_model.py)

None of these has been measured with this program. Unknown rates are None, and such GPUs are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlbert.report.planner.timing import GPUS as FACTS

ISSUES_A_CLOCK = 4  # instructions that a multiprocessor issues per clock


@dataclass(frozen=True)
class Rates:
    """Sustained rates: bytes, FLOPs and clocks per second, and seconds of attention per token."""

    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    clock: float
    attention: float


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties; ``fact`` is its name in `mlbert.report.planner.timing.GPUS`."""

    name: str
    fact: str
    capability: int
    multiprocessors: int
    rates: Rates | None = None

    @property
    def memory_bytes(self) -> int:
        """Return the memory size of the GPU."""
        return int(FACTS[self.fact].memory_gb * 1e9)


_SECONDS_A_TOKEN = 150e-6 * 75.2 / 108.5 / 254.4
# Multiprocessors, bandwidths and capabilities are from the data sheets.
GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "a100-sxm", 80, 108),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "h100-sxm", 90, 132, Rates(2.93e12, 675e12, 980e12, 1.75e9, _SECONDS_A_TOKEN)),
    "h200": Gpu("NVIDIA H200", "h200", 90, 132, Rates(4.2e12, 675e12, 980e12, 1.75e9, _SECONDS_A_TOKEN)),
    "b200": Gpu("NVIDIA B200", "b200", 100, 148),
    "gb200": Gpu("NVIDIA GB200", "gb200", 100, 148),
}
