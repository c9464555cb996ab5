"""Edits of the logs of one set that make the faults of `test_faults`."""

import copy

from log_edits import (
    Edit,
    Run,
    drop,
    each,
    insert,
    mark,
    nth,
    put,
    stamp,
)

EVALUATION = ("eval_start", "eval_stop", "eval_accuracy")


def at_once(runs: list[Run]) -> None:
    """Give everything up to the fourth evaluation one time."""
    for index in range(4):
        for key in EVALUATION:
            nth(runs[3], key, index)["time_ms"] = nth(runs[3], "block_start")["time_ms"]


def late_start(ms: int) -> Edit:
    """Start the clock, and what comes before the first evaluation, ``ms`` before it."""

    def edit(runs: list[Run]) -> None:
        end = runs[3].index(nth(runs[3], "eval_start"))
        first = runs[3].index(nth(runs[3], "init_stop"))
        for line in runs[3][first:end]:
            line["time_ms"] = nth(runs[3], "eval_start")["time_ms"] - ms

    return edit


def run_side_by_side(runs: list[Run]) -> None:
    """Let run 3 run at the same time as run 7."""
    gap = nth(runs[7], "run_start")["time_ms"] - nth(runs[3], "run_start")["time_ms"]
    stamp(lambda ms: ms + gap + 10_000)(runs)


def at(samples: float, index: int) -> Edit:
    return each(*(mark(key, "epoch_num", samples, index) for key in EVALUATION))


def ends(samples: float) -> Edit:
    return each(
        at(samples, -1), mark("epoch_stop", "epoch_num", samples), put("train_samples", samples)
    )


def without(index: int) -> Edit:
    return each(*(drop(key, index) for key in EVALUATION))


def before_training(runs: list[Run]) -> None:
    for _ in range(sum(line["key"] == "eval_stop" for line in runs[3]) - 1):
        without(-1)(runs)
    at(0, 0)(runs)


def same_again(accuracy: float) -> Edit:
    return each(*(put("eval_accuracy", accuracy, index) for index in (2, 3, 4)))


def four_digits(runs: list[Run]) -> None:
    for line in runs[3]:
        line["value"] = round(line["value"], 4) if line["key"] == "eval_accuracy" else line["value"]


def copied(scale: float = 1.0, offset: float = 0.0) -> Edit:
    """Run 3 becomes run 1 under its own seed, its times scaled, its accuracies changed."""

    def edit(runs: list[Run]) -> None:
        model = copy.deepcopy(runs[1])
        own = runs[3]
        begin = nth(own, "run_start")["time_ms"]
        start = nth(model, "run_start")["time_ms"]
        nth(model, "seed")["value"] = nth(own, "seed")["value"]
        for line in model:
            line["time_ms"] = round(begin + (line["time_ms"] - start) * scale)
            line["value"] = (
                line["value"] + offset if line["key"] == "eval_accuracy" else line["value"]
            )
        own[:] = model

    return edit


def copied_part(copy_line, *keys: str, first: int = 0) -> Edit:
    """From some evaluation on, lines of run 3 get something of those of run 1:
    copy_line(line, model, number).
    """

    def edit(runs: list[Run]) -> None:
        for key in keys or ("eval_accuracy",):
            mine, theirs = (
                [line for line in runs[which] if line["key"] == key][first:] for which in (3, 1)
            )
            for number, (line, model) in enumerate(zip(mine, theirs, strict=False)):
                copy_line(line, model, number)

    return edit


def copied_accuracies(first: int = 0, jitter: float = 0.0) -> Edit:
    return copied_part(
        lambda line, model, n: line.update(value=model["value"] + (-1) ** n * jitter), first=first
    )


def timed_as(scale: float) -> Edit:
    """Run 3 keeps its numbers but takes the times of run 1's evaluations."""

    def edit(runs: list[Run]) -> None:
        begin = nth(runs[3], "run_start")["time_ms"]
        other = nth(runs[1], "run_start")["time_ms"]
        copied_part(
            lambda line, model, n: line.update(
                time_ms=round(begin + (model["time_ms"] - other) * scale)
            ),
            *EVALUATION,
        )(runs)

    return edit


def other_lines(runs: list[Run]) -> None:
    for line in runs[3]:
        line["metadata"]["lineno"] += 7


def other_data(runs: list[Run]) -> None:
    for which in range(len(runs)):
        name = "/data/easy/part_1" if which == 3 else f"/data/phase2/part_{which}"
        insert("eval_start", "epoch_start", which=which, key="data_file", value=name)(runs)
