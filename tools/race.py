"""Race our masked-LM pre-training against an expert's loop with `transformers`, on the same text for the same time.

    python tools/race.py SIDE [SIDE] [--minutes 20] [--size 2x128] [--seeds 3] [--text FILE] [--work DIR] [--json FILE]
    python tools/race.py mlbert modernbert:4e-3
    python tools/race.py modernbert:1e-3 modernbert:2e-3 --minutes 3 --seeds 1

A side is `mlbert`, with the settings from its rules, or NAME:LEARNING_RATE: `bert` or `modernbert` of `transformers`,
or ours with the optimizer NAME. Both run at the same time, each with one thread on a separate core, so that a noisy
machine slows both. They read the same rows with the same vocabulary and are scored on the same masked tokens. There is
one pair of runs for each seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

import race_sides
from installed_text import write_text
from mlbert.host.errors import UserError
from mlbert.ops.precision import compute_dtype, small_model_precision
from mlbert.programs.pretrain_rules import SEQUENCE_LENGTH, Choice, choose
from race_text import read_race

TEXT_BYTES = 40_000_000
NAMES = {"2x128": "tiny", "4x256": "small", "6x384": "medium"}  # layers x hidden size: name in the rules
OURS = "mlbert"


@dataclass(frozen=True)
class Runner:
    """One run.

    Attributes:
        side: `OURS`, a model of `race_sides.THEIR_MASK_RATES`, or an optimizer of ours in place of the rules' one.
        size: a name of `NAMES`.
        budget: seconds of CPU time.
        seed: seed of weights, order and masks.
        learning_rate: learning rate of the plateau on our side, the highest on theirs.
        core: CPU core to run on.
    """

    side: str
    size: str
    budget: float
    seed: int
    learning_rate: float
    core: int


def make_text(folder: Path) -> Path:
    """Write the English text installed on this machine to ``folder``, once."""
    path = folder / "text.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        digest = write_text(partial, TEXT_BYTES)
        (folder / "text.sha256").write_text(f"{digest}\n", encoding="utf-8")
        partial.rename(path)
    return path


def run(
    text: Path,
    folder: Path,
    size: str,
    minutes: float,
    seeds: Sequence[int],
    sides: Sequence[tuple[str, float | None]],
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run the race and return its records.

    Args:
        text: one sentence per line, a blank line after each document.
        folder: folder for the vocabulary and tokens.
        size: a name of `NAMES`.
        minutes: CPU time of each run.
        seeds: one for each pair of runs.
        sides: one or two names with learning rates; None, of `OURS` only, is the rules' rate.
        tell: called with each record.

    Raises:
        UserError: the text is too small or cannot be read, or a run has failed.
    """
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        tell(record)

    choice = choice_of(text, folder, size, minutes)
    guesses = read_race(text, folder, choice.shape.vocabulary, SEQUENCE_LENGTH).guesses()
    keep({"text": text.name, "bytes": text.stat().st_size, "machine": platform.machine(), "torch": torch.__version__})
    keep({"guesses": guesses, "choice": asdict(choice)})
    cores = sorted(os.sched_getaffinity(0))
    for seed in seeds:
        runners = [
            Runner(side, size, 60.0 * minutes, seed, rate or choice.learning_rate, core)
            for (side, rate), core in zip(sides, (cores[0], cores[-1]), strict=False)
        ]
        # With one core the sides take turns.
        for group in [runners] if len(cores) > 1 else [[runner] for runner in runners]:
            _side_by_side(group, text, folder, keep)
    return records


