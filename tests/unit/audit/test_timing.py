"""Times and orders of honest runs raise no error, and what is judged by the whole set."""

import re
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from audit import expect
from edited_logs import OWN_LOGS, committed, report, simulated
from log_edits import cut_evaluations, each, insert, nth, put, repeat, shift, squeezed, stamp
from mlaudit.findings import Outcome

ERROR = Outcome.ERROR
WARN = Outcome.WARN
NOTE = Outcome.NOTE
ODD = [
    None,
    True,
    "",
    [],
    {},
    [[1]],
    {"value": {}},
    -1,
    10**400,
    10**300,
    float("nan"),
    float("-inf"),
    5e-324,
    "1e5",
]


def wrong(said) -> dict[str, str]:
    return {check: words for check, (outcome, words) in said.items() if outcome in (ERROR, WARN)}


@settings(max_examples=15)
@example(seed=362881, batch=768, speed=60.0, slow=True)
@example(seed=22040, batch=448, speed=1.0, slow=False)
@given(
    seed=st.integers(0, 10**6),
    batch=st.sampled_from([96, 448, 768, 1536, 4608]),
    speed=st.floats(0.05, 150),
    slow=st.booleans(),
)
def test_honest_packed_runs_raise_no_error(
    tmp_path_factory, seed: int, batch: int, speed: float, slow: bool
) -> None:
    said = report(simulated(seed, batch, speed, slow), tmp_path_factory.mktemp("honest"))
    if (
        said.get("speed", (NOTE, ""))[0] is WARN
    ):  # the slow interval where it is long, or the run without one
        # By chance, one set in a hundred has a run that is faster than its others allow.
        assert re.search(
            "usually|the whole run trained" if slow else "the whole run trained",
            said.pop("speed")[1],
        )
    assert wrong(said) == {}


def test_stalls_of_short_evaluations_are_no_fault(tree_root: Path, tmp_path: Path) -> None:
    """A trial run whose evaluations take 200 ms, while other programs had the processors."""
    runs = committed(tree_root / OWN_LOGS)
    cut_evaluations(200, 900, 1000, 1900)(runs)
    assert "evaluation time" not in report(runs[3:4], tmp_path)


def test_a_run_faster_than_a_steady_set(tmp_path: Path) -> None:
    runs = simulated(1)
    for which, run in enumerate(runs):
        ms = nth(run, "run_stop")["time_ms"] - nth(run, "run_start")["time_ms"]
        rate = 0.112 if which == 3 else 0.1  # samples per ms
        squeezed(nth(run, "train_samples")["value"] / ms / rate, which)(runs)
    words = "the whole run trained 112 samples a second, the others 100,"
    expect(report(runs, tmp_path), "speed", WARN, "result_3.txt: line ", words)
    squeezed(1.05)(runs)
    assert "speed" not in report(runs, tmp_path)


def test_data_opened_before_the_clock(tmp_path: Path) -> None:
    runs = simulated(1)
    for which in range(len(runs)):
        insert("run_start", which=which, key="data_file", value="/data/part_1")(runs)
    assert "order of events" not in report(runs, tmp_path)
    stamp(lambda ms: ms - 2, "data_file")(runs)
    expect(
        report(runs, tmp_path),
        "order of events",
        WARN,
        "result_3.txt: line ",
        "data_file is opened before run_start",
    )


def test_programs_that_log_less_or_more_raise_no_error(tmp_path: Path) -> None:
    """No eval_start, eval_stop of another count (tinygrad), lines of several ranks,
    an open block, a slow start.
    """
    runs = simulated(2)
    for index, run in enumerate(runs):
        run[:] = [line for line in run if index % 2 or line["key"] != "eval_start"]
        for line in run:
            if line["key"] == "eval_stop":
                line["metadata"] = {
                    "epoch_count": line["metadata"]["epoch_num"],
                    "samples_count": 10_000,
                }
        last = sum(line["key"] == "eval_accuracy" for line in run) - 1
        each(
            repeat("init_start", after=3, which=index),
            *(repeat("eval_accuracy", n, which=index) for n in range(last, -1, -1)),
            repeat("epoch_start", which=index),
            put("train_samples", 4_000_000, which=index),
            shift("run_start", 40_000, which=index),
        )(runs)
        run.insert(8, nth(run, "epoch_start") | {"key": "block_start"})
    assert wrong(report(runs, tmp_path)) == {}


def test_keys_that_a_later_writer_adds_may_come_anywhere_before_the_end(
    tree_root: Path, tmp_path: Path
) -> None:
    runs = committed(tree_root / OWN_LOGS)
    for run in runs:
        run.insert(len(run) - 2, nth(run, "train_samples") | {"key": "steps"})
        run.insert(9, nth(run, "recipe") | {"key": "cpu"})
    assert set(report(runs, tmp_path)) == {"speed"}  # the note of a pause
    runs[3].append(nth(runs[3], "steps") | {"key": "tokens", "time_ms": runs[3][-1]["time_ms"]})
    assert "tokens comes after run_stop" in report(runs, tmp_path)["order of events"][1]


def test_concurrent_runs_on_other_machines(tree_root: Path, tmp_path: Path) -> None:
    runs = committed(tree_root / OWN_LOGS)
    for index, run in enumerate(runs):
        run.insert(9, nth(run, "recipe") | {"key": "hosts", "value": [f"node{index}"]})
    gap = nth(runs[7], "run_start")["time_ms"] - nth(runs[3], "run_start")["time_ms"]
    stamp(lambda ms: ms + gap + 10_000)(runs)
    said = report(runs, tmp_path)
    assert said["runs apart"][0] is NOTE
    assert "same settings" not in said


@settings(max_examples=40)
@given(data=st.data())
def test_nothing_in_a_log_stops_the_checks(
    tree_root: Path, tmp_path_factory, data: st.DataObject
) -> None:
    runs = committed(tree_root / OWN_LOGS)[:3] if data.draw(st.booleans()) else simulated(7)[:3]
    for _ in range(4):
        line = data.draw(st.sampled_from(data.draw(st.sampled_from(runs))))
        odd = data.draw(st.sampled_from(ODD))
        place = data.draw(st.sampled_from(["value", "time_ms", "metadata", "epoch_num", "key"]))
        if place == "epoch_num":
            line["metadata"] = {"epoch_num": odd}
        elif place == "key":
            keys = ["run_start", "run_stop", "eval_accuracy", "configuration", "hosts"]
            line["key"] = data.draw(st.sampled_from(keys))
        else:
            line[place] = odd
    said = report(runs, tmp_path_factory.mktemp("odd"))
    assert [
        words
        for _, words in said.values()
        if not re.match(r"(ERROR: |warning: )?result_\d\.txt: ", words)
    ] == []
