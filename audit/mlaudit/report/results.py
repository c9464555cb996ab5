"""The numbers of a system: olympic mean, comparison with the reference convergence points,
share of peak.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

from mlaudit import rules
from mlaudit.keys import is_hyperparameter
from mlaudit.planner.gpus import published_peak
from mlaudit.report.runs import ReportedRun, System, finite, number, read_run
from mlaudit.result_set import FEWEST_FOR_MEAN, olympic_seconds
from mlaudit.round_rules import Round
from mlaudit.rounds import judge

_FILE = f"rcp_checker/training_{rules.RULESET}/rcps_bert.json"
FASTEST = "fastest, not counted"
SLOWEST = "slowest, not counted"
MISSED = "missed the target"
INTERRUPTED = "interrupted"
UNFINISHED = "interrupted or still running"
NO_RUN = "no run_start"

# BERT-large, forward and backward, for an average sequence of the benchmark (255 tokens, 38.2 of
# them masked, mean square length 98,826):
# 6 x 302.0 M x 255 + 12 x 24 x 1024 x 98826 + 6 x (1024^2 + 1024 x 30528) x 38.2 + 6 x 1024^2.
TERAFLOPS_PER_SEQUENCE = 0.4986


@cache
def _hyperparameters() -> dict[int, dict[str, float]]:
    """Return hyper-parameters by batch size, from the official checker's file."""
    text = resources.files("mlperf_logging").joinpath(_FILE).read_text(encoding="utf-8")
    return {int(point["BS"]): point["Hyperparams"] for point in json.loads(text).values()}


def nearest_hyperparameters(global_batch_size: float) -> tuple[int, Mapping[str, float]]:
    """Return the batch size and hyper-parameters of the reference point with the most similar batch
    size.
    """
    known = _hyperparameters()
    batch = min(known, key=lambda size: max(size / global_batch_size, global_batch_size / size))
    return batch, known[batch]


def scaling(mean_samples: float, point: rules.ReferencePoint) -> float | None:
    """Return the factor of the official score on the time.

    It is above 1 if a submission needed fewer samples than the reference;
    None if it needed too few.
    """
    if mean_samples < point.min_mean_samples:
        return None
    return max(point.mean_samples / mean_samples, 1.0)


@dataclass(frozen=True)
class ResultValue:
    """A hyper-parameter's value over all runs of a system."""

    text: str  # the value, or all values
    differs: bool  # True if it differs between runs


