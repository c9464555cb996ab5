"""Run GLUE fine-tuning jobs in parallel processes, show their progress, and write the scores."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from mlbert.data.formats.glue_tasks import TASKS, score
from mlbert.data.prepare.executor import sigterm_raises
from mlbert.data.prepare.worker_pool import end_with_parent
from mlbert.host.errors import replace_names
from mlbert.host.progress import Progress
from mlbert.programs.glue_published import SOURCE, searched_trials
from mlbert.programs.glue_trials import PublishedScores, Trial

DEFAULT_SEED = 19
# MosaicML's published seeds: small tasks vary more and get more runs.
# The other tasks use DEFAULT_SEED.
MOST_SEEDS = (19, 8364, 717, 10536, 90166)
SEEDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("rte", "mrpc", "stsb"), MOST_SEEDS),
    "sst2": MOST_SEEDS[:3],
    "cola": MOST_SEEDS[:4],
}
FIRST = "mnli"  # its first job's weights start the second round
POLL_SECONDS = 0.2  # between looks at the children
END_SECONDS = 20.0  # for a child to exit after SIGTERM
LOG = "output.log"  # of a job
SCORES = "glue_scores.json"
FIGURE = "glue_scores.png"
_TAIL_BYTES = 4096  # at the end of a log, searched for the error


@dataclass(frozen=True)
class GlueJob:
    """One task with one seed.

    Attributes:
        waits: start from the weights of `FIRST`.
        trial: hyper-parameters of a search; None: those of the task.
    """

    task: str
    seed: int
    waits: bool
    trial: Trial | None = None

    @property
    def label(self) -> str:
        """What the job is called in messages."""
        trial = f" {self.trial.name}" if self.trial else ""
        return f"{self.task}{trial} seed {self.seed}"

    def name(self, base: str) -> str:
        """Return the run name of the job."""
        trial = f"_{self.trial.name}" if self.trial else ""
        return f"{base}_task={self.task}{trial}_seed={self.seed}"

    def folder(self, base: Path) -> Path:
        """Return the job's folder."""
        of_task = base / f"task={self.task}"
        if self.trial is not None:
            of_task /= self.trial.name
        return of_task / f"seed={self.seed}"


Metrics = Mapping[GlueJob, Mapping[str, float]]


def job_list(seeds: Mapping[str, Sequence[int]], is_search: bool = False) -> list[GlueJob]:
    """Return the jobs of these tasks and seeds: `FIRST`, then the rest of the first round,
    then those that wait.

    Without `FIRST` no job waits: all start from the pre-trained weights. With ``is_search`` there
    is a job for each trial of `searched_trials`.
    """
    has_first = bool(seeds.get(FIRST))
    jobs = []
    for task in seeds:
        waits = has_first and TASKS[task].after_mnli
        trials: Sequence[Trial | None] = searched_trials(task) if is_search else [None]
        jobs += [GlueJob(task, seed, waits, trial) for trial in trials for seed in seeds[task]]
    return sorted(jobs, key=lambda job: (TASKS[job.task].after_mnli, job.task != FIRST))


def best_trials(results: Metrics) -> Metrics:
    """Return the results of each task's best trial: that of the highest mean score over its seeds,
    of several the first in the grid, whichever ended first.

    Without a search that is all of them.
    """
    scores: dict[str, dict[Trial | None, list[float]]] = {}
    for job, metrics in results.items():
        of_task = scores.setdefault(job.task, {})
        of_task.setdefault(job.trial, []).append(score(job.task, metrics))
    best = {}
    for task, trials in scores.items():
        means = {trial: sum(values) / len(values) for trial, values in trials.items()}
        in_grid = sorted(means, key=lambda trial: () if trial is None else astuple(trial))
        best[task] = max(in_grid, key=means.__getitem__)  # the first of equals
    return {job: metrics for job, metrics in results.items() if job.trial == best[job.task]}


def aggregate(results: Metrics) -> dict[str, float]:
    """Return each task's score times 100 (mean over metrics and seeds), and "glue",
    the mean over tasks.
    """
    found: dict[str, list[float]] = {}
    for job, metrics in results.items():
        found.setdefault(job.task, []).append(score(job.task, metrics))
    scores = {task: sum(values) / len(values) for task, values in found.items()}
    return {**scores, "glue": sum(scores.values()) / len(scores)} if scores else {}


class State(Enum):
    """State of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    BLOCKED = "not started"

    @property
    def is_final(self) -> bool:
        """Whether the job will not run any more."""
        return self not in (State.WAITING, State.RUNNING)


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time: the environment of its process and the cores it may use."""

    name: str
    exports: Mapping[str, str]
    cores: frozenset[int]


@dataclass
class Running:
    """A job's process."""

    job: GlueJob
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float