def choice_of(text: Path, folder: Path, size: str, minutes: float) -> Choice:
    """Return the settings that the rules choose for our side. Raises UserError if the text cannot be read."""
    if not text.is_file():
        raise UserError(
            "file.missing", text, "is no file", "Name a text, a sentence a line and a blank line between documents"
        )
    return choose(text.stat().st_size // 4, 60.0 * minutes, NAMES[size])


def _side_by_side(runners: Sequence[Runner], text: Path, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    context = multiprocessing.get_context("spawn")
    queue: Queue[dict[str, Any] | None] = context.Queue()
    processes = [context.Process(target=_run, args=(runner, text, folder, queue)) for runner in runners]
    for process in processes:
        process.start()
    running = len(processes)
    while running:
        record = queue.get()
        if record is None:
            running -= 1
        else:
            keep(record)
    for process in processes:
        process.join()
        if process.exitcode:
            raise UserError(
                "program.failed",
                "race",
                f"a run ended with exit code {process.exitcode}",
                "See its message above",
            )


def _run(runner: Runner, text: Path, folder: Path, queue: Queue[Any]) -> None:
    """Run one side in a separate process: put each point of its curve into the queue, then None."""
    try:
        os.sched_setaffinity(0, {runner.core})
        torch.set_num_threads(1)
        choice = choice_of(text, folder, runner.size, runner.budget / 60.0)
        rows = read_race(text, folder, choice.shape.vocabulary, SEQUENCE_LENGTH)
        device = torch.device("cpu")
        dtype = compute_dtype(small_model_precision(device), device)
        if runner.side in race_sides.THEIR_MASK_RATES:
            side = race_sides.theirs(rows, runner.side, choice.shape, runner.learning_rate, runner.seed, dtype)
        else:
            if runner.side != OURS:
                choice = replace(choice, optimizer=runner.side, learning_rate=runner.learning_rate)
            side = race_sides.ours(rows, choice, runner.seed, dtype)
        for point in race_sides.race(*side, runner.budget):
            queue.put({**asdict(runner), **point})
    finally:
        queue.put(None)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the curves as text: a row per tenth of the time and a column per run, then the accuracy of guessing."""
    curves: dict[tuple[str, float, int], list[float]] = {}
    for point in (record for record in records if "accuracy" in record):
        curves.setdefault((point["side"], point["learning_rate"], point["seed"]), []).append(point["accuracy"])
    head = ["time", *(f"{side} {rate:.2g} #{seed}" for side, rate, seed in curves)]
    lines = ["  ".join(head)]
    for number in range(race_sides.EVALUATIONS):
        cells = [f"{curve[number]:.3f}" if number < len(curve) else "-" for curve in curves.values()]
        cells.insert(0, f"{(number + 1) / race_sides.EVALUATIONS:.0%}")
        lines.append("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, head, strict=True)))
    guesses = next(record["guesses"] for record in records if "guesses" in record)
    lines.append(
        f"most frequent token {guesses['most_frequent_accuracy']:.3f}, bigram {guesses['bigram_accuracy']:.3f}"
    )
    for side in dict.fromkeys(run[0] for run in curves):
        ends = [curve[-1] for run, curve in curves.items() if run[0] == side]
        lines.append(f"{side} at the end: {min(ends):.3f} to {max(ends):.3f}")
    return "\n".join(lines) + "\n"


def _named_side(text: str) -> tuple[str, float | None]:
    """Read NAME:RATE; only `OURS`, whose rate the rules set, may lack one. Raises ArgumentTypeError or ValueError."""
    name, _, rate = text.partition(":")
    if not rate and name != OURS:
        raise argparse.ArgumentTypeError(f"{name} needs a learning rate: {name}:RATE")
    return name, float(rate) if rate else None


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Pre-train on the same text for the same time, and compare accuracy.")
    parser.add_argument("sides", nargs="+", type=_named_side, metavar="SIDE", help="NAME:RATE or mlbert, one or two")
    parser.add_argument("--minutes", type=float, default=20.0, help="processor time of each run")
    parser.add_argument("--size", choices=NAMES, default="2x128", help="layers x hidden size")
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of runs")
    parser.add_argument("--text", type=Path, help="one sentence per line; default: what packages here carry")
    parser.add_argument("--work", type=Path, default=Path("bench-pretrain"), help="folder for text and tokens")
    parser.add_argument("--json", type=Path, help="write one line of JSON per point there")
    given = parser.parse_args()
    lines: list[str] = []

    def keep(record: dict[str, Any]) -> None:
        lines.append(json.dumps(record))
        if given.json:
            given.json.write_text("\n".join(lines) + "\n", encoding="utf-8")

    if len(given.sides) > 2:
        parser.error("name one or two sides")
    seeds = range(given.seed, given.seed + given.seeds)
    text = given.text or make_text(given.work)
    sys.stdout.write(table(run(text, given.work, given.size, given.minutes, seeds, given.sides, keep)))


if __name__ == "__main__":
    main()
