"""Which fine-tuning jobs make a GLUE score, in which order, and the score that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.data.formats.glue import TASKS, score

DEFAULT_SEED = 19
# MosaicML's published seeds: tasks of few rows vary more, so they are run more often. The others take DEFAULT_SEED.
_SEEDS = (19, 8364, 717, 10536, 90166)
SEEDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("rte", "mrpc", "stsb"), _SEEDS),
    "sst2": _SEEDS[:3],
    "cola": _SEEDS[:4],
}
FIRST = "mnli"  # its first job's weights start the second round


@dataclass(frozen=True)
class Job:
    """One task with one seed; ``waits`` for the first job of `FIRST`."""

    task: str
    seed: int
    waits: bool

    def name(self, base: str) -> str:
        """For people and loggers."""
        return f"{base}_task={self.task}_seed={self.seed}"

    def folder(self, base: Path) -> Path:
        """Of its run."""
        return base / f"task={self.task}" / f"seed={self.seed}"


def job_list(seeds: Mapping[str, Sequence[int]]) -> list[Job]:
    """The jobs of these tasks and seeds, `FIRST` first, then the rest of the first round, then those that wait.

    Without `FIRST` nobody waits: all start from the pre-trained weights.
    """
    has_first = bool(seeds.get(FIRST))
    jobs = [Job(task, seed, has_first and TASKS[task].after_mnli) for task in seeds for seed in seeds[task]]
    return sorted(jobs, key=lambda job: (TASKS[job.task].after_mnli, job.task != FIRST))


def aggregate(results: Mapping[Job, Mapping[str, float]]) -> dict[str, float]:
    """Task -> its score times 100, the mean over its metrics and seeds; "glue" -> the mean over tasks."""
    found: dict[str, list[float]] = {}
    for job, metrics in results.items():
        found.setdefault(job.task, []).append(score(job.task, metrics))
    scores = {task: sum(values) / len(values) for task, values in found.items()}
    return {**scores, "glue": sum(scores.values()) / len(scores)} if scores else {}
