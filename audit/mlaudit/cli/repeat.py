"""``mlaudit repeat``: repeat the training run of a log, and judge whether the new run agrees."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mlaudit import compare, significance
from mlaudit import repeat as repetition
from mlaudit.logs import Log, read_log
from mlaudit.result_set import seconds_to_train
from mlaudit.rules import UNVERIFIED
from mlaudit.settings import settings_by_env
from mlaudit.training_program import MLBERT
from mlbert.host.console import new_table, safe, short_duration, standard_output
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.files import writing
from mlbert.host.provenance import TENSORFLOW2
from mlbert.host.repository import repository

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_LARGEST_SEED = 2**31 - 1
_EXIT_TIMEOUT_SECONDS = 30.0  # for an interrupted child, before it is killed
_TORCH = "from mlbert.cli.main import main; main()"
_TENSORFLOW = "from tf2_bert.main import main; main()"


@app.command()
def repeat(
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

    \b
    Examples:
      mlbert submission repeat runs/quickstart/result_0.txt --out repeated
    """
    root = repository()
    if root is None:
        reason = "has no repository around it, which has the configs and model shapes of logs"
        remedy = "Clone the repository, and run: pip install -e '.[train]'"
        raise UserError("file.missing", "the installed package", reason, remedy)
    old = repetition.read_repeatable(log)
    siblings = compare.alike(old)
    number = int(old.value("seed")) if seed is None else seed
    if number != old.value("seed") and len(siblings) < significance.FEWEST_RUNS:
        reason = (
            f"only {len(siblings)} runs of these settings are next to the log, "
            "too few to know how much runs vary"
        )
        raise UserError("config.conflict", "--seed", reason, "Leave it out")
    console = standard_output()
    with repetition.code_of(old, root, exact) as (code, note), _folder(out) as folder:
        plan = repetition.make_plan(old, folder, data, number, code)
        if note:
            console.print(safe(note))
        console.print(
            f"training with seed {number} on {plan.ranks} ranks; its output goes to standard error"
        )
        console.print(f"The log's run took {short_duration(seconds_to_train(old) or 0)}.")
        new = _train(plan, code, folder)
        rows = repetition.judge(old, new, siblings)
        notes = repetition.remarks(old, new, number == old.value("seed"))
        if others := repetition.other_settings(old, new):
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


def _train(plan: repetition.RepeatPlan, code: Path, folder: Path) -> Log:
    """Run the training and return its log. Raises UserError if it did not finish."""
    homes = [str(code / repetition.IMPLEMENTATIONS / name) for name in ("pytorch", "tensorflow2")]
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


def _command(plan: repetition.RepeatPlan) -> list[str]:
    if plan.recipe == TENSORFLOW2:
        return [sys.executable, "-c", _TENSORFLOW, f"--num_gpus={plan.ranks}"]
    train = [sys.executable, "-c", _TORCH, "train"]
    if plan.ranks == 1:
        return train
    launch = [*MLBERT, "launch", "ranks", "--nproc-per-node", str(plan.ranks)]
    return [*launch, "--standalone", "--no-python", *train]


def _repeat_verdict(rows: Sequence[repetition.Row], num_siblings: int) -> str:
    bad = sum(not row.agrees for row in rows)
    if num_siblings < significance.FEWEST_RUNS:
        basis = "Too few runs next to the log to know their spread: numbers had to be equal"
    else:
        basis = f"Judged by the spread of the {num_siblings} runs of these settings next to the log"
    return (
        f"{basis}. "
        f"{f'{bad} of {len(rows)} rows do NOT agree.' if bad else 'The repeated run agrees.'}"
    )


def _print_repeat(console: Console, rows: Sequence[repetition.Row], lines: Sequence[str]) -> None:
    table = new_table("log and repeated run", ("", "log", "repeated", "allowed", "agrees"))
    for row in rows:
        agrees = "[green]yes[/]" if row.agrees else "[bold red]NO[/]"
        table.add_row(*map(safe, (row.name, row.log, row.repeated, row.allowed)), agrees)
    console.print(table)
    for line in lines:
        console.print(safe(line))
