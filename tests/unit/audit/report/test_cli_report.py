"""``mlbert report`` as a command: what it prints, its exit codes,
the page and the JSON that it writes.
"""

import json
import os
from pathlib import Path

import pytest

from programs import write_files
from simple_logs import write_log, write_runs
from user_errors import assert_error_line

LOOKS = "<b>[red]\x1b[2J\x07\u202e[/]" + "x" * 5000


@pytest.fixture
def report(run_mlbert, monkeypatch):
    """Return report(*words), which runs the command on 80 columns and returns its status
    and all output.
    """
    monkeypatch.setenv("COLUMNS", "80")

    def report(*words):
        status, out, err = run_mlbert("report", *words)
        return status, out + err

    return report


def test_runs_baselines_and_mean_in_words_json_and_a_page(tmp_path, report, run_mlbert):
    write_runs(tmp_path, [90.0, 100.0, 110.0, 400.0])
    baselines = {"bigram_accuracy": 0.1447, "most_frequent_token": ".", "masked_tokens": 18304}
    files = {"data/baselines.json": baselines, "run_0/summary.json": {"share_of_gemm_peak": 0.25}}
    write_files(tmp_path, {name: json.dumps(content) for name, content in files.items()})
    code, out = report(tmp_path)
    assert code == 0
    assert "18304" not in out
    assert "accuracy of guessing from one neighbor: 0.1447" in out
    assert "1 min 45.0 s: time to train, olympic mean of 4 runs (1.750 minutes)" in out
    assert "25.0 % of the measured matrix-product peak" in out
    assert "fastest, not counted" in out
    assert "do not say whether MLCommons has verified" in out
    page = tmp_path / "new" / "report.html"
    (system,) = json.loads(run_mlbert("report", tmp_path, "--json", "--html", page)[1])
    assert (system["olympic_mean_seconds"], system["time_to_train"]) == (105.0, "1 min 45.0 s")
    assert system["verdict"].startswith("Computed")
    assert [run["mark"] for run in system["runs"]] == [
        "fastest, not counted",
        None,
        None,
        "slowest, not counted",
    ]
    assert page.read_text().startswith("<!doctype html>")


def test_energy_and_cost_need_a_measurement_and_a_rate(tmp_path, report):
    write_runs(tmp_path, [90.0, 100.0])
    assert "Energy and cost" not in report(tmp_path, "--co2-per-kwh", 0.4)[1]
    for index, ranks in enumerate((4, 8)):
        write_log(tmp_path / f"result_{index}.txt", [(100, 90.0, 0.73)], logged={"ranks": ranks})
    summary = {
        "energy_joules": 7.2e6,
        "average_watts": 80_000.0,
        "gpu_joules": 7e6,
        "cpu_joules": 2e5,
    }
    write_files(tmp_path, {"run_1/summary.json": json.dumps(summary)})
    assert "dollars" not in report(tmp_path)[1].partition("Energy and cost")[0]
    rates = ["--price-per-gpu-hour", 5, "--co2-per-kwh", 0.4]
    text = report(tmp_path, *rates, "--html", tmp_path / "page.html")[1]
    rows = [line.split() for line in text.partition("Energy and cost")[2].splitlines()]
    assert ["0", "-", "-", "-", "0.50", "-"] in rows
    assert ["1", "GPUs,", "processors", "7,200.0", "80,000.0", "1.00", "0.8000"] in rows
    assert "7,200.0" in (tmp_path / "page.html").read_text()
    first, second = json.loads(report(tmp_path, *rates, "--json")[1])[0]["runs"]
    assert [first[name] for name in ("joules", "watts", "dollars", "co2_kg")] == [
        None,
        None,
        0.5,
        None,
    ]
    assert [second[name] for name in ("joules", "watts", "dollars", "co2_kg")] == [
        7.2e6,
        8e4,
        1.0,
        0.8,
    ]


def test_a_missed_target_is_exit_code_one(tmp_path, report):
    """Results of this code say that MLCommons has not verified them."""
    write_runs(tmp_path, [90.0, 100.0])
    log = write_log(tmp_path / "ours/result_0.txt", logged={"recipe": "packed_lamb"})
    code, out = report(log)
    assert (code, "Result not verified by MLCommons Association." in out) == (0, True)
    page = tmp_path / "result_0.txt/page.html"
    code, out = report(tmp_path, "--html", page)
    assert code == 2
    assert_error_line(out.splitlines()[-1], "file.unwritable", page)
    write_log(tmp_path / "result_2.txt", status="aborted")
    code, out = report(tmp_path)
    assert (code, "missed the target" in out) == (1, True)


@pytest.mark.parametrize("columns", ["80", "60"])
def test_other_peoples_text_cannot_draw_on_the_terminal_nor_widen_the_tables(
    tmp_path, report, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    name = LOOKS[:40].replace("/", "")
    for system in (name, "other"):
        folder = tmp_path / "results" / system / "bert"
        write_runs(folder, [90.0, 9e8, 1e300])
        write_log(folder / f"result_{name}.txt", status=LOOKS, logged={"global_batch_size": 10**30})
    for words in (
        [tmp_path],
        [tmp_path / "results" / name],
        [tmp_path, "--html", tmp_path / "page.html"],
    ):
        code, out = report(*words)
        assert code == 1
        assert all(letter.isprintable() for letter in out.replace("\n", ""))
        lines = [line for line in out.splitlines() if not line.startswith("page: ")]
        assert max(map(len, lines)) <= int(columns)
        assert "[red]" in out.replace("\n", "")
    assert "<b>" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "name", ["run_0/summary.json", "run_0/metrics.jsonl", "data/baselines.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0\xff",
        "[1]",
        "{" * 9999,
        '{"samples": ' + "9" * 5000 + "}",
        None,
        Path("/dev/zero"),
        Path("nowhere"),
    ],
    ids=["empty", "binary", "list", "deep", "digits", "pipe", "device", "no link"],
)
def test_a_damaged_side_file_costs_its_part_alone(tmp_path, report, name, content):
    write_runs(tmp_path, [90.0])
    (tmp_path / name).parent.mkdir()
    if content is None:
        os.mkfifo(tmp_path / name)
    elif isinstance(content, Path):
        (tmp_path / name).symlink_to(content)
    else:
        (tmp_path / name).write_text(content)
    code, out = report(tmp_path)
    assert code == 0
    assert "1 min 30.0 s" in out
    assert Path(name).name in out or name.startswith("run_0") or not content


@pytest.mark.parametrize("value", [float("nan"), 1e308, -1, 10**400, True, "x", [], {}])
def test_odd_numbers_in_side_files_are_no_numbers(tmp_path, report, value):
    write_runs(tmp_path, [90.0])
    keys = ("samples", "samples_per_second", "share_of_gemm_peak", "target_accuracy")
    summary = json.dumps(dict.fromkeys(keys, value))
    baselines = json.dumps({"bigram_accuracy": value})
    write_files(tmp_path, {"run_0/summary.json": summary, "data/baselines.json": baselines})
    code, out = report(tmp_path)
    assert code == 0
    assert "guessing from one neighbor" not in out
    json.loads(report(tmp_path, "--json")[1], parse_constant=pytest.fail)


def test_nothing_to_read_is_one_line(tmp_path, assert_fails):
    for path, code in ((tmp_path, "log.missing"), (tmp_path / "missing", "file.missing")):
        assert_fails(["report", path], code, path)
