"""What differs between two sets of runs: the committed results,
copies of them that were changed, published logs.
"""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from edited_logs import committed, write
from log_edits import nth
from mlaudit.cli.submission import app
from mlaudit.compare import Comparison, compare_sides, read_side
from mlaudit.logs import read_log
from mlaudit.result_set import minutes_to_train, samples_per_second, samples_to_target
from mlaudit.significance import compare
from user_errors import user_error

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "tests/assets/own_tree/results/cpu_demo"
PUBLISHED = ROOT / "tests/assets/published_logs/2xXE9712x4GB200.tar.xz"
NUMBERS = st.lists(st.integers(1000, 1400), min_size=1, max_size=12, unique=True)


def compared(a: Path, b: Path) -> Comparison:
    return compare_sides(read_side(a), read_side(b), ROOT)


def copy(folder: Path, change: Callable[[dict, float], None], num_logs: int = 10) -> Path:
    """Copy the demonstration's logs and change each line;
    ``change`` also gets the time of run_start.
    """
    folder.mkdir(parents=True)
    runs = committed(DEMO / "bert")[:num_logs]
    for run in runs:
        start = nth(run, "run_start")["time_ms"]
        for line in run:
            change(line, start)
    write(runs, folder)
    return folder


def twice_as_slow(line: dict, start: float) -> None:
    line["time_ms"] = start + 2 * (line["time_ms"] - start)


def test_a_run_against_itself() -> None:
    found = compared(DEMO, DEMO / "bert")
    assert (found.settings, found.code, found.system, found.files, found.history) == (
        [],
        [],
        [],
        [],
        "",
    )
    assert found.successes == found.runs == (10, 10)
    assert found.notes == []
    for measure in found.measures:
        assert measure.ratio.value == 1
        assert not measure.ratio.is_significant


def test_a_slower_copy_differs_in_speed_and_time_only(tmp_path: Path) -> None:
    speed, samples, minutes = (
        m.ratio for m in compared(DEMO, copy(tmp_path / "slow", twice_as_slow)).measures
    )
    assert (speed.is_significant, samples.is_significant, minutes.is_significant) == (
        True,
        False,
        True,
    )
    assert speed.value == pytest.approx(0.5, rel=0.05)
    assert speed.low < 0.5 < speed.high < 1
    assert minutes.value == pytest.approx(2, rel=0.05)


def test_numbers_of_a_run() -> None:
    log = read_log(DEMO / "bert/result_0.txt")
    starts = [event.time_ms for event in log.all("eval_start")]
    begins = [event.time_ms for event in (*log.all("run_start"), *log.all("eval_stop"))]
    seconds = sum(start - begin for start, begin in zip(starts, begins, strict=False)) / 1000
    assert samples_per_second(log) == pytest.approx(100016 / seconds)
    assert samples_to_target(log) == 100016
    milliseconds = log.first("run_stop").time_ms - log.first("run_start").time_ms
    assert minutes_to_train(log) == pytest.approx(milliseconds / 60_000)


def test_missed_targets_other_settings_and_few_runs(tmp_path: Path) -> None:
    def change(line: dict, start: float) -> None:
        if line["key"] == "run_stop":
            line["metadata"]["status"] = "aborted"
        if line["key"] in ("global_batch_size", "opt_epsilon"):
            line["value"] *= 2
        if line["key"] == "packages":
            line["value"]["torch"] = "3.0"
        if line["key"] == "commit":
            line["value"] = "0" * 40
        if line["key"] == "configuration":
            line["value"]["BATCHSIZE"] = {"value": 64, "origin": "flag --train_batch_size"}
            line["value"]["LOGDIR"]["value"] = "/elsewhere"
            line["value"]["NEW_ONE"] = {"value": "off", "origin": "recipe packed_lamb"}

    found = compared(copy(tmp_path / "changed", change, 2), DEMO)
    assert [(d.name, d.a, d.b) for d in found.settings] == [
        ("global_batch_size", "68", "34"),
        ("opt_epsilon", "2e-06", "1e-06"),
        ("BATCHSIZE", "64", "32"),
    ]
    batch = next(d for d in found.settings if d.name == "BATCHSIZE")
    assert batch.origin_a == "flag --train_batch_size"
    assert batch.origin_b.endswith("config_cpu_1x1x32x1_demo.sh:13")
    assert [d.name for d in found.code] == ["commit", "packages: torch"]
    assert (found.successes, found.runs, found.olympic_minutes[0]) == ((0, 10), (2, 10), None)
    assert [measure.ratio is None for measure in found.measures] == [False, True, True]
    notes = " ".join([*found.notes, found.history])
    parts = (
        "batch sizes differ",
        "A has fewer than 3 runs",
        "LOGDIR",
        "NEW_ONE off",
        "does not have both commits",
    )
    assert [words for words in parts if words not in notes] == []


