"""The fitted numbers of the model (``parameters.json``, written by ``tools/fit_plan.py``) and what is known of GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("parameters.json")


@dataclass(frozen=True)
class Gpu:
    """Facts of a GPU.

    Attributes:
        memory_gb: of one GPU, in 10^9 bytes.
        peak_tflops: dense 16-bit peak.
        port_gbps: network share of one GPU in a usual node.
        per_node: GPUs in a usual node.
        domain: GPUs that reach each other over NVLink (or the maker's own links) alone.
        constant: name of its constant part in `Parameters`.
        has_fp8: whether its published results are with FP8 products.
    """

    memory_gb: float
    peak_tflops: float
    port_gbps: float
    per_node: int
    domain: int
    constant: str
    has_fp8: bool


# Peaks: /systems and makers' data sheets as used in docs/gpu.md; memory by the names of the published systems.
GPUS: Mapping[str, Gpu] = {
    "a100-sxm": Gpu(80, 312, 200, 8, 8, "a100", False),
    "a100-pcie": Gpu(80, 312, 200, 8, 8, "a100", False),
    "h100-sxm": Gpu(80, 989.4, 400, 8, 8, "later", True),
    "h100-pcie": Gpu(80, 756, 400, 8, 8, "later", True),
    "h200": Gpu(141, 989.4, 400, 8, 8, "later", True),
    "b200": Gpu(180, 2250, 400, 8, 8, "later", True),
    "gb200": Gpu(186, 2500, 400, 4, 72, "later", True),
    "gaudi2": Gpu(96, 432, 300, 8, 8, "later", False),
}
ALIASES = {"a100": "a100-sxm", "h100": "h100-sxm"}


@dataclass(frozen=True)
class Parameters:
    """What was fitted; times in milliseconds, the others are factors.

    Attributes:
        sequence_ms: of one sequence of the benchmark (254 tokens on average, BERT-large), by GPU.
        constant_ms: of one step, whatever its batch: LAMB, what is reduced inside a node, launches.
        pcie_ms: of a step's reduction among many GPUs without NVLink.
        network_ms: of a step's reduction between nodes, by fabric, at `REFERENCE_GBPS` of a node.
        evaluation_gpu_seconds: GPU seconds of one evaluation, by GPU.
        samples_share: samples to the target of the rules' point, interpolated as they do; a score counts no fewer.
        old_software: factor on ``sequence_ms`` of round 1.1.
        old_samples: factor on the samples of round 1.1 (small scale: sequences exchanged, not packed).
        blackwell_samples: factor on B200's and GB200's samples with batches above 1,024.
        own_settings: factor on the samples from 192 sequences a GPU, for which nobody published a tuned recipe.
        error_90: nine of ten rows that were fitted lie within exp(-error_90) to exp(error_90) of the prediction.
    """

    sequence_ms: Mapping[str, float]
    constant_ms: Mapping[str, float]
    pcie_ms: float
    network_ms: Mapping[str, float]
    evaluation_gpu_seconds: Mapping[str, float]
    samples_share: float
    old_software: float
    old_samples: float
    blackwell_samples: float
    own_settings: float
    error_90: float


def load() -> Parameters:
    """The fitted parameters of this version."""
    return Parameters(**json.loads(PATH.read_text(encoding="utf-8"))["parameters"])
