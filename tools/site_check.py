"""Measure what only a node with several GPUs can tell, and write one text file to send back.

site_check.sh starts this program; docs/gpu.md describes it. It changes nothing on the node: it
trains on random tokens with the repository's own launcher, in a temporary folder, and reads clocks
and power with nvidia-smi. Each part is stopped when its time is over, so the check ends in time
whatever hangs.

The file has the parts one after another: the machine, the collectives alone, a table of the runs,
and the output of each. Names of the host, of the user and of the user's home are replaced.
"""

from __future__ import annotations

import argparse
import getpass
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check.hardware import SAMPLED
from mlbert.host.files import write_atomically
from mlbert.host.metrics_file import read_points
from mlbert.host.provenance import git_state, tree_root

ROOT = tree_root()
PYTORCH = ROOT / "benchmarks" / "bert" / "implementations" / "pytorch"
CONFIG = PYTORCH.parent / "h200_n1" / "config_H200_1x8x48x1_pack_fp8.sh"
# Of every run: random tokens and weights, no evaluation, no target; it succeeds when its time ends.
COMMON = {
    "SYNTH_DATA": "1",
    "INIT_CHECKPOINT": "none",
    "TIMED": "0",
    "SEED": "1",
    "CLEAR_CACHES": "0",
    "TARGET_MLM_ACCURACY": "none",
    "EVAL_ITER_START_SAMPLES": "1000000000",
    "MAX_SAMPLES_TERMINATION": "1000000000",
    "MAX_STEPS": "1000000",
    "LOG_FREQ": "10",
}
# What each run changes in the config, and the question that it answers.
VARIANTS: dict[str, tuple[dict[str, str], str]] = {
    "config": ({}, "the published step: does the reduction inside the graph overlap backward?"),
    "segmented": ({"CUDA_GRAPH_MODE": "segmented"}, "the same without that overlap"),
    "fp32 weights": (
        {"WEIGHTS_ALLGATHER": "fp32"},
        "twice the bytes of weights, and no copies that round them",
    ),
}
# Of a rehearsal without GPUs: 2 ranks of a tiny model.
DRY = {
    "DGXNGPU": "2",
    "BATCHSIZE": "2",
    "BERT_CONFIG": str(PYTORCH / "configs" / "tiny.json"),
    "PRECISION": "fp32",
    "FP8_FAST_ACCUMULATION": "forward",
    "CUDA_GRAPH_MODE": "none",
    "OPS": "plain",
    "CPU_THREADS": "1",
    "BIND_CPUS": "0",
    "LOG_FREQ": "1",
}
SIZES_MIB = "1,16,64,256"  # of the all-reduces
START_SECONDS = 45  # for a run to start: kernels are compiled and proved, graphs are captured
NETWORK_SECONDS = 60
FACT_SECONDS = 20
KILL_SECONDS = 10  # for a stopped process to end
LOG_LINES = 60  # that are kept of a run's output
# Columns of the table, from the steps of metrics.jsonl.
RANK_TIMES = {
    "slowest rank, ms": "slowest_rank_seconds",
    "median rank, ms": "median_rank_seconds",
    "fastest rank, ms": "fastest_rank_seconds",
}
NO_RUN = "no metrics: see its output below"