def make_slots(num_gpus: int, visible: str | None, cores: Sequence[int], most: int) -> list[Slot]:
    """Return one slot per GPU, or per core if there is no GPU.

    Args:
        num_gpus: GPUs visible to this process.
        visible: CUDA_VISIBLE_DEVICES of this process.
        cores: cores of this process, divided among the slots.
        most: maximum number of slots.
    """
    names = (
        [name.strip() for name in visible.split(",")]
        if visible
        else [str(i) for i in range(num_gpus)]
    )
    count = max(1, min(most, num_gpus or len(cores)))
    slots = []
    for index in range(count):
        share = list(cores[index::count]) or list(cores)
        environ = {"OMP_NUM_THREADS": str(len(share)), "TOKENIZERS_PARALLELISM": "false"}
        environ["CUDA_VISIBLE_DEVICES"] = names[index] if num_gpus else ""
        slots.append(
            Slot(f"GPU {names[index]}" if num_gpus else f"CPU {index}", environ, frozenset(share))
        )
    return slots


class Runner:
    """Run jobs as processes.

    Args:
        jobs: in starting order.
        done: jobs that need not run.
        slots: places to run them.
        prepare: called when a job starts; writes its files and returns its command.
        folder: returns a job's folder.
        environ: environment of this process.
        error_names: of a task, what the user writes for the names in a job's errors; see
            `mlbert.host.errors.replace_names`.
    """

    def __init__(
        self,
        jobs: Sequence[GlueJob],
        done: Sequence[GlueJob],
        slots: Sequence[Slot],
        prepare: Callable[[GlueJob], list[str]],
        folder: Callable[[GlueJob], Path],
        environ: Mapping[str, str],
        error_names: Callable[[str], Mapping[str, str]],
    ) -> None:
        self._error_names = error_names
        self.states = {job: State.DONE if job in done else State.WAITING for job in jobs}
        self.seconds: dict[GlueJob, float] = {}
        self.running: list[Running] = []
        self._free = list(slots)
        self._prepare = prepare
        self._folder = folder
        self._environ = environ
        firsts = [job for job in jobs if job.task == FIRST]
        # In a search the best of all trials is only known when all have ended.
        self._gates = [job for job in firsts if job.trial is not None] or firsts[:1]

    def run(self, on_change: Callable[[GlueJob | None], object]) -> None:
        """Return when every job is done, failed or blocked.

        If this ends early, the processes are ended.

        ``on_change`` is called with a job when its state changes, and with None at every poll.
        """
        self._on_change = on_change
        with sigterm_raises():
            try:
                while self._step():
                    time.sleep(POLL_SECONDS)
            finally:
                self._end_all()

    def last_line(self, job: GlueJob) -> str:
        """Return the last line of the job's log, usually the error."""
        try:
            text = (self._folder(job) / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "no log"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return replace_names(lines[-1], self._error_names(job.task)) if lines else "an empty log"

    def _step(self) -> bool:
        """Collect finished jobs and start possible ones; return False when nothing is left."""
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            self._free.append(one.slot)
            self.seconds[one.job] = time.monotonic() - one.started
            self._set(one.job, State.FAILED if one.process.returncode else State.DONE)
        for job in [job for job, state in self.states.items() if state is State.WAITING]:
            gate = self._gate() if job.waits else State.DONE
            if gate is State.FAILED:
                self._set(job, State.BLOCKED)
            elif self._free and gate is State.DONE:
                self._begin(job)
        self._on_change(None)
        return bool(self.running) or State.WAITING in self.states.values()

    def _gate(self) -> State:
        """Return the state of what waiting jobs need: done if any of several has succeeded."""
        states = [self.states[job] for job in self._gates]
        if not all(state.is_final for state in states):
            return State.WAITING
        return State.DONE if State.DONE in states else State.FAILED

    def _begin(self, job: GlueJob) -> None:
        slot = self._free.pop(0)
        command = self._prepare(job)
        folder = self._folder(job)
        with (folder / LOG).open("wb") as log:
            # A separate session: Ctrl-C in the terminal reaches only this process,
            # which ends its children in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environ, **slot.exports},
                start_new_session=True,
                # If this process is killed, or ended before it knows the child,
                # the kernel ends the child.
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )
        self.running.append(Running(job, slot, process, time.monotonic()))
        with contextlib.suppress(OSError):  # the process has already ended
            os.sched_setaffinity(process.pid, slot.cores)
        self._set(job, State.RUNNING)

    def _set(self, job: GlueJob, state: State) -> None:
        self.states[job] = state
        self._on_change(job)

    def _end_all(self) -> None:
        for one in self.running:
            _signal(one.process, signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        for one in self.running:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(one.process, signal.SIGKILL)
                one.process.wait()


def _signal(process: subprocess.Popen[Any], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class GlueProgress:
    """Print a line for each change of a job, and how much of the training of all jobs is done.

    Args:
        progress: where to print.
        samples: training samples of each unfinished job.
        folder: returns a job's folder.
        metrics: of finished jobs.

    Attributes:
        total: samples of all jobs that no earlier, interrupted program trained on.
    """

    def __init__(
        self,
        progress: Progress,
        samples: Mapping[GlueJob, int],
        folder: Callable[[GlueJob], Path],
        metrics: Metrics,
    ) -> None:
        self._print = progress
        self._samples = samples
        self._folder = folder
        self._metrics = metrics
        self._counted = {
            job: min(count, samples_done(folder(job))) for job, count in samples.items()
        }
        self.total = sum(samples.values()) - sum(self._counted.values())

    def show(self, runner: Runner, job: GlueJob | None, advance: Callable[[int], object]) -> None:
        """Print a job's new state, and call ``advance`` with the samples since the last call."""
        if job is not None:
            self._print(self._line(runner, job))
        done = {one.job: samples_done(self._folder(one.job)) for one in runner.running}
        for one, count in self._samples.items():
            now = count if runner.states[one].is_final else min(count, done.get(one, 0))
            if now > self._counted[one]:
                advance(now - self._counted[one])
                self._counted[one] = now

    def _line(self, runner: Runner, job: GlueJob) -> str:
        state = runner.states[job]
        ended = sum(state.is_final for state in runner.states.values())
        place = next((f" on {one.slot.name}" for one in runner.running if one.job == job), "")
        seconds = f" after {runner.seconds[job]:.0f} s" if job in runner.seconds else ""
        result = f": {self._result(runner, job)}" if state in (State.DONE, State.FAILED) else ""
        return f"[{ended}/{len(runner.states)}] {job.label} {state.value}{place}{seconds}{result}"

    def _result(self, runner: Runner, job: GlueJob) -> str:
        if runner.states[job] is State.FAILED:
            return runner.last_line(job)
        values = self._metrics.get(job, {})
        return ", ".join(
            f"{name} {values[name]:.4f}" for name in TASKS[job.task].metrics if name in values
        )


def samples_done(folder: Path) -> int:
    """Return the samples that a job has trained on, from its run's metrics."""
    try:
        with (folder / "run_0" / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            last = [
                line
                for line in file.read().decode("utf-8", "replace").splitlines()
                if line.endswith("}")
            ][-1]
        return int(json.loads(last)["samples"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError):
        return 0


def scores_table(metrics: Metrics, published: Sequence[PublishedScores] = ()) -> Table:
    """Return a table of each task's score and metrics over its seeds, and the GLUE score, next to
    published scores.

    ``metrics`` are those of one trial of each task.
    """
    table = Table(title="GLUE, development sets")
    for column in ("task", "seeds", "metrics, mean over seeds"):
        table.add_column(column)
    for column in ("score", *(one.model for one in published)):
        table.add_column(column, justify="right")
    if published:
        table.caption = f"Published scores: {SOURCE}; ModernBERT's are the best of a search"
    scores = aggregate(metrics)
    is_complete = len(scores) == len(TASKS) + 1
    for task in (task for task in TASKS if task in scores):
        of_task = [values for job, values in metrics.items() if job.task == task]
        means = {
            name: sum(values[name] for values in of_task) / len(of_task)
            for name in TASKS[task].metrics
        }
        text = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        theirs = [f"{one.scores[task]:.1f}" for one in published]
        table.add_row(task, str(len(of_task)), text, f"{scores[task]:.2f}", *theirs)
    if scores:
        # A mean of fewer tasks is not comparable.
        theirs = [f"{one.mean:.1f}" if is_complete else "" for one in published]
        what = f"mean of {len(scores) - 1} tasks"
        table.add_row("glue", "", what, f"{scores['glue']:.2f}", *theirs, style="bold")
    return table


def write_scores(
    folder: Path,
    results: Metrics,
    missing: list[GlueJob],
    published: Sequence[PublishedScores] = (),
) -> None:
    """Write ``glue_scores.json`` and ``glue_scores.png``; "glue" is null while jobs are missing.

    Of a search, the scores are those of each task's best trial, which is named under "best".
    """
    metrics = best_trials(results)
    scores = aggregate(metrics)
    jobs = [
        _facts(job) | {"score": score(job.task, values), "metrics": dict(values)}
        for job, values in results.items()
    ]
    lacking = [_facts(job) for job in missing]
    tasks = {task: value for task, value in scores.items() if task != "glue"}
    content: dict[str, Any] = {
        "glue": None if missing else scores.get("glue"),
        "tasks": tasks,
        "jobs": jobs,
        "missing": lacking,
    }
    if best := {job.task: asdict(job.trial) for job in metrics if job.trial is not None}:
        content["best"] = best
    if published:
        theirs = {one.model: dict(one.scores) for one in published}
        content["published"] = {"source": SOURCE, "models": theirs}
    (folder / SCORES).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _draw(folder / FIGURE, metrics, scores)


def _facts(job: GlueJob) -> dict[str, Any]:
    facts: dict[str, Any] = {"task": job.task, "seed": job.seed}
    return facts if job.trial is None else facts | asdict(job.trial)


def _draw(path: Path, metrics: Metrics, scores: Mapping[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = list(scores)
    bars = axes.bar(
        names,
        [scores[name] for name in names],
        color=["tab:blue"] * (len(names) - 1) + ["tab:orange"],
    )
    axes.bar_label(bars, fmt="%.1f")
    for job, values in metrics.items():
        axes.plot([job.task], [score(job.task, values)], "k.", markersize=4)
    axes.set(
        ylabel="score",
        ylim=(min(0.0, axes.get_ylim()[0]), 105),
        title="GLUE, development sets; dots are seeds",
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
