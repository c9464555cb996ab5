"""Test and measure everything that needs a GPU, in three runs of less than ten minutes each
(docs/gpu.md).

gpu_check.sh starts this program. Each part runs in one or several separate processes, so a kernel
that hangs or breaks the device for its process costs only one row. Deadlines of parts count from
the start of the run, so a part that ends early leaves its time to the next. Parts write JSON files
row by row into a work folder, which later runs on the same machine read too. The tables and the
archive in the results folder are rewritten after each part.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_check.advice import next_lines
from gpu_check.external import part_command
from gpu_check.tables import failures, write_tables
from mlbert.host.files import whole_file

ROOT = Path(__file__).resolve().parents[2]
# Run -> part -> seconds, in order.
RUNS = {
    1: {"compile": 75, "smoke": 110, "checks": 100, "ops": 95, "profile": 45, "train": 110},
    2: {"compile": 60, "counters": 160, "nccl": 40, "step": 150, "tests": 130},
    3: {"compile": 60, "record": 400, "losses": 90},
}
# seconds of a run, and of them for starting and the last archive
RUN_LIMIT = 600
RESERVE = 45
PARTS = {part: seconds for run in RUNS.values() for part, seconds in run.items()}
COMPILE_PROCESSES = 16
# Parts whose rehearsal interprets the Triton kernels; the others use the CPU's kernels.
INTERPRETED = ("checks",)
MAX_RESTARTS = 4
LINE_SECONDS = 20.0  # between two lines about a running part
DEVICE_LOST = 3
LOG = "log.txt"
ARCHIVE_BYTES = 15 << 20  # before compression; the archive must stay below 16 MiB
# For tests: names a module that replaces GPU libraries. Every process imports it first.
STAND_INS = "GPU_CHECK_STAND_INS"
# Imported by mlbert, besides torch and numpy.
REQUIRED = (
    "h5py",
    "jinja2",
    "matplotlib",
    "mlperf_logging",
    "omegaconf",
    "pydantic",
    "rich",
    "safetensors",
    "scipy",
    "tokenizers",
    "typer",
    "xxhash",
    "yaml",
)
PACKAGES = {
    **dict.fromkeys(REQUIRED, "nothing can be measured without it"),
    "triton": "there are no fast kernels without it",
    "pytest": "the part tests needs it",
    "transformers": "there is no comparison with Hugging Face without it",
}


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Test and measure what needs a GPU; see docs/gpu.md."
    )
    parser.add_argument(
        "--run",
        type=int,
        choices=RUNS,
        default=1,
        help="which of the three runs (default: the first)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: records/<date>_gpu-check_<gpu>)"
    )
    work = Path(tempfile.gettempdir()) / "mlbert-gpu-check"
    parser.add_argument(
        "--work", type=Path, default=work, help=f"folder shared by all runs (default: {work})"
    )
    parser.add_argument(
        "--parts", help=f"run only these, of any run, separated by commas: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--cpu-rehearsal", action="store_true", help="try the program with tiny shapes on the CPU"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows in --work and measure only the others"
    )
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if module := os.environ.get(STAND_INS):
        importlib.import_module(module)
    import torch

    device = torch.device("cpu" if options.cpu_rehearsal else "cuda")
    work = options.work.resolve()
    if options.run_part:
        return run_part(options.run_part, options.share, work / f"run{options.run}", device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device found; --cpu-rehearsal tries the program on the CPU")
        return 2
    parts = RUNS[options.run]
    if options.parts:
        chosen = options.parts.split(",")
        if unknown := set(chosen) - set(PARTS):
            print(
                f"gpu_check: there is no part {sorted(unknown)[0]!r}; "
                f"the parts are {', '.join(PARTS)}"
            )
            return 2
        parts = {part: seconds for part, seconds in PARTS.items() if part in chosen}
    out = (options.out or default_folder(device)).resolve()
    work = work / f"run{options.run}"
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for stale in (
            path for path in work.iterdir() if path.name.partition(".")[0] in (*parts, "log")
        ):
            stale.unlink()
    return check_all(options.run, parts, out, work, options.cpu_rehearsal)


def default_folder(device: Any) -> Path:
    """Return records/<date>_gpu-check_<gpu>."""
    from gpu_check.hardware import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return (
        ROOT / "records" / f"{datetime.now(UTC):%Y-%m-%d}_gpu-check_{name.removeprefix('nvidia-')}"
    )


def check_all(run: int, parts: dict[str, int], out: Path, work: Path, rehearsal: bool) -> int:
    """Run the parts in order, and write the tables and the archive after each of them."""
    # Terminating this program must terminate the running part.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    ends = {}
    missing = missing_things()
    for line in missing:
        print(f"gpu_check: {line}", flush=True)
    for part, deadline in zip(parts, itertools.accumulate(parts.values()), strict=True):
        seconds = time.monotonic() - started
        most = sum(parts.values())
        print(
            f"gpu_check: {part}, {seconds:.0f} s after the start, "
            f"at most {most - seconds:.0f} s left",
            flush=True,
        )
        command = part_command(part, work, rehearsal)
        commands = [[*command, "--share", share] for share in shares(part, rehearsal)]
        variables = {"TRITON_INTERPRET": "1"} if rehearsal and part in INTERPRETED else {}
        ends[part] = supervise(commands, work / LOG, started + deadline, variables)
        following = next_lines(run, work, ends)
        write_tables(out, work, ends, rehearsal, missing, following)
        write_archive(out / f"run{run}.tar.xz", work)
    print((out / "table.txt").read_text())
    seconds = time.monotonic() - started
    failed = failures(work, ends)
    print(
        f"gpu_check: {seconds:.0f} s, results in {out}, "
        f"{f'{len(failed)} failed' if failed else 'nothing failed'}"
    )
    print("\n".join(following))
    return 1 if failed else 0


def shares(part: str, rehearsal: bool) -> list[str]:
    """Return the names of a part's processes; most parts have one process with an empty name."""
    if part == "tests":
        return sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    count = 1 if rehearsal else max(1, min(COMPILE_PROCESSES, (os.cpu_count() or 2) - 1))
    return (
        ["fmha", *(f"{index}-of-{count}" for index in range(count))] if part == "compile" else [""]
    )


