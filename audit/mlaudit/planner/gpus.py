"""Facts about GPUs, by the names that ``--gpu`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIASES = {"a100": "a100-sxm", "h100": "h100-sxm"}


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU.

    Attributes:
        memory_gb: memory per GPU, in 10^9 bytes.
        peak_tflops: dense 16-bit peak.
        port_gbps: network bandwidth per GPU in a typical node.
        per_node: GPUs in a typical node.
        domain: GPUs connected by NVLink (or the vendor's own links); 1 if only PCIe connects them.
        constant: name of its constant time in `Parameters`.
        has_fp8: whether its published results use FP8 products.
        has_results: whether the fit has results of it.
        board_watts: limit of the board's power by its vendor's data sheet; None if unknown.
    """

    memory_gb: float
    peak_tflops: float
    port_gbps: float
    per_node: int
    domain: int
    constant: str
    has_fp8: bool
    has_results: bool = True
    board_watts: float | None = None

    @property
    def is_pcie(self) -> bool:
        """Whether GPUs of one node are connected by PCIe only."""
        return self.domain == 1


# Peaks: /systems and vendors' data sheets as used in docs/gpu.md; memory from the names of the
# published systems. The last four: peaks without sparsity and with 32-bit sums from their vendors'
# data sheets; ports are assumed.
GPUS: Mapping[str, Gpu] = {
    "a100-sxm": Gpu(80, 312, 200, 8, 8, "a100", False, board_watts=400.0),
    "a100-sxm-40gb": Gpu(40, 312, 200, 8, 8, "a100", False, board_watts=400.0),
    "a100-pcie": Gpu(80, 312, 200, 8, 1, "a100", False, board_watts=300.0),
    "h100-sxm": Gpu(80, 989.4, 400, 8, 8, "later", True, board_watts=700.0),
    "h100-pcie": Gpu(80, 756, 400, 8, 1, "later", True, board_watts=350.0),
    "h200": Gpu(141, 989.4, 400, 8, 8, "later", True, board_watts=700.0),
    "b200": Gpu(180, 2250, 400, 8, 8, "later", True, board_watts=1000.0),
    "gb200": Gpu(186, 2500, 400, 4, 72, "later", True),
    "gaudi2": Gpu(96, 432, 300, 8, 8, "later", False),
    "a5000": Gpu(24, 111.1, 100, 2, 1, "a100", False, has_results=False),
    "rtx4090": Gpu(24, 165.2, 100, 8, 1, "later", False, has_results=False),
    "rx7900xtx": Gpu(24, 122.9, 100, 6, 1, "later", False, has_results=False),
    "mi300x": Gpu(192, 1307.4, 400, 8, 8, "later", False, has_results=False, board_watts=750.0),
}


def published_peak(model: str) -> float | None:
    """Return the dense 16-bit peak, TFLOP/s, of a GPU by its model name, such as NVIDIA H100 PCIe;
    None if unknown.
    """
    for name, facts in reversed(list(GPUS.items())):  # GB200 before B200, PCIe before SXM
        if name.split("-")[0] in model.lower() and (
            not name.endswith("-pcie") or "pcie" in model.lower()
        ):
            return facts.peak_tflops
    return None
