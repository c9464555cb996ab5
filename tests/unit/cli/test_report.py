"""``mlbert report`` on run folders: figures, baselines, the olympic mean; damaged summaries."""

import json

import pytest

from mlbert.cli.main import main

SUMMARY = {
    "status": "success",
    "seconds_to_train": 100.0,
    "accuracy": 0.31,
    "target_accuracy": 0.3,
    "samples": 1000,
    "samples_per_second": 10.0,
    "model_flops_per_second_per_rank": 5e9,
    "share_of_gemm_peak": 0.25,
    "ranks": 2,
}


def report(capsys, folder):
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder)])
    captured = capsys.readouterr()
    return end.value.code, captured.out + captured.err


def write_run(folder, index, **changes):
    target = folder / f"run_{index}"
    target.mkdir(parents=True)
    (target / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))


def test_runs_baselines_and_mean(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for index, seconds in enumerate([90.0, 100.0, 110.0, 400.0]):
        write_run(tmp_path, index, seconds_to_train=seconds)
    (tmp_path / "data").mkdir()
    baselines = {"bigram_accuracy": 0.1447, "most_frequent_token": ".", "masked_tokens": 18304}
    (tmp_path / "data" / "baselines.json").write_text(json.dumps(baselines))
    code, out = report(capsys, tmp_path)
    assert code == 0
    assert "baseline bigram: accuracy 0.1447" in out
    assert "18304" not in out
    assert "olympic mean of 4 successful runs: 105.0 s" in out
    assert "10.0" in out
    assert "25 %" in out
    assert "Result not verified by MLCommons Association." in out


def test_a_missed_target_is_exit_code_one(tmp_path, capsys):
    write_run(tmp_path, 0)
    write_run(tmp_path, 1, status="aborted")
    assert report(capsys, tmp_path)[0] == 1


def test_damaged_summary_is_named(tmp_path, capsys):
    write_run(tmp_path, 0)
    (tmp_path / "run_0" / "summary.json").write_text("{")
    code, out = report(capsys, tmp_path)
    assert code == 2
    assert "summary.json" in out