@dataclass(frozen=True)
class Result:
    """A system and its runs."""

    system: System
    runs: Sequence[ReportedRun]

    def logged(self, key: str) -> Any:
        """Return the value of a key in the first log that has it."""
        return next((v for run in self.runs if (v := run.source.log.value(key)) is not None), None)

    @property
    def ours(self) -> bool:
        """True if this code wrote the logs."""
        return all(run.source.log.is_ours for run in self.runs)

    @cached_property
    def num_converged(self) -> int:
        """Number of runs that reached the target."""
        return sum(run.succeeded for run in self.runs)

    @cached_property
    def olympic_seconds(self) -> float | None:
        """Olympic mean of the times to train, as `mlaudit.result_set.olympic_seconds` defines
        it.
        """
        return olympic_seconds([run.source.log for run in self.runs])

    @cached_property
    def marks(self) -> Mapping[str, str]:
        """Notes by run: excluded from the mean, or why it did not reach the target."""
        marks = {run.name: _shortfall(run) for run in self.runs if not run.succeeded}
        if len(self.runs) >= FEWEST_FOR_MEAN:
            by_score = sorted(self.runs, key=lambda run: run.score)
            marks.setdefault(by_score[0].name, FASTEST)
            marks.setdefault(by_score[-1].name, SLOWEST)
        return marks

    @cached_property
    def target(self) -> float | None:
        """Accuracy that ends a run."""
        return next((run.target for run in self.runs if run.target is not None), None)

    @cached_property
    def batch(self) -> float | None:
        """Sequences per step."""
        size = number(self.logged("global_batch_size"))
        return size if size is not None and size > 0 else None

    @cached_property
    def accelerators(self) -> int | None:
        """Accelerators of all nodes; None if there is no system description."""
        counts = [
            (self.system.facts or {}).get(key)
            for key in ("number_of_nodes", "accelerators_per_node")
        ]
        numbers = [
            int(str(count)) for count in counts if str(count).isdecimal() and len(str(count)) < 8
        ]
        return numbers[0] * numbers[1] if len(numbers) == 2 else None

    @property
    def benchmark(self) -> str:
        """The benchmark that the first log names."""
        return self.runs[0].source.log.benchmark

    @cached_property
    def round(self) -> Round:
        """The round by whose rules the runs are judged."""
        logs = [run.source.log for run in self.runs]
        return judge(logs, system=self.system.facts).round

    @property
    def is_benchmark(self) -> bool:
        """True for BERT's own task: its target on its evaluation set."""
        evaluated = self.logged("eval_samples")
        is_bert = self.benchmark == rules.BENCHMARK
        is_target = self.target == self.round.target(self.batch)
        return is_bert and is_target and evaluated in (None, rules.NUM_EVAL_SAMPLES)

    @cached_property
    def reference(self) -> rules.ReferencePoint | None:
        """The reference convergence point of this batch size."""
        return (
            rules.reference_point(int(self.batch), self.round.ruleset)
            if self.is_benchmark and self.batch and self.batch < 1e9
            else None
        )

    @cached_property
    def mean_samples(self) -> float | None:
        """Olympic mean of the samples to the target;
        over the runs that reached it if one did not.
        """
        samples = finite(run.samples_to_target for run in self.runs)
        if len(samples) < len(self.runs) and len(samples) >= FEWEST_FOR_MEAN - 1:
            # The run that did not reach the target counts as the slowest.
            return math.fsum(sorted(samples)[1:]) / (len(samples) - 1)
        return _olympic(samples)

    @cached_property
    def scaling(self) -> float | None:
        """Factor of the official score (closed division);
        None if unknown or the runs needed too few samples.
        """
        is_closed = self.logged("submission_division") == "closed"
        if not is_closed or self.reference is None or self.mean_samples is None:
            return None
        return scaling(self.mean_samples, self.reference)

    @cached_property
    def samples_per_second(self) -> float | None:
        """Median over the runs of samples per second, evaluations included."""
        rates = finite(run.samples_per_second for run in self.runs)
        return statistics.median(rates) if rates else None

    @cached_property
    def training_speed(self) -> float | None:
        """Median over the runs of samples per second between evaluations."""
        rates = finite(run.training_samples_per_second for run in self.runs)
        return statistics.median(rates) if rates else None

    @cached_property
    def peak_shares(self) -> Mapping[str, float]:
        """Model FLOP/s relative to a peak, by the peak's name: measured by the runs,
        or published.
        """
        measured = finite(number(run.source.summary.get("share_of_gemm_peak")) for run in self.runs)
        if measured:
            return {"measured matrix-product peak": statistics.median(measured)}
        peak = published_peak(str((self.system.facts or {}).get("accelerator_model_name", "")))
        if (
            peak is None
            or not self.accelerators
            or not self.is_benchmark
            or self.samples_per_second is None
        ):
            return {}
        rate = self.samples_per_second / self.accelerators * TERAFLOPS_PER_SEQUENCE
        return {f"dense 16-bit peak ({peak:,.0f} TFLOP/s)": rate / peak}

    @cached_property
    def hyperparameters(self) -> Mapping[str, ResultValue]:
        """Values by key, in the order of the logs."""
        values: dict[str, dict[str, None]] = {}
        for run in self.runs:
            logged = {
                e.key: plain(e.value)
                for e in reversed(run.source.log.events)
                if is_hyperparameter(e.key)
            }
            for key, text in reversed(logged.items()):
                values.setdefault(key, {})[text] = None
            for key in values.keys() - logged.keys():
                values[key]["none"] = None
        return {key: ResultValue(", ".join(texts), len(texts) > 1) for key, texts in values.items()}

    @cached_property
    def reference_hyperparameters(self) -> tuple[int, Mapping[str, str]] | None:
        """Batch size and hyper-parameters of the nearest reference point."""
        if not self.is_benchmark or not self.batch:
            return None
        batch, values = nearest_hyperparameters(self.batch)
        texts = {key: plain(value) for key, value in values.items()}
        return batch, {**texts, "opt_lamb_epsilon": texts["opt_epsilon"]}


def _shortfall(run: ReportedRun) -> str:
    """Return why a run did not reach the target."""
    if not run.has_started:
        return NO_RUN
    if not run.is_interrupted:
        return MISSED
    return UNFINISHED if run.source.log.first("run_stop") is None else INTERRUPTED


def read_result(system: System) -> Result:
    """Read the runs of a system."""
    return Result(system, [read_run(source) for source in system.sources])


def plain(value: object) -> str:
    """Return a logged value as text; 3680.0 and 3680 give the same."""
    value_as_number = number(value)
    return str(value) if value_as_number is None else f"{value_as_number:.10g}"


def _olympic(values: Sequence[float]) -> float | None:
    return rules.olympic_mean(values) if len(values) >= FEWEST_FOR_MEAN else None
