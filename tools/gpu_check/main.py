"""Everything that needs a GPU, in one command; see docs/gpu.md. Started by tools/gpu_check.sh.

Each part is a process of its own, so that a kernel that breaks the device for its process, or hangs, costs one row. A
part may run until its deadline, counted from the start: what one leaves goes to the next. Each part writes a JSON file
row by row, and the tables are written again after each part. The first measures what matters most; then processes
beside each other compile the others' kernels, which are then found in Triton's cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_check.tables import failures, write_tables

ROOT = Path(__file__).resolve().parents[2]
# Part -> seconds after the start at which it is ended, in the order in which they run. The last one is the hard stop.
DEADLINES = {"smoke": 90, "checks": 240, "ops": 310, "step": 445, "profile": 485, "tests": 560, "tune": 560}
LATER = "tune"  # for a second call, by its name
PARTS_HELP = f"of {', '.join(DEADLINES)}; default: all but {LATER}"
SMOKE = "smoke"  # comes before the others' kernels are compiled
COMPILE_SECONDS, COMPILE_PROCESSES = 90, 12
# Parts whose rehearsal interprets the Triton kernels, where Triton is installed; the others take the CPU's own.
INTERPRETED = ("checks", "ops", "tune")
MAX_RESTARTS = 4
DEVICE_LOST = 3
LOG = "log.txt"
PROGRAM = (sys.executable, "-m", "gpu_check.main")
PACKAGES = {
    "triton": "there are no fast kernels then",
    "h5py": "nothing can be measured without it",
    "pytest": "the part tests needs it",
    "transformers": "there is no comparison with Hugging Face then",
}


def main(words: list[str]) -> int:
    """Runs what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description="Tests and measures what needs a GPU; see docs/gpu.md.")
    parser.add_argument("--out", type=Path, help="folder for the results; default records/<date>_gpu-check_<gpu>")
    parser.add_argument("--parts", default=",".join(part for part in DEADLINES if part != LATER), help=PARTS_HELP)
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny shapes on the CPU, to try this program")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --out, and measure the others")
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    import torch

    device = torch.device("cpu" if options.cpu_rehearsal else "cuda")
    if options.shard:
        from gpu_check.parts import compile_kernels

        compile_kernels(device, *options.shard)
        return 0
    if options.call:
        from gpu_check.parts import call

        call(device, options.call)
        return 0
    if options.run_part:
        return run_part(options.run_part, options.out, device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; --cpu-rehearsal tries the program itself on the CPU")
        return 2
    parts = options.parts.split(",")
    if unknown := set(parts) - set(DEADLINES):
        print(f"gpu_check: no part is called {sorted(unknown)[0]!r}; there are {', '.join(DEADLINES)}")
        return 2
    out = options.out or default_folder(device)
    out.mkdir(parents=True, exist_ok=True)
    chosen, out = [part for part in DEADLINES if part in parts], out.resolve()
    if not options.resume:
        for stale in [*(out / f"{part}.json" for part in chosen), out / LOG]:
            stale.unlink(missing_ok=True)
    return check_all(chosen, out, options.cpu_rehearsal)


def default_folder(device: Any) -> Path:
    """records/<date>_gpu-check_<gpu>."""
    from gpu_check.hardware import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return ROOT / "records" / f"{datetime.now(UTC):%Y-%m-%d}_gpu-check_{name.removeprefix('nvidia-')}"


def check_all(parts: list[str], out: Path, rehearsal: bool) -> int:
    """Runs the parts one after the other, the tables after each."""
    # So that ending this program ends the part that is running.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started, ends = time.monotonic(), {}
    for line in (missing := missing_things()):
        print(f"gpu_check: {line}", flush=True)
    for part in parts:
        if part == next((name for name in parts if name != SMOKE), None):
            print("gpu_check: compiling kernels", flush=True)
            compile_all(out / LOG, time.monotonic() + COMPILE_SECONDS, rehearsal)
            print(f"gpu_check: compiled, {time.monotonic() - started:.0f} s after the start", flush=True)
        print(f"gpu_check: {part}", flush=True)
        ends[part] = supervise(part, out, started + DEADLINES[part], rehearsal)
        write_tables(out, parts, ends, rehearsal, missing)
    print((out / "table.txt").read_text())
    seconds = time.monotonic() - started
    failed = failures(out, parts, ends)
    for unfinished in out.glob("*.tmp"):
        unfinished.unlink()
    print(f"gpu_check: {seconds:.0f} s, results in {out}, {f'{len(failed)} failed' if failed else 'nothing failed'}")
    return 1 if failed else 0


def missing_things() -> list[str]:
    """One line for each thing that this machine lacks, with what follows from it."""
    found = [
        f"no package {name}: {result}" for name, result in PACKAGES.items() if importlib.util.find_spec(name) is None
    ]
    compilers = [name for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and shutil.which(name)]
    if not compilers:
        found.append("no C compiler: Triton can't start its kernels without; install gcc, or name one in CC")
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        found.append("no Python.h, which Triton compiles its launcher with: install python3-dev")
    return found


def compile_all(log: Path, deadline: float, rehearsal: bool) -> None:
    """Fills Triton's cache by as many processes as there are cores to spare; what they tell goes to the log."""
    count = 1 if rehearsal else max(1, min(COMPILE_PROCESSES, (os.cpu_count() or 1) - 2))
    command = [*PROGRAM, *(["--cpu-rehearsal"] if rehearsal else [])]
    processes = []
    with log.open("ab") as file:
        for shard in range(count):
            words = [*command, "--shard", str(shard), str(count)]
            options = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT, "start_new_session": True}
            processes.append(subprocess.Popen(words, **options))
    try:
        for process in processes:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print("gpu_check: the kernels took too long; the parts go on compiling", flush=True)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def supervise(part: str, out: Path, deadline: float, rehearsal: bool) -> str:
    """Runs a part, again behind the row in which the device was lost; returns how it ended, empty when complete."""
    command = [*PROGRAM, "--run-part", part, "--out", str(out)]
    command += ["--cpu-rehearsal"] if rehearsal else []
    variables = {"TRITON_INTERPRET": "1"} if rehearsal and part in INTERPRETED else {}
    for _ in range(MAX_RESTARTS):
        code = run_until(command, out / LOG, deadline, variables)
        if code is None:
            return "its time was over"
        if code == 0:
            return ""
        # A signal (a crash of the driver or a kernel's assertion) is recorded as the end of the row, too.
        if code != DEVICE_LOST and code > 0:
            return f"it ended with code {code}; see {LOG}"
    return f"the device was lost {MAX_RESTARTS} times"


