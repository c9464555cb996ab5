"""Everything that needs a GPU, in one command; see docs/gpu.md. Started by tools/gpu_check.sh.

Each part is a process of its own, so that a kernel that breaks the device for its process, or hangs, costs one row. A
part may run until its deadline, counted from the start: what one leaves goes to the next. Each part writes a JSON file
row by row, and the tables are written again after each part. Before the first, processes beside each other compile the
kernels, which are then found in Triton's cache.
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
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Part -> seconds after the start at which it is ended, in the order in which they run. The last one is the hard stop.
DEADLINES = {"checks": 130, "ops": 215, "step": 400, "profile": 455, "tests": 550}
COMPILE_DEADLINE, COMPILE_PROCESSES = 60, 12
# Parts whose rehearsal interprets the Triton kernels, where Triton is installed; the others take the CPU's own.
INTERPRETED = ("checks", "ops")
MAX_RESTARTS = 4
DEVICE_LOST = 3
LOG = "log.txt"
# Sequences a second that one H200 is meant to reach, by precision.
GOALS = {"bf16": 1100.0, "fp8": 1400.0}
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
    parser.add_argument("--parts", default=",".join(DEADLINES), help=f"of {', '.join(DEADLINES)}; default all")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny shapes on the CPU, to try this program")
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    import torch

    device = torch.device("cpu" if options.cpu_rehearsal else "cuda")
    if options.shard:
        from mlbert.bench.gpu_parts import compile_kernels

        compile_kernels(device, *options.shard)
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
    return check_all([part for part in DEADLINES if part in parts], out.resolve(), options.cpu_rehearsal)


def default_folder(device: Any) -> Path:
    """records/<date>_gpu-check_<gpu>."""
    from mlbert.bench.hardware import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return ROOT / "records" / f"{datetime.now(UTC):%Y-%m-%d}_gpu-check_{name.removeprefix('nvidia-')}"


def check_all(parts: list[str], out: Path, rehearsal: bool) -> int:
    """Runs the parts one after the other, the tables after each."""
    # So that ending this program ends the part that is running.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for stale in [*(out / f"{part}.json" for part in parts), out / LOG]:
        stale.unlink(missing_ok=True)
    started, ends = time.monotonic(), {}
    for line in (missing := missing_things()):
        print(f"gpu_check: {line}", flush=True)
    print("gpu_check: compiling kernels", flush=True)
    compile_all(out / LOG, started + COMPILE_DEADLINE, rehearsal)
    print(f"gpu_check: compiled for {time.monotonic() - started:.0f} s", flush=True)
    for part in parts:
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
    command = [sys.executable, str(Path(__file__).resolve()), *(["--cpu-rehearsal"] if rehearsal else [])]
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
    command = [sys.executable, str(Path(__file__).resolve()), "--run-part", part, "--out", str(out)]
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
    from mlbert.bench.gpu_parts import run_part as measure
    from mlbert.bench.rows import DeviceLost

    try:
        measure(part, out / f"{part}.json", device)
    except DeviceLost as error:
        print(f"{part}: {error}", flush=True)
        return DEVICE_LOST
    return 0


def run_tests(path: Path, device: Any) -> int:
    """The tests marked gpu; each one's outcome is a row, written when it is known."""
    import pytest

    from mlbert.bench.hardware import environment_facts

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


def failures(out: Path, parts: list[str], ends: dict[str, str]) -> list[str]:
    """One line for each row or part that failed."""
    found = []
    for part in parts:
        for name, row in read_rows(out, part).items():
            if "error" in row:
                found.append(f"{part}: {name}: {row['error'].strip().splitlines()[-1]}")
            elif row.get("passed") is False:
                found.append(f"{part}: {name}: differs by more than is allowed")
        if ends.get(part):
            running = read(out, part).get("running")
            found.append(f"{part}: {ends[part]}{f' in {running}' if running else ''}")
    return found


def read(out: Path, part: str) -> dict[str, Any]:
    """What a part has written so far."""
    path = out / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_rows(out: Path, part: str) -> dict[str, dict[str, Any]]:
    """Its rows by name."""
    return read(out, part).get("rows", {})


