"""tools/gpu_check.sh: a rehearsal of its first run on the CPU,
and the handling of parts that fail or hang.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from emulated_cublaslt import compile_emulator
from emulated_fmha import compile_fmha
from gpu_check import main as program
from gpu_check import tables
from gpu_check.rows import LOST, Rows
from programs import run_quietly

TOOLS = Path(__file__).parents[1] / "assets" / "gpu_tools"
CPU = torch.device("cpu")


class Rehearsal(NamedTuple):
    done: subprocess.CompletedProcess[str]
    out: Path
    work: Path

    def rows(self, part: str) -> dict[str, dict[str, Any]]:
        return tables.read_rows(self.work / "run1", part)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, tree_root: Path) -> Rehearsal:
    """Return the first run with a kernel that does not compile, one that is wrong,
    and steps that do not fit.
    """
    folder = tmp_path_factory.mktemp("first")
    compile_emulator(folder / "libcublaslt.so")
    compile_fmha(folder / "libfmha.so")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PATH": f"{TOOLS}:{os.environ['PATH']}",
        "EMULATED": str(folder),
        "PYTHONPATH": str(tree_root / "tests"),
        "GPU_CHECK_STAND_INS": "gpu_stand_ins",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "INJECTED": "compile,proof,memory",
    }
    command = [tree_root / "tools/gpu_check.sh", "--cpu-rehearsal"]
    command += ["--out", folder / "out", "--work", folder / "work"]
    done = run_quietly(*command, env=environment)
    return Rehearsal(done, folder / "out", folder / "work")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rehearsal_of_the_first_run_writes_every_row(first_run: Rehearsal) -> None:
    assert first_run.done.returncode == 1, first_run.done.stdout + first_run.done.stderr
    assert {path.name for path in first_run.out.iterdir()} == {
        "table.txt",
        "table.md",
        "run1.tar.xz",
    }
    ends = dict.fromkeys(program.RUNS[1], "")
    failed = tables.failures(first_run.work / "run1", ends)
    expected = (
        ("compile: csrc/fmha: ", "unknown opcode"),
        ("smoke: bf16, 1 packs: ", "out of memory"),
        ("smoke: bf16, 2 packs: ", "out of memory"),
        ("checks: layer_norm_dropout: triton: ", "is more than twice PyTorch's"),
        ("checks: cast_transpose to FP8: ", "ptxas exited with code 255"),
    )
    assert len(failed) == len(expected), first_run.done.stdout
    for line, (name, reason) in zip(failed, expected, strict=True):
        assert line.startswith(name)
        assert reason in line
    for part in program.RUNS[1]:
        assert first_run.rows(part), part
    titles = (
        "REHEARSAL",
        "GEMM dgrad",
        "replay in fp8",
        "mlbert train, resumed",
        "out of memory",
        "next: tools",
    )
    for name in ("table.txt", "table.md"):
        shown = (first_run.out / name).read_text()
        assert [words for words in titles if words not in shown] == []
    with tarfile.open(first_run.out / "run1.tar.xz") as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert {f"{part}.json" for part in program.RUNS[1] if part != "compile"} <= found.keys()
    for name, content in found.items():
        if name.endswith(".json"):
            json.loads(content)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rows_of_the_first_run_have_what_the_tables_need(first_run: Rehearsal) -> None:
    smoke = first_run.rows("smoke")
    ops = first_run.rows("ops")
    assert smoke["fp8, 2 packs"]["did_not_fit"] == 2
    assert smoke["fp8, 1 packs"]["power"]["watts"] == 612.4
    assert (smoke["fp8, 1 packs"]["accumulation"], smoke["fp8, 1 packs"]["graph"]) == (
        "all",
        "full_iteration",
    )
    gemm = [name for name in ops if name.startswith("GEMM")]
    for kind in ("forward", "dgrad", "wgrad"):
        for precision in ("bf16", "fp8 fast", "fp8 slow"):
            assert [name for name in gemm if f"GEMM {kind}" in name and precision in name], (
                kind,
                precision,
            )
    for name in gemm:
        assert ops[name]["best_ms"] <= ops[name]["first_ms"], name
        assert ("without_epilogue_ms" in ops[name]) == ("NONE" not in name)
    assert [x for x in gemm if "apart_ms" in ops[x]] == [
        x for x in gemm if "BGRADB" in x or "GELU" in x
    ]
    for form in ("plain", "native", "fmha"):
        assert ops[f"attention: {form}"]["forward_seconds"] > 0
    resumed = first_run.rows("train")["mlbert train, resumed"]
    assert (resumed["status"], resumed["different"]) == ("success", 0)


def test_archive_size_is_limited_by_truncating_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "ops.json").write_text("{}")
    (work / "log.txt").write_text("first" + 5000 * "x" + "last")
    monkeypatch.setattr(program, "ARCHIVE_BYTES", 1000)
    program.write_archive(tmp_path / "run1.tar.xz", work)
    with tarfile.open(tmp_path / "run1.tar.xz") as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert (found["ops.json"], len(found["log.txt"]), found["log.txt"][-5:]) == (
        b"{}",
        998,
        b"xlast",
    )
    assert (tmp_path / "run1.tar.xz").stat().st_size < 16 << 20


def test_every_run_fits_its_limit() -> None:
    """`run_until` kills a part after its time, so the sum of all parts' times is the limit of a
    run.
    """
    for parts in program.RUNS.values():
        assert next(iter(parts)) == "compile"
        assert sum(parts.values()) <= program.RUN_LIMIT - program.RESERVE


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_gpu_and_unknown_part_are_one_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, reason in (
        ([], "no CUDA device"),
        (["--cpu-rehearsal", "--parts", "checks,nonsense"], "nonsense"),
    ):
        assert program.main([*words, "--out", str(tmp_path / "none")]) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert reason in line
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_rows_are_kept_only_with_resume(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the work folder, which a runner, unlike the output folder,
    does not clear before a run.
    """
    monkeypatch.setattr(program, "check_all", lambda *_: 0)
    kept = tmp_path / "work" / "run1" / "checks.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"rows": {"norm": {"passed": true}}}')
    words = [
        "--cpu-rehearsal",
        "--parts",
        "checks",
        "--out",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "work"),
    ]
    assert program.main([*words, *(["--resume"] if resume else [])]) == 0
    assert kept.exists() == resume