def run_until(command: list[str], log: Path, deadline: float, variables: dict[str, str]) -> int | None:
    """The exit code; None where the process, and what it started, had to be ended."""
    left = deadline - time.monotonic()
    if left <= 1:
        return None
    with log.open("ab") as file:
        environment = {**os.environ, **variables}
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            return process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_part(part: str, out: Path, device: Any) -> int:
    """One part in this process."""
    if part == "tests":
        return run_tests(out / "tests.json", device)
    from gpu_check.parts import run_part as measure
    from gpu_check.rows import DeviceLost

    try:
        measure(part, out / f"{part}.json", device)
    except DeviceLost as error:
        print(f"{part}: {error}", flush=True)
        return DEVICE_LOST
    return 0


def run_tests(path: Path, device: Any) -> int:
    """The tests marked gpu; each one's outcome is a row, written when it is known."""
    import pytest

    from gpu_check.hardware import environment_facts

    class Recorder:
        def __init__(self) -> None:
            self.rows: dict[str, Any] = {}

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when != "call" and report.passed:
                return
            row: dict[str, Any] = {"outcome": report.outcome, "wall_seconds": round(report.duration, 3)}
            if report.failed:
                row["error"] = report.longreprtext
            elif report.skipped:
                row["skipped"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            self.rows[report.nodeid] = row
            path.write_text(json.dumps({**facts, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    facts, recorder = environment_facts(device), Recorder()
    arguments = [str(ROOT / "tests" / "gpu"), "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = pytest.main(arguments, plugins=[recorder])
    known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return 0 if code in known and recorder.rows else 10 + int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
