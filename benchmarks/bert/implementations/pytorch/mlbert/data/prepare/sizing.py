"""Estimate time, disk and memory for preparing a text, by measuring a sample and scaling the result.

The sample goes through the real steps (`instances`, then `pack`), each in a separate process, to measure time and peak
memory. Time and disk grow with the number of tokens. A worker's memory grows with what it holds at once: a complete
text part for instances, a shard for packing. The estimate assumes that workers scale perfectly, so times are lower
bounds if the disk or the memory bus is the limit.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.data.prepare import shuffle
from mlbert.data.prepare.instance_set import InstanceJob, prepare_instances
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.jobs import processes
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size

BENCHMARK_INSTANCES = 156_726_829
BENCHMARK_MEAN_LENGTH = 254.2  # tokens, from the published packing statistics
BENCHMARK_PARTS = 500
PART_SAMPLES = 4
PLACE_BYTES = 8  # stored with each sequence in a spill file


@dataclass(frozen=True)
class MeasuredStep:
    """One step on the sample, in one process."""

    seconds: float  # wall time
    base_bytes: int  # memory of the process before the step
    peak_bytes: int  # peak memory of the process
    disk_bytes: int  # size of the step's output
    count: int  # sequences
    tokens: int


@dataclass(frozen=True)
class EstimatedStep:
    """The estimate for one step."""

    name: str  # of the ``mlbert prepare`` command
    core_seconds: float  # time on one core
    most_workers: int  # number of work items; more workers do not help
    disk_bytes: int  # size of the step's output
    peak_disk_bytes: int  # peak during the step, including its input from the step before
    worker_bytes: int  # memory of a worker

    def seconds(self, workers: int) -> float:
        """Return the time with this many workers."""
        return self.core_seconds / min(workers, self.most_workers)


@dataclass(frozen=True)
class PreparationEstimate:
    """The estimate for one amount of text."""

    name: str
    text_bytes: int
    parts: int
    num_sequences: int
    steps: list[EstimatedStep]

    def document(self, workers: Sequence[int]) -> dict[str, Any]:
        """Return a JSON-serializable form, with the times for each number of workers."""
        steps = [
            {
                "step": step.name,
                "seconds": {str(count): round(step.seconds(count), 1) for count in workers},
                "disk_bytes": step.disk_bytes,
                "peak_disk_bytes": step.peak_disk_bytes,
                "worker_memory_bytes": step.worker_bytes,
            }
            for step in self.steps
        ]
        named = {"name": self.name, "text_bytes": self.text_bytes, "parts": self.parts}
        return {**named, "num_sequences": self.num_sequences, "steps": steps}


def estimate(
    parts: Sequence[Path], vocab_file: Path, *, sample_bytes: int = 20_000_000, lower_case: bool = True
) -> tuple[dict[str, Any], list[PreparationEstimate]]:
    """Measure a sample of the text parts, then estimate all of them and the benchmark's 156,726,829 instances. The
    sample has ``sample_bytes`` from up to `PART_SAMPLES` parts, or all text if there is less. Returns the measurements
    (JSON-serializable) and the two estimates. Raises UserError: a part or the vocabulary is bad, or a process was
    killed."""
    sizes = [plain_size(path) for path in parts]
    with tempfile.TemporaryDirectory(prefix="mlbert-estimate-") as temporary:
        folder = Path(temporary)
        text_bytes = _take_sample(parts, folder / "sample.txt", sample_bytes)
        job = InstanceJob((folder / "sample.txt",), vocab_file, folder / "set", InstanceOptions(), lower_case)
        made = _measure(_instances, job)
        packed = _measure(_pack, folder)
    measured = {
        "sample_bytes": text_bytes,
        "sequences": made.count,
        "mean_length": made.tokens / made.count,
        "sequences_per_second": {"instances": made.count / made.seconds, "pack": packed.count / packed.seconds},
        "text_bytes_per_second": text_bytes / made.seconds,
        "bytes_per_sequence": {"instances": made.disk_bytes / made.count, "pack": packed.disk_bytes / packed.count},
    }
    grow = sum(sizes) / text_bytes
    sequences = round(made.count * grow)
    steps = _steps(made, packed, grow, sequences, len(parts), max(sizes) / text_bytes)
    here = PreparationEstimate("this input", sum(sizes), len(parts), sequences, steps)
    grow = BENCHMARK_INSTANCES * BENCHMARK_MEAN_LENGTH / made.tokens
    whole = round(text_bytes * grow)
    steps = _steps(made, packed, grow, BENCHMARK_INSTANCES, BENCHMARK_PARTS, whole / BENCHMARK_PARTS / text_bytes)
    return measured, [here, PreparationEstimate("the benchmark", whole, BENCHMARK_PARTS, BENCHMARK_INSTANCES, steps)]


def _steps(
    made: MeasuredStep, packed: MeasuredStep, grow: float, sequences: int, parts: int, part_ratio: float
) -> list[EstimatedStep]:
    """Scale the measurements. ``grow``: tokens divided by the sample's tokens; ``part_ratio``: size of the largest part
    divided by the sample's size."""
    set_bytes = round(made.disk_bytes * grow)
    packed_bytes = round(packed.disk_bytes * grow)
    held = max(shuffle.SHARD, shuffle.PIECE) / sequences * grow  # relative to what a worker held for the sample
    shards, peak_bytes = shuffle.default_shards(sequences), 2 * set_bytes + PLACE_BYTES * sequences + packed_bytes
    return [
        EstimatedStep("instances", made.seconds * grow, parts, set_bytes, set_bytes, _memory(made, part_ratio)),
        EstimatedStep(
            "pack", packed.seconds * grow, shards, packed_bytes, peak_bytes, _memory(packed, min(held, grow))
        ),
    ]


