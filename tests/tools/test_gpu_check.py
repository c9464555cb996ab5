"""tools/gpu_check.sh: dry runs of both calls on the CPU, their limits, and parts that fail."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated_cublaslt import compile_emulator
from gpu_check import decisions, external
from gpu_check import main as program
from gpu_check.calls import CALLS, LIMITS, RESERVE
from gpu_check.parts import parts_by_name
from gpu_check.rows import Rows, read_rows
from gpu_check.stage import Stage
from programs import run_checked, run_quietly, write_program

TOOLS = Path(__file__).parents[1] / "assets" / "gpu_tools"
MOST_FILES = 8
# Milliseconds and joules of a variant in both halves, and the decision. The baseline has 100 and
# 50, then 102 and 51.
CASES = {
    "faster and cheaper in both halves": ((98.0, 49.0), (100.0, 50.0), True),
    "not by one percent in a half": ((98.0, 49.0), (101.5, 50.0), False),
    "faster, but not cheaper": ((90.0, 50.0), (90.0, 51.0), False),
    "a half is missing": ((90.0, 45.0), None, None),
    "joules are not measured": ((90.0, None), (90.0, None), None),
}

# Runs the part `tests` without a test that exists. Arguments: tools, and the folder of the results.
NO_TESTS = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import torch

from gpu_check import parts

out = Path(sys.argv[2])
parts.GPU_TESTS = ("test_none.py",)
parts.run_part("tests", 2, out, out, out / "call1.jsonl", torch.device("cpu"))
"""


def dry_run(
    tree_root: Path, out: Path, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    if not (folder / "libcublaslt.so").exists():
        compile_emulator(folder / "libcublaslt.so")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PATH": f"{TOOLS}:{os.environ['PATH']}",
        "EMULATED": str(folder),
        "PYTHONPATH": str(tree_root / "tests"),
        "GPU_CHECK_STAND_INS": "gpu_stand_ins",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **variables,
    }
    command = [tree_root / "tools/gpu_check.sh", "--dry-run", "--out", out, "--work", folder]
    return run_quietly(*command, *words, env=environment)