def test_hung_process_is_killed_at_its_deadline(tmp_path: Path) -> None:
    """Processes that run at the same time keep their exit codes."""
    started = time.monotonic()
    python = [sys.executable, "-c"]
    commands = [[*python, "import time; time.sleep(600)"], [*python, "raise SystemExit(3)"]]
    assert program.run_until(commands, tmp_path / "log.txt", started + 8, {}) == [None, 3]
    assert time.monotonic() - started < 60
    assert program.run_until(commands, tmp_path / "log.txt", started, {}) == [None, None]


def test_lost_device_loses_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the process that lost the device restarts,
    and continues after the row that crashed it.
    """
    codes = iter([[program.DEVICE_LOST, 0], [-11], [0]])
    started = []
    monkeypatch.setattr(
        program, "run_until", lambda commands, *_: started.append(commands) or next(codes)
    )
    assert program.supervise([["a"], ["b"]], tmp_path / "log", time.monotonic() + 10, {}) == ""
    assert started == [[["a"], ["b"]], [["a"]], [["a"]]]
    for code, reason in (
        (program.DEVICE_LOST, "lost"),
        (1, "code 1"),
        (None, "it ran out of time"),
    ):
        monkeypatch.setattr(program, "run_until", lambda *_, code=code: [code])
        assert reason in program.supervise([["a"]], tmp_path / "log", time.monotonic() + 10, {})


def test_rows_survive_errors_and_crashes(tmp_path):
    path = tmp_path / "rows.json"
    rows = Rows(path, CPU, {"device": "test"})
    rows.measure("good", lambda: {"rate": 1.0})
    rows.measure("bad", lambda: {"rate": 1 / 0})
    assert "ZeroDivisionError" in json.loads(path.read_text())["rows"]["bad"]["error"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "running": "deadly"}))
    rows = Rows(path, CPU, {"device": "test"})
    calls = []
    for name in ("good", "bad", "deadly", "next"):
        rows.measure(name, lambda n=name: calls.append(n) or {})
    assert calls == ["next"]
    content = json.loads(path.read_text())
    assert content["rows"]["deadly"] == {"error": LOST}
    assert list(content["rows"]) == ["good", "bad", "deadly", "next"]
    assert content["device"] == "test"


def test_failures_are_listed(tmp_path):
    rows = {
        "a": {"passed": True},
        "b": {"passed": False},
        "c": {"error": "Traceback\nRuntimeError: no"},
    }
    (tmp_path / "checks.json").write_text(json.dumps({"rows": rows, "running": "d"}))
    found = tables.failures(tmp_path, {"checks": "it ran out of time", "ops": ""})
    assert found == [
        "checks: b: differs by more than is allowed",
        "checks: c: RuntimeError: no",
        "checks: it ran out of time in d",
    ]


def test_required_packages_are_the_dependencies_of_mlbert(tree_root):
    named = tomllib.loads((tree_root / "pyproject.toml").read_text())["project"]["dependencies"]
    modules = {re.split(r"[<>=]", name)[0].replace("-", "_") for name in named} - {"torch", "numpy"}
    assert modules | {"yaml"} == set(program.REQUIRED)  # yaml is a dependency of OmegaConf


def test_missing_packages_and_compilers_are_reported(monkeypatch):
    monkeypatch.setattr(program, "PACKAGES", {"no_such_package": "nothing works"})
    monkeypatch.setattr(program.shutil, "which", lambda _: None)
    package, compiler = program.missing_things()
    assert package == "no package no_such_package: nothing works"
    assert "gcc" in compiler


def test_goals_use_the_fastest_step_of_each_precision():
    def row(speed: float, precision: str) -> dict:
        return {"sequences_per_second": speed, "precision": precision, "forms": {}}

    rows = {"slow": row(900.0, ""), "all": row(1035.0, ""), "fp8": row(1450.0, "fp8")}
    rows |= {
        "half": row(1500.0, "fp8-forward"),
        "huggingface eager": {"sequences_per_second": 100.0},
    }
    rows["broken"] = {"error": "no"}
    ((title, (_, bf16, fp8)),) = tables.goals_section(rows)
    assert title == "goals"
    assert bf16 == ["bf16", "all", "1035.0", "1150", "90.0%", "10.35"]
    assert fp8 == ["fp8", "fp8", "1450.0", "1450", "100.0%", "14.50"]
    assert tables.goals_section({"broken": {"error": "no"}}) == []
