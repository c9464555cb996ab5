"""What launching and recovering cost, on a test cluster of this machine; prints one JSON object.

    python tests/slurm/measure.py [--kills 20]

* start: seconds from sbatch to the end of the first training step on 4 nodes, the median of three jobs, and how many of
  them pass in our scripts: from the job script's first line to the start of the ranks;
* recovery: seconds from the death of a rank to the first step after the one it died in, in the same job;
* kills: a run whose ranks are killed at random moments, with its final weights compared to an undisturbed run's.

Times of a machine that is busy with other things mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster import running, why_not
from slurm_site import Site

ROOT = Path(__file__).resolve().parents[2]
RUN = {"MAX_STEPS": 1000, "SAVE_CHECKPOINT_STEPS": 10}


def metrics(site: Site) -> Path:
    return site.runs / "out/run_0/metrics.jsonl"


def steps_done(site: Site) -> int:
    """Step of the newest metrics line."""
    lines = metrics(site).read_text().splitlines() if metrics(site).exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def wait_until(condition: object, seconds: float = 300) -> float:
    """Polls densely; the time when the condition held first."""
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it takes too long"
        time.sleep(0.02)
    return time.time()


def measure_start(site: Site) -> dict[str, float]:
    submitted = time.time()
    job = site.submit(nodes=4, **RUN)
    first_step = wait_until(lambda: steps_done(site) >= 1)
    # The script makes LOGDIR in its first lines, and claims the run right before it starts the ranks.
    script = site.runs.stat().st_mtime
    ranks = (site.runs / "out/.run_0.job").stat().st_mtime
    site.cluster.run("scancel", job)
    site.cluster.finished(job)
    return {
        "sbatch_to_script": script - submitted,
        "our_scripts": ranks - script,
        "ranks_to_first_step": first_step - ranks,
        "sbatch_to_first_step": first_step - submitted,
    }


def undisturbed(site: Site) -> bytes:
    site.cluster.finished(site.submit(**RUN), 900)
    return (site.runs / "out/run_0/weights/model.safetensors").read_bytes()


def killed(site: Site, kills: int, seed: int) -> tuple[bytes, list[float]]:
    """Final weights of a run whose ranks are killed, and the seconds that each recovery took."""
    choice = random.Random(seed)
    job = site.submit(**RUN, MAX_RESTARTS=kills)
    recoveries = []
    for kill in range(kills):
        # Spread over the run; after a restart at least one new checkpoint, or the job gives up.
        goal = 15 + (RUN["MAX_STEPS"] - 30) * kill // kills + choice.randrange(20)
        wait_until(lambda goal=goal: steps_done(site) >= goal)
        reached, lost = steps_done(site), time.time()
        os.kill(site.cluster.rank(job, choice.randrange(2)), signal.SIGKILL)
        wait_until(lambda kill=kill: site.output(job).count("lost a rank") > kill)
        wait_until(lambda reached=reached: steps_done(site) > reached)
        recoveries.append(time.time() - lost)
    site.cluster.finished(job, 900)
    return (site.runs / "out/run_0/weights/model.safetensors").read_bytes(), recoveries


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory() as folder, running(4) as cluster:
        starts = [measure_start(Site(cluster, Path(folder, f"start{i}"), ROOT)) for i in range(3)]
        record: dict[str, object] = {
            f"{name}_seconds": round(statistics.median(start[name] for start in starts), 2) for name in starts[0]
        }
        whole = undisturbed(Site(cluster, Path(folder, "whole"), ROOT))
        weights, recoveries = killed(Site(cluster, Path(folder, "killed"), ROOT), arguments.kills, seed=1)
        record["kills"] = arguments.kills
        record["weights_equal"] = weights == whole
        record["recovery_seconds_median"] = round(statistics.median(recoveries), 2)
        record["recovery_seconds_longest"] = round(max(recoveries), 2)
        record["load_at_the_end"] = os.getloadavg()[0]
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