def is_running(process: int) -> bool:
    """Return False also for one that has ended but was not waited for."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dry_run_of_both_calls_measures_every_part(tree_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows: dict[int, list[dict[str, Any]]] = {}
    for call in CALLS:
        done = dry_run(tree_root, out, tmp_path, "--call", str(call))
        assert done.returncode == 0, done.stdout + done.stderr
        rows[call] = read_rows(out / f"call{call}.jsonl")
        measured = {row["part"] for row in rows[call]}
        planned = {part for stage in CALLS[call] for part in stage.parts}
        # Without a GPU pytest skips the GPU's tests.
        assert measured == planned
        assert [row for row in rows[call] if "error" in row or "stopped" in row] == []
    assert len(list(out.iterdir())) <= MOST_FILES
    sides = {row["side"] for row in rows[1] if "side" in row}
    for size in ("bert fp8 auto", "bert fp8 fused", "modernbert base 64 fp8", "transformers bert"):
        assert size in sides
    of_bert = [row["side"] for row in rows[1] if row["part"] == "turns-bert" and "side" in row]
    for precision in ("fp8", "bf16"):
        order = [side for side in of_bert if f" {precision} " in side]
        assert order == list(reversed(order))
    step = next(row for row in rows[1] if row.get("side") == "modernbert base 32 bf16")
    assert step["matrix_share"] > 0
    assert step["power"]["watts"] == 612.4
    assert step["energy"] == "dry run: not measured"
    gemm = [row for row in rows[1] if row["row"].startswith("GEMM")]
    assert gemm
    for row in gemm:
        assert str(row["by_time"]) in row["algorithms"]
    counters = next(row for row in rows[1] if row["part"] == "counters")["kernels"]
    assert counters["attention_forward_kernel"]["l2_percent"] == 38.25
    verdicts = json.loads((out / "call1-decisions.json").read_text())
    assert set(verdicts) == {
        "bert bf16 auto",
        "bert bf16 qkv",
        "bert bf16 gluon-attention",
        "bert fp8 fused",
        "bert fp8 slopes",
        "bert fp8 gluon",
        "bert fp8 qkv",
        "bert fp8 fastest",
        "modernbert base 32 bf16 gluon-attention",
        "modernbert base 64 bf16 gluon-attention",
    }
    text = (out / "call1.txt").read_text()
    assert text.startswith("dry run: ")
    assert "of the goal of" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parts_that_hang_crash_or_fail_cost_only_themselves(
    tree_root: Path, tmp_path: Path
) -> None:
    parts = "turns-modernbert,kernels,opponent-bert"
    out = tmp_path / "out"
    done = dry_run(tree_root, out, tmp_path, "--parts", parts, INJECTED="hang,crash,error")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = read_rows(out / "call1.jsonl")
    ends = {row["part"]: row for row in rows if row["row"] == "end"}
    assert ends["turns-modernbert"]["error"] == "exit code -9; see the log"
    assert "longer than its seconds" in ends["kernels"]["stopped"]
    failed = next(row for row in rows if row["row"] == "transformers bert: made")
    assert "ptxas exited with code 255" in failed["error"]
    assert [row for row in rows if row.get("side") == "bert bf16, next to transformers"]
    text = (out / "call1.txt").read_text()
    assert text.count("failed: ") == 2
    assert text.count("stopped: ") == 1


def test_every_call_fits_its_limit_by_construction() -> None:
    """A stage is stopped after its seconds, so their sum is the limit of a call."""
    for call, stages in CALLS.items():
        assert sum(stage.seconds for stage in stages) + RESERVE[call] <= LIMITS[call]
    assert LIMITS == {1: 420, 2: 240}
    known = {part for stages in CALLS.values() for stage in stages for part in stage.parts}
    started_by_tools = {"memchecked", "racechecked", "counted"}
    assert known | started_by_tools == set(parts_by_name())


def test_stage_stops_what_hangs_and_keeps_the_others(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    # A shell, which starts at once on a busy machine. Its arguments are --part and the name.
    command = ["sh", "-c", 'if [ "$1" = hangs ]; then sleep 600; fi; exit 3']
    started = time.monotonic()
    stage = Stage(0, ("hangs", "fails"))
    program.run_stage(stage, command, rows, tmp_path / "log", started + 3, tmp_path)
    assert time.monotonic() - started < 120
    found = {row["part"]: row for row in read_rows(rows)}
    assert "longer than" in found["hangs"]["stopped"]
    assert found["fails"]["error"].startswith("exit code 3")
    late = tmp_path / "late.jsonl"
    program.run_stage(stage, command, late, tmp_path / "log", started, tmp_path)
    assert [row["stopped"] for row in read_rows(late)] == ["no time was left"] * 2


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """It would use the GPU while the next part measures."""
    log = tmp_path / "log"
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    command = [sys.executable, "-c", code]
    deadline = time.monotonic() + 120
    program.run_stage(Stage(0, ("leaves",)), command, tmp_path / "rows", log, deadline, tmp_path)
    orphan = int(log.read_text())
    while is_running(orphan):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_missing_tests_are_a_failure(tree_root: Path, tmp_path: Path) -> None:
    run_checked(
        sys.executable, write_program(tmp_path / "run.py", NO_TESTS), tree_root / "tools", tmp_path
    )
    (row,) = read_rows(tmp_path / "call2.jsonl")
    assert "no tests ran" in row["error"]


def test_rows_of_parts_that_run_again_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "call1.jsonl"
    for part in ("kernels", "turns-bert"):
        Rows(path, part).append("row", {})
    program.remove_rows(path, {"kernels", "counters"})
    assert [row["part"] for row in read_rows(path)] == ["turns-bert"]
    program.remove_rows(tmp_path / "new.jsonl", {"kernels"})
    assert read_rows(tmp_path / "new.jsonl") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_gpu_and_unknown_part_are_one_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, reason in (
        ([], "no CUDA device"),
        (["--dry-run", "--parts", "kernels,nonsense"], "nonsense"),
    ):
        assert program.main([*words, "--out", str(tmp_path / "none")]) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert reason in line
        assert not (tmp_path / "none").exists()


def test_rows_survive_errors_and_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path, "part")
    rows.measure("good", lambda: {"rate": 1.0})
    rows.measure("bad", lambda: {"rate": 1 / 0})
    with path.open("a") as file:
        file.write('{"part": "part", "row": "cut')
    good, bad = read_rows(path)
    assert (good["part"], good["row"], good["rate"]) == ("part", "good", 1.0)
    assert "ZeroDivisionError" in bad["error"]
    assert read_rows(tmp_path / "none") == []


def turn(side: str, half: int, ms: float, joules: float | None, **more: Any) -> dict[str, Any]:
    found = {"part": "turns", "row": side, "side": side, "half": half, "ms": ms}
    return found | {"joules_per_unit": joules, "per_second": 1e3 / ms, "unit": "steps"} | more


@pytest.mark.parametrize("case", CASES)
def test_variant_is_adopted_only_if_it_wins_twice(case: str) -> None:
    first, second, verdict = CASES[case]
    rows = [turn("a", 1, 100.0, 50.0), turn("a", 2, 102.0, 51.0)]
    for half, measured in ((1, first), (2, second)):
        if measured:
            ms, joules = measured
            rows.append(turn("b", half, ms, joules, baseline="a"))
    assert decisions.adopted(rows) == {"b": verdict}
    line = decisions.decision_lines(rows)[0]
    start = {True: "adopt: b", False: "keep out: b", None: "not decided: b"}[verdict]
    assert line.startswith(start)


def test_lines_name_goals_opponents_and_failures() -> None:
    rows = [
        turn("bert fp8 auto", 1, 1e3 / 725, 0.5, opponent="theirs"),
        turn("theirs sdpa", 1, 1e3 / 145, 2.0),
        turn("theirs flex", 1, 1e3 / 290, 2.0),
        {"part": "kernels", "row": "x", "error": "Traceback\nRuntimeError: no"},
        {"part": "memcheck", "row": "y", "passed": False},
        {"part": "counters", "row": "ncu", "skipped": "ncu is not installed"},
    ]
    lines = decisions.decision_lines(rows)
    assert "50% of the goal of 1,450" in lines[0]
    assert "2.50 times the fastest turn of theirs" in lines[0]
    assert lines[-3:] == [
        "failed: kernels: x: RuntimeError: no",
        "failed: memcheck: y",
        "skipped: counters: ncu: ncu is not installed",
    ]


def test_required_packages_are_the_dependencies_of_mlbert(tree_root: Path) -> None:
    named = tomllib.loads((tree_root / "pyproject.toml").read_text())["project"]["dependencies"]
    modules = {re.split(r"[<>=]", name)[0].replace("-", "_") for name in named} - {"torch", "numpy"}
    assert modules | {"yaml"} == set(program.REQUIRED)  # yaml is a dependency of OmegaConf


def test_missing_packages_and_compilers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PACKAGES", {"no_such_package": "nothing works"})
    monkeypatch.setattr(program.shutil, "which", lambda _: None)
    package, compiler = program.missing_things()
    assert package == "no package no_such_package: nothing works"
    assert "gcc" in compiler


def test_output_of_ncu_and_compute_sanitizer_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{TOOLS}:{os.environ['PATH']}")
    found = external.count_kernels(["product_kernel"], ["true"], 60)["kernels"]
    assert found["product_kernel"] == {
        "nanoseconds": 203456.0,
        "memory_percent": 30.5,
        "registers": 128.0,
    }
    found = external.count_kernels(["cast_kernel"], ["true"], 60)
    assert found == {"skipped": "ncu: ==ERROR== ERR_NVGPUCTRPERM"}
    lines = (
        "Invalid __global__ write of size 4 bytes",
        "    at cast_kernel",
        "ERROR SUMMARY: 2 errors",
    )
    report = "\n".join(f"========= {line}" for line in lines)
    write_program(
        tmp_path / "compute-sanitizer", f"#!/bin/bash\ncat <<'END'\n{report}\nEND\nexit 9\n"
    )
    found = external.sanitize(["true"], 60)
    assert (found["passed"], found["errors"]) == (False, 2)
    assert "Invalid __global__ write" in found["first_errors"][0]
    write_program(tmp_path / "compute-sanitizer", "#!/bin/bash\nsleep 60\n")
    assert external.sanitize(["true"], 0.5) == {"skipped": "compute-sanitizer took longer than 0 s"}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert external.sanitize(["true"], 5) == {"skipped": "compute-sanitizer is not installed"}


def test_nothing_changes_the_settings_of_the_gpu() -> None:
    """Others may use the GPU, so its clocks are never locked,
    which ncu would do without --clock-control none.
    """
    text = "".join(path.read_text() for path in Path(external.__file__).parent.glob("*.py"))
    words = r"lock-gpu-clocks|-lgc|applications-clocks|--power-limit|persistence|gpu-reset"
    assert re.findall(words, text) == []
    assert external.NCU[:2] == ("--clock-control", "none")
    # The part `counted` turns profiling on for its step.
    assert external.NCU[2:4] == ("--profile-from-start", "off")
