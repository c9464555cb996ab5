"""Commands that compare runs: ``mlbert submission diff`` and ``mlbert submission repeat``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlbert.cli.launch import local_command
from mlbert.config.sections import settings_by_env
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.files import writing
from mlbert.host.provenance import TENSORFLOW2, tree_root
from mlbert.host.repository import repository
from mlbert.mlperf import compare, repeat, significance
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.result_set import seconds_to_train
from mlbert.mlperf.rules import UNVERIFIED
from mlbert.programs.console import new_table, safe, short_duration, standard_output

_LARGEST_SEED = 2**31 - 1
_EXIT_TIMEOUT_SECONDS = 30.0  # for an interrupted child, before it is killed
_TORCH = "from mlbert.cli.main import main; main()"
_TENSORFLOW = "from tf2_bert.main import main; main()"
_NAME_WIDTH = 30  # columns
_MOST_FILES = 20  # shown
_CODE_HOME = "benchmarks/bert/implementations/"
_METHOD = (
    "B/A: median of the ratios of all pairs of runs (Hodges-Lehmann), its 95 % interval, "
    "and Mann and Whitney's p. "
    "Runs that did not reach the target count for speed only."
)


def repeat_command(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A result_<i>.txt of this code.")],
    out: Annotated[
        Path | None, typer.Option(help="New folder for the run; without it the run is deleted.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Data folder; default: the one in env.sh.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="A new seed; default: the log's.", min=0, max=_LARGEST_SEED)
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run the code at the log's commit.")
    ] = False,
) -> None:
    """Repeat the training in a log; exit with 1 if the results disagree,
    2 if it cannot be repeated.
    """
    root = repository()
    if root is None:
        reason = "has no repository around it, which has the configs and model shapes of logs"
        remedy = "Clone the repository, and run: pip install -e ."
        raise UserError("file.missing", "the installed package", reason, remedy)
    old = repeat.read_repeatable(log)
    siblings = compare.alike(old)
    number = int(old.value("seed")) if seed is None else seed
    if number != old.value("seed") and len(siblings) < significance.FEWEST_RUNS:
        reason = (
            f"only {len(siblings)} runs of these settings are next to the log, "
            "too few to know how much runs vary"
        )
        raise UserError("config.conflict", "--seed", reason, "Leave it out")
    console = standard_output()
    with repeat.code_of(old, root, exact) as (code, note), _folder(out) as folder:
        plan = repeat.make_plan(old, folder, data, number, code)
        if note:
            console.print(safe(note))
        console.print(
            f"training with seed {number} on {plan.ranks} ranks; its output goes to standard error"
        )
        console.print(f"The log's run took {short_duration(seconds_to_train(old) or 0)}.")
        new = _train(plan, code, folder)
        rows = repeat.judge(old, new, siblings)
        notes = repeat.remarks(old, new, number == old.value("seed"))
        if others := repeat.other_settings(old, new):
            notes.append(f"Settings that differ from the log: {'; '.join(others)}.")
    _print_repeat(console, rows, [*notes, _repeat_verdict(rows, len(siblings)), UNVERIFIED])
    if not all(row.agrees for row in rows):
        raise typer.Exit(1)


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Yield the run's LOGDIR: ``out`` (removed again if the run fails), or a temporary folder."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="mlbert-repeat-") as temporary:
            yield Path(temporary)
        return
    if out.exists():
        raise UserError("file.exists", out, "already exists", "Name a new folder with --out")
    with writing(out, "Name another folder with --out"):
        out.mkdir(parents=True)
    try:
        yield out.resolve()
    except (KeyboardInterrupt, UserError):
        shutil.rmtree(out, ignore_errors=True)
        raise


def _train(plan: repeat.RepeatPlan, code: Path, folder: Path) -> Log:
    """Run the training and return its log. Raises UserError if it did not finish."""
    homes = [str(code / repeat.IMPLEMENTATIONS / name) for name in ("pytorch", "tensorflow2")]
    exports = {
        name: value for name, value in environment().items() if name not in settings_by_env()
    }
    exports["PYTHONPATH"] = os.pathsep.join([*homes, *filter(None, [exports.get("PYTHONPATH")])])
    process = subprocess.Popen(
        _command(plan), env={**exports, **plan.exports}, cwd=folder, stdout=sys.stderr
    )
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if status < 0 or status >= 128:
        reason = f"was killed by a signal (status {status})"
        raise UserError("program.failed", "the repeated run", reason, "Start it again")
    log = folder / "result_0.txt"
    new = read_log(log) if log.is_file() else None
    if new is None or new.status is None:
        reason = f"did not finish (status {status})"
        raise UserError("program.failed", "the repeated run", reason, "See its output above")
    stop = new.first("run_stop")
    if stop is not None and (
        early := (stop.metadata or {}).get("reason")
    ):  # a run that stops at a limit gives none
        raise UserError(
            "program.failed", "the repeated run", f"stopped early ({early})", "See its output above"
        )
    return new


def _command(plan: repeat.RepeatPlan) -> list[str]:
    if plan.recipe == TENSORFLOW2:
        return [sys.executable, "-c", _TENSORFLOW, f"--num_gpus={plan.ranks}"]
    train = [sys.executable, "-c", _TORCH, "train"]
    if plan.ranks == 1:
        return train
    return [*local_command(plan.ranks, None, 0, "", None), "--no-python", *train]


def _repeat_verdict(rows: Sequence[repeat.Row], num_siblings: int) -> str:
    bad = sum(not row.agrees for row in rows)
    if num_siblings < significance.FEWEST_RUNS:
        basis = "Too few runs next to the log to know their spread: numbers had to be equal"
    else:
        basis = f"Judged by the spread of the {num_siblings} runs of these settings next to the log"
    return (
        f"{basis}. "
        f"{f'{bad} of {len(rows)} rows do NOT agree.' if bad else 'The repeated run agrees.'}"
    )


def _print_repeat(console: Console, rows: Sequence[repeat.Row], lines: Sequence[str]) -> None:
    table = new_table("log and repeated run", ("", "log", "repeated", "allowed", "agrees"))
    for row in rows:
        agrees = "[green]yes[/]" if row.agrees else "[bold red]NO[/]"
        table.add_row(*map(safe, (row.name, row.log, row.repeated, row.allowed)), agrees)
    console.print(table)
    for line in lines:
        console.print(safe(line))


def diff_command(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="results/<system>, a LOGDIR or one log, from any submitter."
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two sets of runs: settings, code, system;
    speed, samples and time to target, with significance.
    """
    side_a = compare.read_side(a)
    side_b = compare.read_side(b)
    found = compare.compare_sides(side_a, side_b, tree_root())
    if as_json:
        typer.echo(json.dumps({"a": str(a), "b": str(b), **asdict(found)}, indent=2))
        return
    _print(standard_output(), (side_a, side_b), found)