def write_tables(
    out: Path, parts: list[str], ends: dict[str, str], rehearsal: bool, missing: Sequence[str] = ()
) -> None:
    """table.txt and table.md from what there is."""
    facts = next((found for part in parts if (found := read(out, part))), {})
    head = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("rows", "running"))
    head = f"REHEARSAL on tiny shapes: the figures mean nothing. {head}" if rehearsal else head
    sections: list[tuple[str, list[list[str]]]] = []
    for part in ends:
        rows = TABLES[part](read_rows(out, part))
        if len(rows) > 1:
            sections.append((part, rows))
        sections += goals_section(read_rows(out, part)) if part == "step" else []
        sections += budget_section(read_rows(out, part)) if part == "profile" else []
    failed = [*missing, *failures(out, list(ends), ends)]
    text, markdown = [head, ""], ["# GPU check", "", head or "Nothing measured.", ""]
    for title, rows in sections:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        text += [
            f"== {title}",
            *("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows),
            "",
        ]
        lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
        markdown += [f"## {title}", "", lines[0], f"|{'---|' * len(widths)}", *lines[1:], ""]
    text += ["== failed", *(failed or ["nothing"]), ""]
    markdown += ["## failed", "", *(f"* {line}" for line in failed or ["nothing"]), ""]
    for name, lines in (("table.txt", text), ("table.md", markdown)):
        temporary = out / f"{name}.tmp"
        temporary.write_text("\n".join(lines), encoding="utf-8")
        os.replace(temporary, out / name)


def number(value: Any, form: str = ".1f", factor: float = 1.0) -> str:
    """A number as text; a dash for what is not there."""
    return "-" if value is None else f"{value * factor:{form}}"


def state(row: dict[str, Any]) -> str:
    """What became of a row."""
    if "error" in row:
        return "ERROR"
    return "skipped" if "skipped" in row else {True: "ok", False: "FAILED"}.get(row.get("passed"), "ok")


def rate(row: dict[str, Any], name: str = "rate") -> str:
    """A rate with its unit: memory in TB/s, arithmetic in TFLOP/s."""
    value = row.get(name)
    return "-" if value is None else f"{value:.3g} {row['unit']}"


def checks_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Errors as shares of what PyTorch's are at most, at the worst place."""
    table = [["check", "result", "worst error / PyTorch's", "twice the same", "remark"]]
    for name, row in rows.items():
        repeats = {True: "yes", False: "no"}.get(row.get("repeats"), "-")
        remark = f"keeps {row['kept']:.5f}, wanted {row['wanted']:.5f}" if "kept" in row else ""
        table.append([name, state(row), number(row.get("worst_ratio"), ".2f"), repeats, remark])
    return table


def ops_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Times in milliseconds."""
    table = [["op", "forward ms", "backward ms", "forward rate", "backward rate", "rate", "of peak", "result"]]
    for name, row in rows.items():
        forward = row.get("forward_seconds", row.get("step_seconds"))
        times = [number(forward, ".3f", 1e3), number(row.get("backward_seconds"), ".3f", 1e3)]
        rates = [rate(row, f"{which}rate") for which in ("forward_", "backward_", "")]
        table.append([name, *times, *rates, number(row.get("share_of_peak"), ".0%"), state(row)])
    return table


def step_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rates in sequences per second; the last column compares with the faster of Hugging Face's."""
    peer = max((row.get("sequences_per_second", 0.0) for n, row in rows.items() if "huggingface" in n), default=0.0)
    head = ["step", "sequences", "tokens", "ms", "sequences/s", "model TFLOP/s", "of bf16 peak", "of FP8 peak", "GiB"]
    table = [[*head, "x Hugging Face", "result"]]
    for name, row in rows.items():
        speed = row.get("sequences_per_second")
        milliseconds = sorted(row["seconds"])[len(row["seconds"]) // 2] if "seconds" in row else None
        wide = f", {row['did_not_fit']} did not fit" if "did_not_fit" in row else ""
        table.append(
            [
                *(name, number(row.get("sequences"), ".0f"), number(row.get("tokens"), ".0f")),
                *(number(milliseconds, ".1f", 1e3), number(speed), number(row.get("rate"), ".3g")),
                *(number(row.get(f"share_of_{which}peak"), ".1%") for which in ("", "fp8_")),
                number(row.get("peak_memory_bytes"), ".1f", 1 / 2**30),
                number(speed / peer if speed and peer else None, ".2f"),
                row.get("skipped", f"{state(row)}{wide}"),
            ]
        )
    return table


def goals_section(rows: dict[str, dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """The fastest step of each precision next to what one H200 is meant to reach, and to Hugging Face's eager one."""
    eager = rows.get("huggingface eager", {}).get("sequences_per_second")
    table = [["precision", "fastest step", "sequences/s", "goal on an H200", "of the goal", "x Hugging Face eager"]]
    for precision, goal in GOALS.items():
        speeds = {
            name: row["sequences_per_second"]
            for name, row in rows.items()
            if "forms" in row and "sequences_per_second" in row and (row["precision"] or "bf16") == precision
        }
        if speeds:
            name, speed = max(speeds.items(), key=lambda item: item[1])
            ratios = [number(speed / goal, ".1%"), number(speed / eager if eager else None, ".2f")]
            table.append([precision, name, number(speed), number(goal, ".0f"), *ratios])
    return [("goals", table)] if len(table) > 1 else []


def profile_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Groups of kernels of each profiled step."""
    table = [["step", "group", "ms", "share", "rate", "of peak", "longest"]]
    for name, row in rows.items():
        if "groups" not in row:
            table.append([name, "-", "-", "-", "-", "-", state(row)])
        for group, values in row.get("groups", {}).items():
            longest = next(iter(values["names"]), "")[:60]
            cells = [number(values["seconds"], ".3f", 1e3), number(values["share"], ".1%"), rate(values)]
            table.append([name, group, *cells, number(values.get("share_of_peak"), ".0%"), longest])
    return table


def budget_section(rows: dict[str, dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """Microseconds a sequence, measured next to the estimates."""
    with_budgets = {name: row["budgets"] for name, row in rows.items() if "budgets" in row}
    if not with_budgets:
        return []
    first = next(iter(with_budgets.values()))
    table = [["microseconds a sequence", *first["classes"], "sum"]]
    for name, budgets in with_budgets.items():
        table.append([f"measured: {name}", *map(number, budgets["measured"]), number(sum(budgets["measured"]))])
    for name, values in first["estimates"].items():
        table.append([f"estimate: {name}", *map(number, values), number(sum(values))])
    return [("budget", table)]


def tests_table(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """How many tests had which outcome, and those that did not pass."""
    outcomes = [row["outcome"] for row in rows.values()]
    table = [["test", "outcome"], *([f"{outcomes.count(o)} tests", o] for o in sorted(set(outcomes)))]
    table += [[name.split("::", 1)[-1], "failed"] for name, row in rows.items() if row["outcome"] == "failed"]
    return table


TABLES: dict[str, Callable[[dict[str, dict[str, Any]]], list[list[str]]]] = {
    "checks": checks_table,
    "ops": ops_table,
    "step": step_table,
    "profile": profile_table,
    "tests": tests_table,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
