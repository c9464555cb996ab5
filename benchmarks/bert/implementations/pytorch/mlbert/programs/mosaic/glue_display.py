"""What a person sees of the GLUE jobs while they run, and of their scores: tables, plain lines, a figure, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mlbert.data.formats.glue import TASKS, score
from mlbert.programs.glue_jobs import Job, aggregate
from mlbert.programs.mosaic.glue_runner import Runner, State

SCORES, FIGURE = "glue_scores.json", "glue_scores.png"
_TAIL_BYTES = 4096
Metrics = Mapping[Job, Mapping[str, float]]


class Display:
    """A live table on a terminal, elsewhere a line whenever something happens."""

    def __init__(self, console: Console, folder: Callable[[Job], Path], metrics: Metrics) -> None:
        self._console, self._folder, self._metrics = console, folder, metrics
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        self.runner: Runner | None = None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, job: Job | None) -> None:
        """Something has become of a job; None: time passes."""
        assert self.runner is not None
        if self._live is not None:
            self._live.update(self._table(self.runner))
        elif job is not None:
            self._console.print(self._line(self.runner, job), markup=False, highlight=False, soft_wrap=True)

    def _line(self, runner: Runner, job: Job) -> str:
        state = runner.states[job]
        done = sum(state in (State.DONE, State.FAILED, State.BLOCKED) for state in runner.states.values())
        place = next((f" on {one.slot.name}" for one in runner.running if one.job == job), "")
        time = f" after {runner.seconds[job]:.0f} s" if job in runner.seconds else ""
        told = f": {self._result(runner, job)}" if state in (State.DONE, State.FAILED) else ""
        return f"[{done}/{len(runner.states)}] {job.task} seed {job.seed} {state.value}{place}{time}{told}"

    def _result(self, runner: Runner, job: Job) -> str:
        if runner.states[job] is State.FAILED:
            return runner.last_line(job)
        values = self._metrics.get(job, {})
        return ", ".join(f"{name} {values[name]:.4f}" for name in TASKS[job.task].metrics if name in values)

    def _table(self, runner: Runner) -> Table:
        table = Table(title="GLUE fine-tuning")
        for column in ("task", "seed", "state", "where", "step", "result"):
            table.add_column(column, no_wrap=column != "result")
        places = {one.job: one.slot.name for one in runner.running}
        for job, state in runner.states.items():
            step = progress(self._folder(job)) if state is State.RUNNING else ""
            result = self._result(runner, job) if state in (State.DONE, State.FAILED) else ""
            table.add_row(job.task, str(job.seed), state.value, places.get(job, ""), step, result)
        return table


def progress(folder: Path) -> str:
    """How far a running job is, from its run folder."""
    try:
        steps = json.loads((folder / "run_0" / "config.json").read_text(encoding="utf-8"))["config"]["max_steps"]
        with (folder / "run_0" / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            last = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.endswith("}")][-1]
        return f"{json.loads(last)['step']}/{steps}"
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return "starting"


def scores_table(metrics: Metrics) -> Table:
    """Each task's score and metrics over its seeds, and GLUE's."""
    table = Table(title="GLUE, development sets")
    for column in ("task", "seeds", "metrics, mean over seeds", "score"):
        table.add_column(column, justify="right" if column == "score" else "left")
    scores = aggregate(metrics)
    for task in (task for task in TASKS if task in scores):
        of_task = [values for job, values in metrics.items() if job.task == task]
        means = {name: sum(values[name] for values in of_task) / len(of_task) for name in TASKS[task].metrics}
        told = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        table.add_row(task, str(len(of_task)), told, f"{scores[task]:.2f}")
    if scores:
        table.add_row("glue", "", f"mean of {len(scores) - 1} tasks", f"{scores['glue']:.2f}", style="bold")
    return table


def write_scores(folder: Path, metrics: Metrics, missing: list[Job]) -> None:
    """``glue_scores.json`` and ``glue_scores.png``; "glue" is null while jobs are missing."""
    scores = aggregate(metrics)
    jobs = [
        {"task": job.task, "seed": job.seed, "score": score(job.task, values), "metrics": dict(values)}
        for job, values in metrics.items()
    ]
    lacking = [{"task": job.task, "seed": job.seed} for job in missing]
    tasks = {task: value for task, value in scores.items() if task != "glue"}
    content = {"glue": None if missing else scores.get("glue"), "tasks": tasks, "jobs": jobs, "missing": lacking}
    (folder / SCORES).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _draw(folder / FIGURE, metrics, scores)


def _draw(path: Path, metrics: Metrics, scores: Mapping[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = list(scores)
    bars = axes.bar(names, [scores[name] for name in names], color=["tab:blue"] * (len(names) - 1) + ["tab:orange"])
    axes.bar_label(bars, fmt="%.1f")
    for job, values in metrics.items():
        axes.plot([job.task], [score(job.task, values)], "k.", markersize=4)
    axes.set(ylabel="score", ylim=(min(0.0, axes.get_ylim()[0]), 105), title="GLUE, development sets; dots are seeds")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
