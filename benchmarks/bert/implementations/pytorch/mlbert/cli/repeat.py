"""``mlbert submission repeat``: a log's training once more, and whether it agrees."""

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

from mlbert.cli.launch import local_command
from mlbert.config.sections import settings_by_env
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.provenance import TENSORFLOW2, tree_root
from mlbert.mlperf.agreement import Row, judge, remarks
from mlbert.mlperf.compare import alike
from mlbert.mlperf.logs import Log, read_log
from mlbert.mlperf.repeat import IMPLEMENTATIONS, Plan, code_of, make_plan, other_settings, read_repeatable
from mlbert.mlperf.rules import UNVERIFIED
from mlbert.mlperf.significance import FEWEST_RUNS
from mlbert.programs.output import new_table, safe, standard_output

_SAME = "same"
_LARGEST_SEED = 2**31 - 1
_LEAVES_IN_SECONDS = 30.0  # a child that was interrupted, before it is killed
_TORCH = "from mlbert.cli.main import main; main()"
_TENSORFLOW = "from tf2_bert.main import main; main()"


def repeat_command(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A result_<i>.txt of this code.")],
    out: Annotated[Path | None, typer.Option(help="New folder to keep the run in; none is kept without.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets; else where env.sh says.")] = None,
    seed: Annotated[str, typer.Option(help="Another seed, or same.", metavar="N")] = _SAME,
    exact: Annotated[bool, typer.Option("--exact", help="Run the code of the log's commit.")] = False,
) -> None:
    """Train once more by the configuration in a log; exit with 1 where the result does not agree, 2 where it cannot."""
    old = read_repeatable(log)
    siblings = alike(old)
    number = _seed(seed, old)
    if number != old.value("seed") and len(siblings) < FEWEST_RUNS:
        reason = f"with {len(siblings)} runs of these settings beside the log nothing tells how far runs are apart"
        raise UserError("config.conflict", "--seed", reason, "Leave it out")
    console = standard_output()
    with code_of(old, tree_root(), exact) as (code, note), _folder(out) as folder:
        plan = make_plan(old, folder, data, number, code)
        if note:
            console.print(safe(note))
        console.print(f"training with seed {number} on {plan.ranks} ranks; its words go to standard error")
        new = _train(plan, code, folder)
        rows = judge(old, new, siblings)
        told = remarks(old, new, number == old.value("seed"))
        if others := other_settings(old, new):
            told.append(f"Settings that are not the log's: {'; '.join(others)}.")
    _print(console, rows, [*told, _verdict(rows, len(siblings)), UNVERIFIED])
    if not all(row.agrees for row in rows):
        raise typer.Exit(1)


def _seed(word: str, log: Log) -> int:
    if word == _SAME:
        return int(log.value("seed"))
    if not word.isdecimal() or int(word) > _LARGEST_SEED:
        raise UserError(
            "config.value", "--seed", f"{word!r} is neither {_SAME} nor a number from 0 to {_LARGEST_SEED}", "Give one"
        )
    return int(word)


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The run's LOGDIR: ``out``, gone again when the run does not end, or a temporary one."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="mlbert-repeat-") as temporary:
            yield Path(temporary)
        return
    if out.exists():
        raise UserError("file.exists", out, "is there already", "Name a new folder with --out")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            "file.unwritable", out, f"cannot be made ({error.strerror})", "Name another folder with --out"
        ) from None
    try:
        yield out.resolve()
    except (KeyboardInterrupt, UserError):
        shutil.rmtree(out, ignore_errors=True)
        raise


def _train(plan: Plan, code: Path, folder: Path) -> Log:
    """Runs the training and reads its log. Raises UserError: it did not end."""
    homes = [str(code / IMPLEMENTATIONS / name) for name in ("pytorch", "tensorflow2")]
    exports = {name: value for name, value in environment().items() if name not in settings_by_env()}
    exports["PYTHONPATH"] = os.pathsep.join([*homes, *filter(None, [exports.get("PYTHONPATH")])])
    process = subprocess.Popen(_command(plan), env={**exports, **plan.exports}, cwd=folder, stdout=sys.stderr)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_LEAVES_IN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if status < 0 or status >= 128:
        raise UserError(
            "program.failed", "the repeated run", f"was ended by a signal (status {status})", "Start it again"
        )
    log = folder / "result_0.txt"
    new = read_log(log) if log.is_file() else None
    if new is None or new.status is None:
        raise UserError(
            "program.failed", "the repeated run", f"did not end (status {status})", "Its words above tell why"
        )
    stop = new.first("run_stop")
    if stop is not None and (reason := (stop.metadata or {}).get("reason")):  # not a limit, which gives none
        raise UserError("program.failed", "the repeated run", f"broke off ({reason})", "Its words above tell why")
    return new


def _command(plan: Plan) -> list[str]:
    if plan.recipe == TENSORFLOW2:
        return [sys.executable, "-c", _TENSORFLOW]
    train = [sys.executable, "-c", _TORCH, "train"]
    if plan.ranks == 1:
        return train
    return [*local_command(plan.ranks, None, 0, "", None), "--no-python", *train]


def _verdict(rows: Sequence[Row], num_siblings: int) -> str:
    bad = sum(not row.agrees for row in rows)
    if num_siblings < FEWEST_RUNS:
        basis = "Too few runs lie beside the log to tell their spread: numbers had to be equal"
    else:
        basis = f"Judged by the spread of the {num_siblings} runs of these settings beside the log"
    return f"{basis}. {f'{bad} of {len(rows)} rows do NOT agree.' if bad else 'The repeated run agrees.'}"


def _print(console: Console, rows: Sequence[Row], lines: Sequence[str]) -> None:
    table = new_table("log and repeated run", ("", "log", "repeated", "allowed", "agrees"))
    for row in rows:
        agrees = "[green]yes[/]" if row.agrees else "[bold red]NO[/]"
        table.add_row(*map(safe, (row.name, row.log, row.repeated, row.allowed)), agrees)
    console.print(table)
    for line in lines:
        console.print(safe(line))