@dataclass(frozen=True)
class Run:
    """One run of a variant.

    Attributes:
        name: of the variant.
        status: of the launcher; None if it was stopped because its time was over.
        output: last lines of stdout and stderr.
        steps: the lines of metrics.jsonl of the second half of its steps.
        power: nvidia-smi's medians of each GPU while it ran.
    """

    name: str
    status: int | None
    output: str
    steps: Sequence[Mapping[str, Any]]
    power: str

    @property
    def facts(self) -> dict[str, str]:
        """The row of the table: medians over the second half of the steps."""
        if not self.steps:
            return {"run": self.name, "sequences/s": NO_RUN}
        found = {"run": self.name, "sequences/s": f"{self._median('samples_per_second'):.1f}"}
        for name, key in RANK_TIMES.items():
            if all(key in step for step in self.steps):
                found[name] = f"{1e3 * self._median(key):.2f}"
        return found

    def _median(self, key: str) -> float:
        return statistics.median(float(step[key]) for step in self.steps)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="site_check.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"default: {CONFIG.name}")
    parser.add_argument("--out", type=Path, default=Path("site-check.txt"), help="text file")
    parser.add_argument("--seconds", type=float, default=45.0, help="training of each run")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on the CPU, tiny sizes")
    options = parser.parse_args(words)
    mistake = _mistake(options)
    if mistake:
        print(f"site_check: error: {mistake}", file=sys.stderr)
        return 2
    order = [*VARIANTS, *reversed(VARIANTS)]
    limit = len(order) * (options.seconds + START_SECONDS) + NETWORK_SECONDS + 3 * FACT_SECONDS
    print(f"site_check: at most {limit / 60:.0f} minutes; writes {options.out}", flush=True)
    config = options.config.resolve()
    rehearsal = DRY if options.dry_run else {}
    environ = {**_sourced(config), **COMMON, "PYTHON": sys.executable}
    sections = {"machine": _machine(config)}
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="site-check-") as folder:
        work = Path(folder)
        status, text = _collectives({**environ, **rehearsal}, work / "network")
        sections["collectives"] = _ended(status, NETWORK_SECONDS) + text
        for number, name in enumerate(order, start=1):
            print(f"site_check: run {number} of {len(order)}: {name}", flush=True)
            changed = {**environ, **VARIANTS[name][0], **rehearsal}
            run = _run(name, changed, work / f"run{number}", options.seconds)
            runs.append(run)
            words = _ended(run.status, options.seconds + START_SECONDS)
            sections[f"run {number}: {name}"] = f"{words}{run.output}\n{run.power}"
            sections["runs"] = _table(runs)
            _write(options.out, sections)
    print(f"{sections['runs']}\nsite_check: wrote {options.out}")
    is_whole = status == 0 and all(run.status == 0 and run.steps for run in runs)
    return 0 if is_whole else 1


def _write(path: Path, sections: Mapping[str, str]) -> None:
    parts = [f"== {name} ==\n{body.rstrip()}\n" for name, body in sections.items()]
    write_atomically(path, without_names("\n".join(parts)))


def without_names(text: str) -> str:
    """Replace the names of the host, of the user and of the user's home in a text."""
    host = socket.gethostname()
    names = {str(Path.home()): "~", host: "node", host.split(".")[0]: "node"}
    names[getpass.getuser()] = "user"
    for name, word in names.items():
        # A name that is also a word, such as "root", hides nothing and would change the text.
        if len(name) > 1 and name not in ("root", "user", "/root"):
            text = text.replace(name, word)
    return text


def _mistake(options: argparse.Namespace) -> str:
    """Return what is wrong with the options, or ""."""
    if not options.config.is_file():
        return f"--config: {options.config} does not exist. Name a config_<system>.sh"
    if not 5 <= options.seconds <= 600:
        return f"--seconds: {options.seconds:g} is not from 5 to 600. Give for example 45"
    if not options.out.parent.is_dir():
        return f"--out: {options.out.parent} does not exist. Create it, or name another file"
    if options.dry_run:
        return ""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU. --dry-run rehearses the check on the CPU"
    return ""


def _machine(config: Path) -> str:
    """Return the versions, the commit, the GPUs and how they are connected."""
    import torch

    commit, is_changed = git_state(ROOT)
    lines = [
        f"commit {commit}{', changed' if is_changed else ''}",
        f"config {config.name}",
        f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}",
    ]
    if torch.cuda.is_available():
        lines.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for words in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], ["lscpu"]):
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=FACT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(f"{' '.join(words)}: {error}")
            continue
        lines.append(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}")
    return "\n".join(lines)


def _collectives(environ: Mapping[str, str], folder: Path) -> tuple[int | None, str]:
    """Measure all-reduces of all ranks, without training."""
    ranks = [sys.executable, "-m", "mlbert", "launch", "ranks", "--standalone"]
    ranks += [f"--nproc-per-node={environ['DGXNGPU']}", "--no-python"]
    measurement = [sys.executable, "-m", "mlbert", "launch", "test-network"]
    return _launched([*ranks, *measurement, "--sizes", SIZES_MIB], environ, folder, NETWORK_SECONDS)


