"""tools/gpu_check.sh: a full rehearsal on the CPU, and the handling of parts that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpu_check import main as program
from gpu_check import tables
from gpu_check.hardware import peaks_of
from gpu_check.rows import LOST, Rows

PARTS = ("smoke", "checks", "ops", "step", "profile", "tests")


def run(tree_root: Path, *words: str, out: str = "") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": out}
    command = [str(tree_root / "tools" / "gpu_check.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_rehearsal_runs_every_part(tree_root, tmp_path):
    done = run(tree_root, "--cpu-rehearsal", out=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log.txt").read_text()[-3000:]
    expected = {*(f"{part}.json" for part in PARTS), "table.txt", "table.md", "log.txt"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    for part in PARTS:
        rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        assert rows, part
        assert [name for name, row in rows.items() if "error" in row] == [], part
    for text in ((tmp_path / "table.txt").read_text(), (tmp_path / "table.md").read_text()):
        assert "REHEARSAL" in text
        for words in ("dropout_add_layer_norm: plain", "huggingface", "GEMM", "nothing"):
            assert words in text, words


def test_missing_gpu_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert program.main(["--out", str(tmp_path / "none")]) == 2
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 1
    assert "no CUDA device" in output
    assert not (tmp_path / "none").exists()


def test_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--cpu-rehearsal", "--parts", "checks,nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().out


@pytest.mark.parametrize("resume", [False, True])
def test_rows_are_kept_only_with_resume(resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "check_all", lambda *_: 0)
    kept = tmp_path / "checks.json"
    kept.write_text('{"rows": {"norm": {"passed": true}}}')
    words = ["--cpu-rehearsal", "--parts", "checks", "--out", str(tmp_path), *(["--resume"] if resume else [])]
    assert program.main(words) == 0
    assert kept.exists() == resume


def test_hung_process_is_killed_at_its_deadline(tmp_path):
    started = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert program.run_until(command, tmp_path / "log.txt", started + 2, {}) is None
    assert time.monotonic() - started < 60
    assert program.run_until(command, tmp_path / "log.txt", started, {}) is None
    assert (
        program.run_until([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log.txt", started + 600, {}) == 3
    )


def test_lost_device_loses_one_row(tmp_path, monkeypatch):
    """The part restarts and continues after the row that crashed the process."""
    codes = iter([program.DEVICE_LOST, -11, 0])
    monkeypatch.setattr(program, "run_until", lambda *_: next(codes))
    assert program.supervise("checks", tmp_path, time.monotonic() + 10, True) == ""
    monkeypatch.setattr(program, "run_until", lambda *_: program.DEVICE_LOST)
    assert "lost" in program.supervise("checks", tmp_path, time.monotonic() + 10, True)
    monkeypatch.setattr(program, "run_until", lambda *_: 1)
    assert "code 1" in program.supervise("checks", tmp_path, time.monotonic() + 10, True)


def test_rows_survive_failure_and_death(tmp_path):
    path, cpu = tmp_path / "rows.json", torch.device("cpu")
    rows = Rows(path, cpu, {"device": "test"})
    rows.measure("good", lambda: {"rate": 1.0})
    rows.measure("bad", lambda: {"rate": 1 / 0})
    assert "ZeroDivisionError" in json.loads(path.read_text())["rows"]["bad"]["error"]
    killed = json.loads(path.read_text())
    killed["running"] = "deadly"
    path.write_text(json.dumps(killed))
    rows = Rows(path, cpu, {"device": "test"})
    calls = []
    for name in ("good", "bad", "deadly", "next"):
        rows.measure(name, lambda n=name: calls.append(n) or {})
    assert calls == ["next"]
    content = json.loads(path.read_text())
    assert content["rows"]["deadly"] == {"error": LOST}
    assert list(content["rows"]) == ["good", "bad", "deadly", "next"]
    assert content["device"] == "test"


def test_failures_are_listed(tmp_path):
    rows = {"a": {"passed": True}, "b": {"passed": False}, "c": {"error": "Traceback\nRuntimeError: no"}}
    (tmp_path / "checks.json").write_text(json.dumps({"rows": rows, "running": "d"}))
    found = tables.failures(tmp_path, ["checks", "ops"], {"checks": "its time was over", "ops": ""})
    assert found == [
        "checks: b: differs by more than is allowed",
        "checks: c: RuntimeError: no",
        "checks: its time was over in d",
    ]


def test_missing_packages_and_compilers_are_reported(monkeypatch):
    monkeypatch.setattr(program, "PACKAGES", {"no_such_package": "nothing works"})
    monkeypatch.setattr(program.shutil, "which", lambda _: None)
    package, compiler = program.missing_things()
    assert package == "no package no_such_package: nothing works"
    assert "gcc" in compiler


def test_goals_use_the_fastest_step_of_each_precision():
    def row(speed: float, precision: str) -> dict:
        return {"sequences_per_second": speed, "precision": precision, "forms": {}}

    rows = {
        "slow": row(900.0, ""),
        "all": row(990.0, ""),
        "fp8": row(1400.0, "fp8"),
        "half": row(1500.0, "fp8-forward"),
        "huggingface eager": {"sequences_per_second": 100.0},
        "broken": {"error": "no"},
    }
    ((title, (_, bf16, fp8)),) = tables.goals_section(rows)
    assert title == "goals"
    assert bf16 == ["bf16", "all", "990.0", "1100", "90.0%", "9.90"]
    assert fp8 == ["fp8", "fp8", "1400.0", "1400", "100.0%", "14.00"]
    assert tables.goals_section({"broken": {"error": "no"}}) == []


def test_step_that_did_not_fit_is_marked():
    row = {"sequences": 224, "sequences_per_second": 1.0, "seconds": [1.0], "did_not_fit": 448}
    assert tables.step_table({"all": row})[1][-1] == "ok, 448 did not fit"


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA H200", 4.8),
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA A100-SXM4-80GB", 2.039),
        ("NVIDIA A100-SXM4-40GB", 1.555),
        ("NVIDIA B200", 8.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GB200", None),
    ],
)
def test_peaks_match_the_data_sheets(name, memory):
    peaks = peaks_of(name)
    assert (peaks and peaks.memory) == memory
