"""Test and measure what needs a GPU, in two calls (docs/gpu.md).

gpu_check.sh starts this program. Each part runs in a separate process, so a kernel that hangs or
breaks the device costs its part only; a part that takes longer than its seconds is stopped, and the
next one begins. Seconds that a part leaves go to the next. Rows are appended to call<N>.jsonl as
they come. At the end, and if the call is ended early, the decisions are in call<N>.txt and
call<N>-decisions.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_check.calls import CALLS, DRY_SECONDS, LIMITS, RESERVE
from gpu_check.command import command_of
from gpu_check.decisions import adopted, decision_lines
from gpu_check.rows import Rows, read_rows
from gpu_check.stage import Stage
from mlbert.host.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
LOG_BYTES = 4 << 20  # that are kept of a call's log
# For a stopped process to end. One that hangs in the driver cannot, and is left behind.
KILL_SECONDS = 3.0
# For tests: names a module that replaces GPU libraries. Every process imports it first.
STAND_INS = "GPU_CHECK_STAND_INS"
DRY_LINE = "dry run: tiny sizes on a CPU, and a constant in place of watts; none of it is a result"
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
    "hypothesis": "the part tests needs it",
    "transformers": "there is no comparison with transformers without it",
}


def main(words: list[str]) -> int:
    """Run the command line and return the exit code."""
    work = Path(tempfile.gettempdir()) / "mlbert-gpu-check"
    parser = argparse.ArgumentParser(
        description="Test and measure what needs a GPU; see docs/gpu.md."
    )
    parser.add_argument("--call", type=int, choices=CALLS, default=1, help="default: the first")
    parser.add_argument(
        "--out", type=Path, help="folder for results (default: records/<date>_gpu-check_<gpu>)"
    )
    parser.add_argument("--work", type=Path, default=work, help=f"other files (default: {work})")
    parser.add_argument(
        "--first", type=Path, help="rows of the first call (default: call1.jsonl in --out)"
    )
    parser.add_argument("--parts", help="run only these, separated by commas")
    parser.add_argument(
        "--dry-run", action="store_true", help="try the program with tiny sizes on the CPU"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if module := os.environ.get(STAND_INS):
        importlib.import_module(module)
    import torch

    device = torch.device("cpu" if options.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device found; --dry-run tries the program on the CPU")
        return 2
    out = (options.out or default_folder(device)).resolve()
    first = (options.first or out / "call1.jsonl").resolve()
    work = options.work.resolve()
    if options.part:
        from gpu_check.parts import run_part

        if options.dry_run:
            torch.set_num_threads(1)
        run_part(options.part, options.call, work, out, first, device)
        return 0
    stages = CALLS[options.call]
    if options.parts:
        chosen = options.parts.split(",")
        known = [part for stage in stages for part in stage.parts]
        if unknown := set(chosen) - set(known):
            print(
                f"gpu_check: call {options.call} has no part {sorted(unknown)[0]!r}; "
                f"its parts are {', '.join(known)}"
            )
            return 2
        kept = [Stage(s.seconds, tuple(p for p in s.parts if p in chosen)) for s in stages]
        stages = tuple(stage for stage in kept if stage.parts)
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    command = command_of(options.call, work, out, first, options.dry_run)
    return run_call(options.call, stages, command, out, work, options.dry_run)


def default_folder(device: Any) -> Path:
    """Return records/<date>_gpu-check_<gpu>."""
    from gpu_check.hardware import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    folder = f"{datetime.now(UTC):%Y-%m-%d}_gpu-check_{name.removeprefix('nvidia-')}"
    return ROOT / "records" / folder


def run_call(
    call: int,
    stages: Sequence[Stage],
    command: list[str],
    out: Path,
    work: Path,
    is_dry: bool,
) -> int:
    """Run the stages in order, write the decisions, and return the exit code."""
    # Ending this program must end the running parts.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    path = out / f"call{call}.jsonl"
    log = out / f"call{call}.log"
    log.unlink(missing_ok=True)
    remove_rows(path, {part for stage in stages for part in stage.parts})
    for line in missing_things():
        print(f"gpu_check: {line}", flush=True)
    last = started + LIMITS[call] - RESERVE[call]
    planned = started
    try:
        for stage in stages:
            now = time.monotonic()
            planned += stage.seconds
            deadline = now + DRY_SECONDS if is_dry else min(planned, last)
            names = ", ".join(stage.parts)
            seconds = f"at most {deadline - now:.0f} s"
            print(f"gpu_check: {now - started:.0f} s: {names}, {seconds}", flush=True)
            run_stage(stage, command, path, log, deadline, work)
    finally:
        lines = write_decisions(call, path, log, out, is_dry)
    print("\n".join(lines))
    print(f"gpu_check: {time.monotonic() - started:.0f} s, results in {out}")
    failed = [line for line in lines if line.startswith(("failed:", "stopped:"))]
    return 1 if failed else 0


def remove_rows(path: Path, parts: Collection[str]) -> None:
    """Remove the rows of parts that will run again."""
    kept = [row for row in read_rows(path) if row["part"] not in parts]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def run_stage(
    stage: Stage, command: list[str], path: Path, log: Path, deadline: float, work: Path
) -> None:
    """Run the parts of a stage at the same time, and stop those that are left at the deadline."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with log.open("ab") as file:
            for part in stage.parts:
                if time.monotonic() < deadline:
                    processes[part] = subprocess.Popen(
                        [*command, "--part", part],
                        cwd=ROOT,
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
        for part in stage.parts:
            end = _end_of(processes.get(part), deadline)
            if end:
                Rows(path, part).append("end", end)
    finally:
        for process in processes.values():
            _kill(process)


def _end_of(process: subprocess.Popen[bytes] | None, deadline: float) -> dict[str, str]:
    """Wait for a process, and return how it ended if not well."""
    if process is None:
        return {"stopped": "no time was left"}
    try:
        code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)
        return {"stopped": "it took longer than its seconds"}
    return {"error": f"exit code {code}; see the log"} if code else {}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and what it has started, which may outlive it and use the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def write_decisions(call: int, path: Path, log: Path, out: Path, is_dry: bool) -> list[str]:
    """Write the decisions from the rows so far, shorten the log, and return the lines."""
    rows = read_rows(path)
    lines = [*([DRY_LINE] if is_dry else []), *decision_lines(rows)]
    write_atomically(out / f"call{call}.txt", "\n".join(lines) + "\n")
    verdicts = json.dumps(adopted(rows), indent=1) + "\n"
    write_atomically(out / f"call{call}-decisions.json", verdicts)
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])
    return lines


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