def write_archive(path: Path, work: Path) -> None:
    """Pack the files of the work folder, the smallest first;
    if they are too large, drop the start of the last ones.
    """
    left = ARCHIVE_BYTES
    with whole_file(path) as output, tarfile.open(fileobj=output, mode="w:xz") as archive:
        for file in sorted(
            (file for file in work.iterdir() if file.is_file()),
            key=lambda file: file.stat().st_size,
        ):
            content = file.read_bytes()[-left:] if left else b""
            entry = tarfile.TarInfo(file.name)
            entry.size = len(content)
            left = max(0, left - len(content))
            archive.addfile(entry, io.BytesIO(content))


def missing_things() -> list[str]:
    """Return a line for each missing package or program, with the consequence."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    found = [f"no package {name}: {PACKAGES[name]}" for name in missing]
    compilers = [
        name for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and shutil.which(name)
    ]
    if not compilers:
        found.append("no C compiler, which Triton needs to launch kernels: install gcc, or set CC")
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        found.append("no Python.h, which Triton needs to compile its launcher: install python3-dev")
    return found


def supervise(
    commands: Sequence[list[str]], log: Path, deadline: float, variables: dict[str, str]
) -> str:
    """Run a part's processes at the same time; restart those that lost the device,
    to continue after that row.

    Returns the reason why the part is incomplete, or an empty string.
    """
    for _ in range(MAX_RESTARTS):
        codes = run_until(commands, log, deadline, variables)
        if None in codes:
            return "it ran out of time"
        # A process that a signal ended (a driver's crash, a kernel's assertion) has lost the device
        # too.
        if failed := [
            code for code in codes if code is not None and code > 0 and code != DEVICE_LOST
        ]:
            return f"it ended with code {failed[0]}; see {LOG}"
        commands = [command for command, code in zip(commands, codes, strict=True) if code]
        if not commands:
            return ""
    return f"the device was lost {MAX_RESTARTS} times"


def run_until(
    commands: Sequence[list[str]], log: Path, deadline: float, variables: dict[str, str]
) -> list[int | None]:
    """Run the commands and return their exit codes;
    None for a process group that was killed at the deadline.
    """
    if deadline - time.monotonic() <= 1:
        return [None] * len(commands)
    processes: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    try:
        with log.open("ab") as file:
            for command in commands:
                options: dict[str, Any] = {
                    "stdout": file,
                    "stderr": subprocess.STDOUT,
                    "start_new_session": True,
                }
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, **options)
                )
        codes += [wait_until(process, deadline) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return codes


def wait_until(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit code, or None at the deadline; print the remaining time now and then."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            return process.wait(timeout=min(left, LINE_SECONDS))
        except subprocess.TimeoutExpired:
            print(f"gpu_check: this part has at most {left:.0f} s left", flush=True)
    return process.poll()


def run_part(part: str, share: str, work: Path, device: Any) -> int:
    """Run one part, or a share of it, in this process, and return the exit code."""
    path = work / (f"{part}.{share}.json" if share else f"{part}.json")
    if part == "tests":
        return run_tests(path, share, device)
    from gpu_check.parts import run_part as measure
    from gpu_check.rows import DeviceLost

    try:
        measure(part, share, path, device)
    except DeviceLost as error:
        print(f"{part}: {error}", flush=True)
        return DEVICE_LOST
    return 0


def run_tests(path: Path, module: str, device: Any) -> int:
    """Run one file of tests/gpu, and write each test's outcome as a row when it is known."""
    import pytest

    from gpu_check.hardware import environment_facts

    class Recorder:
        def __init__(self) -> None:
            self.rows: dict[str, Any] = {}

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when != "call" and report.passed:
                return
            row: dict[str, Any] = {
                "outcome": report.outcome,
                "wall_seconds": round(report.duration, 3),
            }
            if report.failed:
                row["error"] = report.longreprtext
            elif report.skipped:
                row["skipped"] = str(
                    report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
                )
            self.rows[report.nodeid] = row
            path.write_text(
                json.dumps({**facts, "rows": self.rows}, indent=1) + "\n", encoding="utf-8"
            )

    facts = environment_facts(device)
    recorder = Recorder()
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = pytest.main([str(ROOT / "tests" / "gpu" / f"{module}.py"), *options], plugins=[recorder])
    known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return 0 if code in known and recorder.rows else 10 + int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