def _run(name: str, environ: Mapping[str, str], folder: Path, seconds: float) -> Run:
    """Train a variant for ``seconds``."""
    limits = {"MAX_SECONDS": f"{seconds:g}", "LOGDIR": str(folder)}
    launcher = [str(PYTORCH / "launch" / "run_and_time.sh")]
    sampled = folder.with_suffix(".samples")
    with _sampled(sampled):
        status, output = _launched(launcher, {**environ, **limits}, folder, seconds + START_SECONDS)
    power = power_table(sampled.read_text(encoding="utf-8", errors="replace"))
    metrics = folder / "run_0" / "metrics.jsonl"
    points = read_points(metrics)[0] if metrics.is_file() else []
    steps = [point for point in points if point["kind"] == "step"]
    return Run(name, status, output, steps[len(steps) // 2 :], power)


def _sourced(config: Path) -> dict[str, str]:
    """Return the environment after sourcing a config."""
    command = ["bash", "-c", 'source "$0" && env -0', str(config)]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def _launched(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, limit: float
) -> tuple[int | None, str]:
    """Run a command for at most ``limit`` seconds.

    Returns:
        Its exit status, None if it was stopped, and the last `LOG_LINES` lines of its output.
    """
    folder.mkdir()
    log = folder / "output.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # its ranks are stopped with it
        )
        status = _wait(process, limit)
    text = log.read_text(encoding="utf-8", errors="replace")
    return status, "\n".join(text.splitlines()[-LOG_LINES:])


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Wait for a process, and stop it and its children after ``limit`` seconds."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + KILL_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if process.poll() is not None:
                break
        return None
    except BaseException:  # Ctrl-C: the ranks are in another session and would go on
        os.killpg(process.pid, signal.SIGKILL)
        raise


@contextmanager
def _sampled(path: Path) -> Iterator[None]:
    """Write a line for each GPU to a file once a second during the block, or why that fails."""
    query = [f"--query-gpu=index,{','.join(SAMPLED.values())}", "--format=csv,noheader,nounits"]
    with path.open("w", encoding="utf-8") as output:
        try:
            process = subprocess.Popen(
                ["nvidia-smi", *query, "-l", "1"], stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            output.write(str(error))
            yield
            return
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def power_table(text: str) -> str:
    """Return the medians over time of `SAMPLED`, a line for each GPU: a slow card shows here."""
    by_gpu: dict[str, list[list[float]]] = {}
    for line in text.splitlines():
        cells = line.split(", ")
        try:
            values = [float(cell) for cell in cells[1:]]
        except ValueError:
            continue
        if len(values) == len(SAMPLED):
            by_gpu.setdefault(cells[0], []).append(values)
    if not by_gpu:
        return f"power and clocks: {text.strip()[-200:] or 'no sample'}"
    lines = []
    for gpu, samples in by_gpu.items():
        medians = (statistics.median(column) for column in zip(*samples, strict=True))
        words = ", ".join(
            f"{name} {value:.0f}" for name, value in zip(SAMPLED, medians, strict=True)
        )
        lines.append(f"GPU {gpu}: {words} ({len(samples)} samples)")
    return "\n".join(lines)


def _table(runs: Sequence[Run]) -> str:
    """Return the runs' facts as a table, and what each variant is for."""
    columns = ["run", "sequences/s", *RANK_TIMES]
    rows = [columns, *([run.facts.get(column, "") for column in columns] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    questions = [f"{name}: {question}" for name, (_, question) in VARIANTS.items()]
    return "\n".join([*lines, "", *questions])


def _ended(status: int | None, limit: float) -> str:
    """Return the first line of an output: how the command ended."""
    if status is None:
        return f"stopped after {limit:g} s\n"
    return f"exit status {status}\n"


if __name__ == "__main__":
    sys.exit(main())