def test_commits_of_this_history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git history here")
    older = ROOT / "results/cpu_demo"
    newer = ROOT / "results/tf2_cpu_demo"
    found = compared(older, newer)
    if "does not have both" in found.history:
        pytest.skip("a shallow clone")
    assert re.fullmatch(
        r"B is \d+ commits after A; \d+ files of benchmarks/ differ\.", found.history
    )
    assert all(name.startswith("benchmarks/") for name in found.files)
    back = compared(newer, older)
    assert back.history == found.history.replace("after", "before")


def test_published_logs_and_the_printed_report(tmp_path: Path) -> None:
    subprocess.run(["tar", "-xf", PUBLISHED, "-C", tmp_path], check=True)
    published = tmp_path / "results/2xXE9712x4GB200"
    result = CliRunner().invoke(app, ["diff", str(published), str(DEMO)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    words = " ".join(result.output.split())
    for wanted in (
        "9 reached the target",
        "Not like for like",
        "the batch sizes",
        "speed: B is",
        "Not verified",
    ):
        assert wanted.lower() in words.lower(), wanted
    reported = json.loads(
        CliRunner().invoke(app, ["diff", str(DEMO), str(published), "--json"]).output
    )
    assert reported["successes"] == [10, 9]
    assert reported["measures"][0]["ratio"]["p"] < 0.001


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no log\n")
    for name, code in (
        (".", "log.missing"),
        ("none", "file.missing"),
        ("text.txt", "log.incomplete"),
    ):
        with user_error(code, tmp_path / name):
            read_side(tmp_path / name)


@pytest.mark.parametrize("value", [[], {}, [{"a": 1}], 10**400, True, ""])
def test_values_of_other_types_are_compared_as_text(value: object, tmp_path: Path) -> None:
    def change(line: dict, start: float) -> None:
        if line["key"] in (
            "configuration",
            "commit",
            "global_batch_size",
            "train_data",
            "seed",
            "hosts",
        ):
            line["value"] = value

    odd = copy(tmp_path / "odd", change, num_logs=1)
    assert any(
        difference.name == "global_batch_size" for difference in compared(DEMO, odd).settings
    )
    assert compared(odd, odd).settings == []


@given(a=NUMBERS, b=NUMBERS)
def test_the_interval_leaves_out_one_where_the_test_finds_a_difference(
    a: list[int], b: list[int]
) -> None:
    b = [value + 0.5 for value in b]  # no ties
    ratio = compare(a, b)
    assert min(b) / max(a) <= ratio.value <= max(b) / min(a)
    if min(len(a), len(b)) < 3:
        assert (ratio.p, ratio.low, ratio.is_significant) == (None, None, False)
    elif ratio.low is None or ratio.high is None:
        assert not ratio.is_significant, "so few runs cannot differ at 5 %"
    else:
        assert ratio.low <= ratio.value <= ratio.high
        assert ratio.is_significant == (not ratio.low <= 1 <= ratio.high)


@pytest.mark.parametrize(("runs", "critical"), [(3, None), (4, 0), (5, 2), (8, 13), (10, 23)])
def test_the_interval_is_that_of_the_tables(runs: int, critical: int | None) -> None:
    """Critical values of U at 5 %, two-sided, as printed in any table of Mann
    and Whitney's test.
    """
    ratio = compare([1.0] * runs, [100 * n + m / runs for n in range(1, 2) for m in range(runs)])
    expected = (
        None
        if critical is None
        else sorted(100 + m / runs for m in range(runs) for _ in range(runs))[critical]
    )
    assert ratio.low == expected


def test_many_runs_take_no_time_and_ties_and_missing_numbers_are_allowed() -> None:
    """The normal distribution gives the interval that the exact one gives,
    which 51 x 50 runs still have quickly.
    """
    ratio = compare(range(1000, 1050), range(1000, 1051))
    pairs = sorted(b / a for a in range(1000, 1050) for b in range(1000, 1051))
    assert (ratio.low, ratio.high) == (pairs[986], pairs[-1 - 986])
    assert compare(range(1000, 1400), range(1000, 1400)) is not None
    same = compare([2.0] * 10, [2.0] * 10)
    assert (same.value, same.low, same.high, same.p) == (1.0, 1.0, 1.0, 1.0)
    assert compare([1.0] * 10, [2.0] * 10).is_significant
    assert compare([], [1.0]) is None
