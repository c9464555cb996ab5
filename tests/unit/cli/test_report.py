"""``mlbert report`` as a command: what it prints, its exit codes, the page and the JSON that it writes."""

import json

import pytest

from mlbert.cli.main import main
from simple_logs import write_log


def report(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def write_runs(folder, seconds, **more):
    for index, end in enumerate(seconds):
        write_log(folder / f"result_{index}.txt", [(100, end, 0.73)], logged={"seed": index}, **more)


def test_runs_baselines_and_mean(tmp_path, capsys):
    write_runs(tmp_path, [90.0, 100.0, 110.0, 400.0])
    (tmp_path / "data").mkdir()
    baselines = {"bigram_accuracy": 0.1447, "most_frequent_token": ".", "masked_tokens": 18304}
    (tmp_path / "data" / "baselines.json").write_text(json.dumps(baselines))
    (tmp_path / "run_0").mkdir()
    (tmp_path / "run_0" / "summary.json").write_text(json.dumps({"share_of_gemm_peak": 0.25}))
    code, out = report(capsys, tmp_path)
    assert code == 0
    assert "baseline bigram: accuracy 0.1447" in out
    assert "18304" not in out
    assert "1 min 45.0 s: time to train, olympic mean of 4 runs (1.750 minutes)" in out
    assert "25.0 % of the measured matrix-product peak" in out
    assert "fastest, not counted" in out
    assert "do not say whether MLCommons has verified" in out


def test_our_own_results_say_that_they_are_not_verified(tmp_path, capsys):
    log = write_log(tmp_path / "result_0.txt", logged={"recipe": "packed_lamb"})
    code, out = report(capsys, log)
    assert code == 0
    assert "Result not verified by MLCommons Association." in out


def test_a_missed_target_is_exit_code_one(tmp_path, capsys):
    write_runs(tmp_path, [90.0, 100.0])
    write_log(tmp_path / "result_2.txt", status="aborted")
    code, out = report(capsys, tmp_path)
    assert code == 1
    assert "missed the target" in out


def test_damaged_files_are_named_and_left_out(tmp_path, capsys):
    write_runs(tmp_path, [90.0])
    (tmp_path / "run_0").mkdir()
    for name in ("summary.json", "metrics.jsonl"):
        (tmp_path / "run_0" / name).write_text("{")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "baselines.json").write_text("[1]")
    code, out = report(capsys, tmp_path)
    assert code == 0
    assert all(f"{name} cannot be read" in out for name in ("run_0/summary.json", "data/baselines.json"))
    assert "run_0/metrics.jsonl: 1 lines cannot be read" in out


def test_nothing_to_read_is_one_line(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing"):
        code, out = report(capsys, path)
        assert code == 2
        assert out.count("\n") == 1
        assert str(path) in out


def test_json_has_the_numbers_and_the_page_is_written_beside_it(tmp_path, capsys):
    write_runs(tmp_path / "runs", [90.0, 100.0, 110.0])
    page = tmp_path / "new" / "report.html"
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "runs"), "--json", "--html", str(page)])
    (system,) = json.loads(capsys.readouterr().out)
    assert system["olympic_mean_seconds"] == 100.0
    assert [run["mark"] for run in system["runs"]] == ["fastest, not counted", None, "slowest, not counted"]
    assert page.read_text().startswith("<!doctype html>")


def test_systems_side_by_side(tmp_path, capsys):
    for name, seconds in (("one[red]", 100.0), ("two", 50.0)):
        write_runs(tmp_path / "results" / name / "bert", [seconds - 1, seconds, seconds + 1])
    code, out = report(capsys, tmp_path)
    assert code == 0
    assert "one[red]" in out
    assert "1 min 40.0 s" in out
    assert "50.00 s" in out


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    log = write_log(tmp_path / "result_0.txt")
    code, out = report(capsys, log, "--html", log / "page.html")
    assert code == 2
    assert "cannot be written" in out
