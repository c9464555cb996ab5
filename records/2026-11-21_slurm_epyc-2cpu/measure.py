"""Measure the cost of launching and of recovery on a local test cluster, and write a folder in records/.

    PYTHONPATH=tests:tests/slurm python records/2026-11-21_slurm_epyc-2cpu/measure.py [--kills 20] [--out FOLDER]

* start: seconds from sbatch to the end of the first training step on 4 nodes (median of three jobs), and how many of
  them our scripts take, from the first line of the job script to the start of the ranks;
* recovery: seconds from the death of a rank to the next new step in the same job;
* kills: a run whose ranks are killed at random times; its final weights are compared with an undisturbed run's.

Times from a busy machine are meaningless. FOLDER gets README.md, measure.json (all figures) and job.txt (the output of
the job with the kills). Takes about two minutes plus 6 seconds per kill.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cluster import running, unavailable_reason
from mlbert.host.machine import processor_name
from slurm_site import Site

ROOT = Path(__file__).resolve().parents[2]
RUN = {"MAX_STEPS": 1200, "SAVE_CHECKPOINT_STEPS": 10}


def steps_done(site: Site) -> int:
    """Return the step of the last complete metrics line."""
    metrics = site.runs / "out/run_0/metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def wait_until(condition: object, seconds: float = 300) -> float:
    """Poll frequently and return the time when the condition became true."""
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, f"the condition is not true after {seconds:.0f} s"
        time.sleep(0.02)
    return time.time()


def measure_start(site: Site) -> dict[str, float]:
    submitted = time.time()
    job = site.submit(nodes=4, **RUN)
    first_step = wait_until(lambda: steps_done(site) >= 1)
    # The script creates LOGDIR in its first lines, and claims the run right before it starts the ranks.
    script = site.runs.stat().st_mtime
    ranks = (site.runs / "out/.run_0.job").stat().st_mtime
    site.cluster.run("scancel", job)
    site.cluster.wait_for_end(job)
    return {
        "sbatch_to_script": script - submitted,
        "our_scripts": ranks - script,
        "ranks_to_first_step": first_step - ranks,
        "sbatch_to_first_step": first_step - submitted,
    }


def killed(site: Site, kills: int, seed: int) -> tuple[bytes, list[dict[str, float]], str]:
    """Kill ranks of a run; return its final weights, each kill's rank, step and seconds, and the job's output."""
    choice = random.Random(seed)
    job = site.submit(**RUN, MAX_RESTARTS=kills)
    recoveries = []
    for kill in range(kills):
        # Spread kills over the run. The job gives up unless each restart writes a new checkpoint.
        goal = 15 + (RUN["MAX_STEPS"] - 200) * kill // kills + choice.randrange(20)
        wait_until(lambda goal=goal: steps_done(site) >= goal)
        reached, lost, rank = steps_done(site), time.time(), choice.randrange(2)
        os.kill(site.cluster.rank(job, rank), signal.SIGKILL)
        wait_until(lambda kill=kill: site.output(job).count("lost a rank") > kill)
        wait_until(lambda reached=reached: steps_done(site) > reached)
        recoveries.append({"rank": rank, "step": reached, "seconds": round(time.time() - lost, 2)})
    site.cluster.wait_for_end(job, 900)
    weights = (site.runs / "out/run_0/weights/model.safetensors").read_bytes()
    return weights, recoveries, site.output(job)


def hardware() -> tuple[str, str]:
    """Return the processor's name, and a short name for a folder, such as "epyc-2cpu"."""
    name = processor_name()
    short = re.search(r"epyc|ryzen|xeon|core|neoverse", name, re.IGNORECASE)
    return name, f"{short[0].lower() if short else platform.machine()}-{os.cpu_count()}cpu"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    cpu, short = hardware()
    folder = ROOT / "records" / f"{datetime.now(UTC):%Y-%m-%d}_slurm_{short}"
    parser.add_argument("--out", type=Path, default=folder)
    arguments = parser.parse_args()
    reason = unavailable_reason()
    if reason:
        sys.exit(f"error: {reason}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, running(4) as cluster:
        slurm = cluster.run("sinfo", "--version").stdout.split()[-1]
        starts = [measure_start(Site(cluster, Path(temporary, f"start{i}"), ROOT)) for i in range(3)]
        undisturbed = Site(cluster, Path(temporary, "whole"), ROOT)
        cluster.wait_for_end(undisturbed.submit(**RUN), 900)
        whole = (undisturbed.runs / "out/run_0/weights/model.safetensors").read_bytes()
        weights, recoveries, output = killed(Site(cluster, Path(temporary, "killed"), ROOT), arguments.kills, seed=1)
    medians = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    seconds = [recovery["seconds"] for recovery in recoveries]
    record = {
        "starts_seconds": [{name: round(value, 2) for name, value in start.items()} for start in starts],
        "kills": recoveries,
        "weights_equal": weights == whole,
        "weights_sha256": hashlib.sha256(whole).hexdigest(),
        "load_before": load,
        "versions": {"slurm": slurm, "torch": metadata.version("torch"), "python": platform.python_version()},
        "cpu": cpu,
    }
    figures = {
        "`sbatch` to the end of the first step, 4 nodes, one rank each": f"{medians['sbatch_to_first_step']:.1f} s",
        "of these: Slurm, until the job script runs": f"{medians['sbatch_to_script']:.1f} s",
        "of these: our scripts, until the ranks start (goal: 2 s)": f"{medians['our_scripts']:.1f} s",
        "of these: start of Python and torch, rendezvous, first step": f"{medians['ranks_to_first_step']:.1f} s",
        "death of a rank to the next new step, median": f"{statistics.median(seconds):.1f} s",
        "death of a rank to the next new step, longest": f"{max(seconds):.1f} s",
        "final weights equal to the undisturbed run's": "yes, to the last bit" if weights == whole else "NO",
    }
    readme = "# How long do launching and recovery take?\n\n"
    readme += f"A Slurm {slurm} of four nodes on one machine ({cpu}; load average before: {load:.1f}).\n"
    readme += f"The start is the median of three jobs; {arguments.kills} kills are at random steps and ranks.\n\n"
    readme += "| what | figure |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in figures.items())
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "README.md").write_text(readme)
    (arguments.out / "measure.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.out / "job.txt").write_text(output)
    print(readme, arguments.out, sep="\n")


if __name__ == "__main__":
    main()
