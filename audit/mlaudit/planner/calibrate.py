"""Replace fitted efficiencies by values from measured logs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlaudit.planner import timing
from mlaudit.planner.gpus import GPUS
from mlaudit.planner.timing import Parameters
from mlbert.host.errors import UserError

# A step that differs from the fitted one by more than this factor is another machine's.
FARTHEST = 50.0


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements from a log.

    Attributes:
        ranks: processes, one per GPU.
        batch: sequences per step over all ranks.
        sequences_per_second: median over the intervals between evaluations.
        evaluation_seconds: median; None if no evaluation finished.
        samples: samples to the target; None if the run did not reach it.
        watts: average power per rank, None if the run did not measure it.
    """

    ranks: int
    batch: int
    sequences_per_second: float
    evaluation_seconds: float | None
    samples: float | None
    watts: float | None = None

    @property
    def step_ms(self) -> float:
        """Milliseconds per step."""
        return self.batch / self.sequences_per_second * 1e3


def measured(
    ranks: int,
    batch: int,
    run_start: float,
    evaluations: Sequence[tuple[float, float, float]],
    samples: float | None,
    samples_before: float = 0.0,
) -> MeasuredRun:
    """Return the measurements of a run from times in seconds.

    Args:
        ranks, batch: ranks and batch of the run.
        run_start: start of the timed part.
        evaluations: start, stop and training sequences so far of each evaluation.
        samples: samples to the target, or None.
        samples_before: training sequences of a resumed run before run_start.

    Raises:
        ValueError: there is no training between evaluations.
    """
    ends = [(run_start, samples_before), *((stop, done) for _, stop, done in evaluations)]
    rates = [
        (done - before) / (start - stop)
        for (stop, before), (start, _, done) in zip(ends, evaluations, strict=False)
        if done > before and start > stop
    ]
    # The first interval includes one-time costs; use it only if there is no other.
    rates = rates[1:] or rates
    if not rates:
        raise ValueError("no training between evaluations")
    seconds = [stop - start for start, stop, _ in evaluations]
    return MeasuredRun(
        ranks,
        batch,
        statistics.median(rates),
        statistics.median(seconds) if seconds else None,
        samples,
    )


def two_parts(runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """Return the milliseconds per sequence of a rank and the constant milliseconds per step.

    Least squares over relative errors, with no negative part. If all runs have the same batch per
    rank, the constant part cannot be determined and is 0.
    """
    sizes = [run.batch / run.ranks for run in runs]
    if max(sizes) == min(sizes):
        return statistics.median(
            run.step_ms / size for run, size in zip(runs, sizes, strict=True)
        ), 0.0
    steps = np.array([run.step_ms for run in runs])
    mean_size, mean_step = np.average([sizes, steps], axis=1, weights=steps**-2)
    each = np.polyfit(sizes, steps, 1, w=1 / steps)[0]
    each = float(np.clip(each, 0.0, mean_step / mean_size))
    return each, float(mean_step - each * mean_size)


def calibrated(
    parameters: Parameters, job: timing.TrainingJob, runs: Sequence[MeasuredRun]
) -> Parameters:
    """Return the parameters with this GPU's values measured from logs,
    assuming the job's nodes and network.

    Logs with one batch per GPU set only the time per sequence;
    logs with several also set the constant part.

    Raises:
        UserError: the logs cannot be from this GPU.
    """
    usual = {run: _like(job, run) for run in runs}
    outside = {run: timing.step(at, parameters) for run, at in usual.items()}
    without_network = [
        replace(
            run,
            sequences_per_second=run.batch / max(1e-6, run.step_ms - outside[run].network) * 1e3,
        )
        for run in runs
    ]
    sizes = {run.batch / run.ranks for run in runs}
    facts = GPUS[job.gpu]
    constant = outside[runs[0]].constant
    if len(sizes) > 1:
        each, constant = two_parts(without_network)
    else:
        size = sizes.pop()
        each = statistics.median(run.step_ms - constant for run in without_network) / size
    per_unit = outside[runs[0]].compute / usual[runs[0]].sequences / parameters.sequence_ms[job.gpu]
    found = each / per_unit
    if not 1 / FARTHEST < found / parameters.sequence_ms[job.gpu] < FARTHEST:
        reason = (
            f"has steps of {runs[0].step_ms:.1f} ms; "
            f"expected about {outside[runs[0]].total:.1f} ms on {job.gpu}"
        )
        raise UserError(
            "config.conflict", "--calibrate", reason, "Give the --gpu that the log was measured on"
        )
    seconds = [
        run.evaluation_seconds * run.ranks / job.work for run in runs if run.evaluation_seconds
    ]
    evaluation = parameters.evaluation_gpu_seconds
    return replace(
        parameters,
        sequence_ms={**parameters.sequence_ms, job.gpu: found},
        constant_ms={
            **parameters.constant_ms,
            facts.constant: constant - _pcie(job, parameters, runs[0]),
        },
        evaluation_gpu_seconds={**evaluation, job.gpu: statistics.median(seconds)}
        if seconds
        else evaluation,
    )


def _like(job: timing.TrainingJob, run: MeasuredRun) -> timing.TrainingJob:
    """Return the job with a log's ranks and batch."""
    per_node = min(job.per_node, run.ranks)
    return replace(job, gpus=run.ranks, nodes=max(1, round(run.ranks / per_node)), batch=run.batch)


def _pcie(job: timing.TrainingJob, parameters: Parameters, run: MeasuredRun) -> float:
    """Return the part of the constant time that GPUs without NVLink add."""
    return (
        timing.step(_like(job, run), parameters).constant
        - parameters.constant_ms[GPUS[job.gpu].constant]
    )