def _print(
    console: Console,
    sides: tuple[compare.ComparedSide, compare.ComparedSide],
    found: compare.Comparison,
) -> None:
    for letter, side, good, runs in zip("AB", sides, found.successes, found.runs, strict=True):
        console.print(f"{letter}: {safe(side.name)}, {runs} runs, {good} reached the target")
    for title, rows in (
        ("settings", found.settings),
        ("code", found.code),
        ("system", found.system),
    ):
        if rows:
            console.print(_differences(title, rows))
        else:
            console.print(f"{title}: no recorded difference")
    _print_files(console, found)
    console.print(_measures(found.measures))
    means = found.olympic_minutes
    if None not in means:
        ratio = f", B/A {means[1] / means[0]:.4g}" if means[0] and means[1] else ""
        console.print(
            f"olympic means of the time to train: A {means[0]:.4g}, B {means[1]:.4g} minutes{ratio}"
        )
    for measure in found.measures:
        console.print(_verdict(measure))
    for note in (*found.notes, _METHOD, UNVERIFIED):
        console.print(safe(note))


def _differences(title: str, rows: Sequence[compare.Difference]) -> Table:
    """Return a table with one line per side, so that long values have room."""
    table = new_table(title, ())
    table.show_header = False
    table.add_column(max_width=_NAME_WIDTH, overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(safe(row.name), "A", _with_origin(row.a, row.origin_a))
        table.add_row("", "B", _with_origin(row.b, row.origin_b))
    return table


def _with_origin(value: str, origin: str) -> str:
    place = origin.rpartition("/")[2]
    return safe(value) + (f" [dim]({safe(place)})[/]" if place else "")


def _print_files(console: Console, found: compare.Comparison) -> None:
    if found.history:
        console.print(safe(found.history))
    for name in found.files[:_MOST_FILES]:
        console.print(f"  {safe(name.removeprefix(_CODE_HOME))}")
    if len(found.files) > _MOST_FILES:
        console.print(f"  and {len(found.files) - _MOST_FILES} more")


def _measures(measures: Sequence[compare.Measure]) -> Table:
    table = new_table("runs, median (count)", ("",), ("A", "B", "B/A", "95 % interval", "p"))
    for measure in measures:
        table.add_row(
            f"{measure.name}, {measure.unit}",
            _median(measure.a),
            _median(measure.b),
            *_ratio(measure.ratio),
        )
    return table


def _median(values: Sequence[float]) -> str:
    return f"{_number(statistics.median(values))} ({len(values)})" if values else "-"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ratio(ratio: significance.Ratio | None) -> tuple[str, str, str]:
    if ratio is None:
        return "-", "-", "-"
    interval = "-" if ratio.low is None else f"{ratio.low:.4g}–{ratio.high:.4g}"
    p = "-" if ratio.p is None else f"{ratio.p:.2g}"
    return f"{ratio.value:.4g}", interval, p


def _verdict(measure: compare.Measure) -> str:
    """Return the conclusion of one row in words."""
    ratio = measure.ratio
    if ratio is None:
        return f"{measure.name}: not measured on both sides"
    if ratio.p is None or ratio.low is None:
        return f"{measure.name}: too few runs to detect a difference"
    if not ratio.is_significant:
        return f"{measure.name}: no significant difference at {significance.LEVEL:.0%}".replace(
            "%", " %"
        )
    change = abs(ratio.value - 1)
    return f"{measure.name}: B is {change:.1%} {'higher' if ratio.value > 1 else 'lower'}".replace(
        "%", " %"
    )
