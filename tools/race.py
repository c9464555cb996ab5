"""Race our masked-LM pre-training against an expert's loop with `transformers`,
on the same text for the same time.

    python tools/race.py SIDE [SIDE] [--minutes 20] [--size 2x128] [--seeds 3] [--text FILE]
                         [--work DIR] [--json FILE]
    python tools/race.py mlbert modernbert:4e-3
    python tools/race.py modernbert:1e-3 modernbert:2e-3 --minutes 3 --seeds 1

A side is one of

* `mlbert`, with the settings from its rules; `local` or `modern`, the same with the local
  attention, or all of the form, of ModernBERT
* NAME:LEARNING_RATE: `bert` or `modernbert` of `transformers`; `small`, a preset of `mlbert
  pretrain` with its own size; or `mlbert` with the optimizer NAME

Both sides run at the same time, each with one thread on a separate core, so that a noisy machine
slows both. They read the same rows with the same vocabulary and are scored on the same masked
tokens. There is one pair of runs for each seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from race_text import EVALUATION, RaceText, read_race

Record = Mapping[str, Any]
Run = tuple[str, str, float, int]  # size, side, learning rate and seed
TEXT_BYTES = 40_000_000
# Layers x hidden size -> name in the rules.
RULE_NAMES = {
    "2x128": "tiny",
    "4x256": "small",
    "6x384": "medium",
}
PRESET = "small"


@dataclass(frozen=True)
class Runner:
    """One run.

    Attributes:
        side: one of `race_sides.OUR_FORMS`, a model of `race_sides.THEIR_MASK_RATES`, `PRESET`, or
            one of our optimizers to use instead of the rules'.
        size: a key of `RULE_NAMES`.
        budget: seconds of CPU time.
        seed: seed of weights, order and masks.
        learning_rate: highest learning rate.
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
    on_record: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run the race and return its records.

    Args:
        text: one sentence per line, a blank line after each document.
        folder: folder for the vocabulary and tokens.
        size: a key of `RULE_NAMES`.
        minutes: CPU time of each run.
        seeds: one for each pair of runs.
        sides: one or two names with learning rates; None is the rules' rate.
        on_record: called with each record.

    Raises:
        UserError: the text is too small or cannot be read, or a run failed.
    """
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        on_record(record)

    choice = choice_of(text, size, minutes)
    guesses = read_race(text, folder, choice.shape.vocabulary, SEQUENCE_LENGTH).guesses()
    keep(
        {
            "text": text.name,
            "bytes": text.stat().st_size,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "evaluation": EVALUATION,
        }
    )
    keep({"guesses": guesses, "choice": asdict(choice)})
    cores = sorted(os.sched_getaffinity(0))
    for seed in seeds:
        runners = [
            Runner(side, size, 60.0 * minutes, seed, rate or choice.learning_rate, core)
            for (side, rate), core in zip(sides, (cores[0], cores[-1]), strict=False)
        ]
        if len(cores) > 1:
            _side_by_side(runners, text, folder, keep)
        else:  # the sides take turns
            for runner in runners:
                _side_by_side([runner], text, folder, keep)
    return records


def choice_of(text: Path, size: str, minutes: float) -> Choice:
    """Return the settings that the rules choose for our side.

    Raises UserError if the text does not exist.
    """
    if not text.is_file():
        remedy = "Name a text with one sentence per line and a blank line between documents"
        raise UserError("file.missing", text, "is not a file", remedy)
    return choose(text.stat().st_size // 4, 60.0 * minutes, RULE_NAMES[size])


def _side_by_side(
    runners: Sequence[Runner], text: Path, folder: Path, keep: Callable[[dict[str, Any]], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    queue: Queue[dict[str, Any] | None] = context.Queue()
    processes = [
        context.Process(target=_run, args=(runner, text, folder, queue)) for runner in runners
    ]
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
            problem = f"a run ended with exit code {process.exitcode}"
            raise UserError("program.failed", "race", problem, "See its message above")


def _run(runner: Runner, text: Path, folder: Path, queue: Queue[Any]) -> None:
    """Run one side in this process: put each point of its curve into the queue, then None."""
    try:
        os.sched_setaffinity(0, {runner.core})
        torch.set_num_threads(1)
        choice = choice_of(text, runner.size, runner.budget / 60.0)
        rows = read_race(text, folder, choice.shape.vocabulary, SEQUENCE_LENGTH)
        device = torch.device("cpu")
        dtype = compute_dtype(small_model_precision(device), device)
        if runner.side in race_sides.THEIR_MASK_RATES:
            side = race_sides.theirs(
                rows, runner.side, choice.shape, runner.learning_rate, runner.seed, dtype
            )
        else:
            side = race_sides.ours(rows, _recipe(runner, choice, rows), runner.seed, dtype)
        for point in race_sides.race(*side, runner.budget):
            queue.put({**asdict(runner), **point})
    finally:
        queue.put(None)


def _recipe(runner: Runner, choice: Choice, rows: RaceText) -> race_sides.Recipe:
    """Return how a side of ours trains."""
    vocabulary = len(rows.unigrams)
    if runner.side in race_sides.OUR_FORMS:
        return race_sides.of_rules(choice, vocabulary, runner.side)
    if runner.side == PRESET:
        return race_sides.of_preset(PRESET, vocabulary, runner.learning_rate, choice.sequences)
    choice = replace(choice, optimizer=runner.side, learning_rate=runner.learning_rate)
    return race_sides.of_rules(choice, vocabulary)


def curves_of(records: Iterable[Record]) -> dict[Run, list[Record]]:
    """Return the points of each run's curve."""
    curves: dict[Run, list[Record]] = {}
    for point in (record for record in records if "accuracy" in record):
        run = point["size"], point["side"], point["learning_rate"], point["seed"]
        curves.setdefault(run, []).append(point)
    return curves