def _memory(step: MeasuredStep, ratio: float) -> int:
    return round(step.base_bytes + (step.peak_bytes - step.base_bytes) * ratio)


def _take_sample(parts: Sequence[Path], sample: Path, sample_bytes: int) -> int:
    """Write a sample part from the beginnings of a few evenly spaced parts: whole documents, about ``sample_bytes`` in
    total; return the bytes written."""
    count = min(PART_SAMPLES, len(parts))
    text = b""
    for part in (parts[index * len(parts) // count] for index in range(count)):
        with part.open("rb") as file:
            text += file.read(sample_bytes // count) + file.readline()
            while (line := file.readline()).strip():
                text += line
        text += b"\n"
    if not text.strip():
        raise UserError("data.empty", parts[0], "holds no text", "Give text parts")
    sample.write_bytes(text)
    return len(text)


def _measure(step: Callable[[Any], tuple[int, int, int]], argument: Any) -> MeasuredStep:
    """Run a step in a fresh process."""
    try:
        with processes(1) as pool:
            return pool.submit(_timed, step, argument).result()
    except BrokenProcessPool:
        reason = "the measuring process was killed, possibly for lack of memory"
        raise UserError("machine.memory", "--sample-mb", reason, "Use a smaller sample") from None


def _timed(step: Callable[[Any], tuple[int, int, int]], argument: Any) -> MeasuredStep:
    base = _peak_memory()
    began = time.monotonic()
    count, tokens, disk = step(argument)
    return MeasuredStep(time.monotonic() - began, base, _peak_memory(), disk, count, tokens)


def _instances(job: InstanceJob) -> tuple[int, int, int]:
    made = prepare_instances(job, workers=1)
    return made.num_sequences, made.num_tokens, _folder_bytes(job.out)


def _pack(folder: Path) -> tuple[int, int, int]:
    made = shuffle.shuffle_set(folder / "set", folder / "packed", packing=shuffle.Packing(), workers=1)
    return made.num_sequences, made.num_tokens, _folder_bytes(folder / "packed")


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
