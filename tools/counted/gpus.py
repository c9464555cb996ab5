"""The GPUs that a step is counted and modelled for: what programs see of them, and what they sustain, in one table.

Sustained rates are those of products and copies of this model's sizes, not the data sheet's:

    bandwidth     4.2 of 4.8 TB/s, a copy on an H200; for others the same share of the data sheet's
    products      675 (bfloat16) and 980 (FP8) TFLOP/s on an H200: an expert's estimate for products with inner
                  dimensions of 1,024 and 4,096; the H100, which has the same multiprocessors, is assumed to do it too
    clock         1.75 GHz, at which 64 x 64 elements of 4 bytes take a multiprocessor's share of 4.2 TB/s 900 clocks
    attention     103 us a sequence of 254.4 tokens, forward and backward with dropout: 150 us, an expert's estimate
                  for kernels whose instructions allowed 108.5 us at best, times 74.7 / 108.5, for they allow 74.7 us
                  now (tools/attention_model.py)

None has been measured with this program. What is unknown is None, and nothing is modelled then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlbert.report.planner.timing import GPUS as FACTS

ISSUES_A_CLOCK = 4  # instructions that a multiprocessor's schedulers issue


@dataclass(frozen=True)
class Rates:
    """Sustained: bytes and FLOPs a second, clocks a second, seconds of attention a token."""

    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    clock: float
    attention: float


@dataclass(frozen=True)
class Gpu:
    """A GPU as programs see it; ``fact``: its name in `mlbert.report.planner.timing.GPUS`."""

    name: str
    fact: str
    capability: int
    multiprocessors: int
    rates: Rates | None = None

    @property
    def memory_bytes(self) -> int:
        """Of the whole GPU."""
        return int(FACTS[self.fact].memory_gb * 1e9)


_SECONDS_A_TOKEN = 150e-6 * 74.7 / 108.5 / 254.4
# Multiprocessors, bandwidths and capabilities: the makers' data sheets.
GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "a100-sxm", 80, 108),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "h100-sxm", 90, 132, Rates(2.93e12, 675e12, 980e12, 1.75e9, _SECONDS_A_TOKEN)),
    "h200": Gpu("NVIDIA H200", "h200", 90, 132, Rates(4.2e12, 675e12, 980e12, 1.75e9, _SECONDS_A_TOKEN)),
    "b200": Gpu("NVIDIA B200", "b200", 100, 148),
    "gb200": Gpu("NVIDIA GB200", "gb200", 100, 148),
}