def guesses_of(records: Iterable[Record]) -> dict[str, float]:
    """Return the accuracy of guessing without a model."""
    return next(record["guesses"] for record in records if "guesses" in record)


def table(records: Sequence[Record]) -> str:
    """Return the curves as text: a row per tenth of the time and a column per run,
    then the accuracy of guessing.
    """
    curves = curves_of(records)
    guesses = guesses_of(records)
    head = ["time", *(f"{side} {rate:.2g} #{seed}" for _, side, rate, seed in curves)]
    lines = ["  ".join(head)]
    for number in range(race_sides.EVALUATIONS):
        cells = [
            f"{curve[number]['accuracy']:.3f}" if number < len(curve) else "-"
            for curve in curves.values()
        ]
        cells.insert(0, f"{(number + 1) / race_sides.EVALUATIONS:.0%}")
        lines.append(
            "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, head, strict=True))
        )
    most_frequent = guesses["most_frequent_accuracy"]
    bigram = guesses["bigram_accuracy"]
    lines.append(f"most frequent token {most_frequent:.3f}, bigram {bigram:.3f}")
    ends: defaultdict[str, list[float]] = defaultdict(list)
    for (_, side, _, _), curve in curves.items():
        ends[side].append(curve[-1]["accuracy"])
    lines += [
        f"{side} at the end: {min(found):.3f} to {max(found):.3f}" for side, found in ends.items()
    ]
    return "\n".join(lines) + "\n"


def _named_side(text: str) -> tuple[str, float | None]:
    """Parse NAME:RATE; only `race_sides.OUR_FORMS` need no rate.

    Raises ArgumentTypeError or ValueError.
    """
    name, _, rate = text.partition(":")
    if not rate and name not in race_sides.OUR_FORMS:
        raise argparse.ArgumentTypeError(f"{name} needs a learning rate: {name}:RATE")
    return name, float(rate) if rate else None


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description="Pre-train on the same text for the same time, and compare accuracy."
    )
    parser.add_argument(
        "sides",
        nargs="+",
        type=_named_side,
        metavar="SIDE",
        help="NAME:RATE, mlbert, local or modern; one or two",
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="CPU time of each run")
    parser.add_argument("--size", choices=RULE_NAMES, default="2x128", help="layers x hidden size")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first pair of runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of runs")
    parser.add_argument(
        "--text", type=Path, help="one sentence per line (default: installed_text.py)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("bench-pretrain"), help="folder for text and tokens"
    )
    parser.add_argument("--json", type=Path, help="file to write, with one line of JSON per point")
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
    sys.stdout.write(
        table(run(text, given.work, given.size, given.minutes, seeds, given.sides, keep))
    )


if __name__ == "__main__":
    main()
