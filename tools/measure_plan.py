"""Measure the demonstration on 1, 2 and 4 ranks of this machine, and compare with `mlbert plan`'s prediction.

    python tools/measure_plan.py FOLDER [--rounds 3] [--seconds 40]

One rank with all cores runs with 32 and with 8 packs per step; these logs predict 2 and 4 ranks that share 32 packs.
Each round runs all of them in turn, so that other load affects each. Writes FOLDER/measure.json and the logs. Use an
idle machine: the load average is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path

from mlbert.cli.plan import read_measured
from mlbert.host.provenance import git_state
from mlbert.report.planner.calibrate import MeasuredRun, shared_cores_rate

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh"
LAUNCHER = ROOT / "benchmarks/bert/implementations/pytorch/launch/run_and_time.sh"
ONE_RANK = ((1, 32), (1, 8))  # (ranks, packs per rank) used for calibration
PREDICTED = ((1, 32), (2, 16), (4, 8))


def train(folder: Path, data: Path, ranks: int, packs: int, seconds: int) -> MeasuredRun:
    """Run once without a target and keep the log as FOLDER.txt."""
    settings = {
        "DGXNGPU": ranks,
        "BATCHSIZE": packs,
        "LOGDIR": folder,
        "DATADIR_PHASE2": data / "train",
        "EVALDIR": data / "eval",
        "MAX_SECONDS": seconds,
        "TARGET_MLM_ACCURACY": "none",
        "SAVE_CHECKPOINT_STEPS": 0,
        "CLEAR_CACHES": 0,
        "EXPERIMENT": 0,
        # Enough intervals between evaluations for a median, and no end before the time is up.
        "EVAL_ITER_START_SAMPLES": 5000,
        "EVAL_ITER_SAMPLES": 5000,
        "MAX_SAMPLES_TERMINATION": 10**8,
        "MAX_STEPS": 10**6,
    }
    exports = " ".join(f"{name}={value}" for name, value in settings.items())
    shutil.rmtree(folder, ignore_errors=True)
    command = ["bash", "-c", f"source {CONFIG} && export {exports} && exec {LAUNCHER}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    log = folder.with_suffix(".txt")
    shutil.copy(folder / "result_0.txt", log)
    shutil.rmtree(folder)
    return read_measured(log)


def main() -> None:
    """Run, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=40)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = ROOT / "runs/quickstart/data"
    subprocess.run(["mlbert", "prepare", "python-text", "--out", data], check=True, stdout=subprocess.DEVNULL)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    runs: dict[tuple[int, int], list[MeasuredRun]] = {shape: [] for shape in (*ONE_RANK, *PREDICTED)}
    for number in range(arguments.rounds):
        for (ranks, packs), found in runs.items():
            name = folder / f"round_{number}_ranks_{ranks}_packs_{packs}"
            found.append(train(name, data, ranks, packs, arguments.seconds))
    known = [run for shape in ONE_RANK for run in runs[shape]]
    answers = []
    for ranks, packs in PREDICTED:
        measured = [run.sequences_per_second for run in runs[ranks, packs]]
        predicted = shared_cores_rate(known, ranks, runs[ranks, packs][0].batch)
        error = predicted / statistics.median(measured) - 1
        answers.append({"ranks": ranks, "measured": measured, "predicted": predicted, "error": error})
        print(f"{ranks} ranks: measured {statistics.median(measured):,.0f} sequences/s, predicted {error:+.1%}")
    record = {"commit": git_state(ROOT)[0], "cores": cores, "load_before": load, "answers": answers}
    (folder / "measure.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
