"""Prepare the same text as job arrays on four Slurm nodes, with kills, and in one process; compare the bytes.

PYTHONPATH=tests:tests/slurm python slurm.py WORK_FOLDER
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from test_prepare import start, states, write_texts

from cluster import Cluster, running
from stored_sets import tree

ROOT = Path(__file__).parents[2]


def wait(cluster: Cluster, jobs: list[str], program: str, kills: int, draw: random.Random) -> None:
    """Wait for the last job, killing some processes of the jobs."""
    began, killed = time.monotonic(), 0
    while states(cluster, jobs[-1]) <= {"PENDING", "RUNNING", "COMPLETING"} and time.monotonic() < began + 900:
        pids = cluster.running(program)
        if killed < kills and pids and draw.random() < 0.2:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid := draw.choice(pids), signal.SIGKILL)
                killed += 1
                print(f"  killed process {pid} after {time.monotonic() - began:.1f} s", flush=True)
        time.sleep(draw.uniform(0, 0.5))
    for job in jobs:
        lines = cluster.run("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()
        fields = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
        nodes = sorted({one["NodeList"] for one in fields})
        restarts = sum(int(one["Restarts"]) for one in fields)
        found = ", ".join(sorted({one["JobState"] for one in fields}))
        print(f"  job {job}: {len(fields)} job(s), {found}, {restarts} requeued, on {' '.join(nodes)}", flush=True)


def main() -> None:
    """Run the conversion three times with kills, then all steps of a packed set."""
    work = Path(sys.argv[1])
    write_texts(work / "texts", num_files=8, num_texts=1000)
    program = ROOT / "benchmarks/mosaic_bert/common/convert_dataset.py"
    command = [sys.executable, program, "--dataset", "text", "--path", work / "texts", "--splits", "train", "val"]
    command += ["--concat_tokens", "64", "--out_root"]
    subprocess.run([*command, work / "one"], check=True, capture_output=True)
    with running(4) as cluster:
        for turn in range(3):
            print(f"conversion {turn}: 2 arrays of 7 jobs and a merge, 3 kills", flush=True)
            out = work / f"many-{turn}"
            wait(cluster, start(cluster, ROOT, [*command, out], 7), program.name, 3, random.Random(turn))
            print(f"  equal to one process: {tree(out) == tree(work / 'one')}", flush=True)
        script = ROOT / "benchmarks/bert/implementations/pytorch/launch/prepare_data.sh"
        words = [script, "--input", work / "parts", "--vocab", ROOT / "tests/assets/instances/vocab.txt", "--packed"]
        words += ["--shards", "4", "--eval", work / "parts", "--eval-samples", "50", "--workers", "1", "--outputdir"]
        text = (ROOT / "tests/assets/instances/text.txt").read_text()
        documents = text.strip().split("\n\n")
        (work / "parts").mkdir()
        for number in range(7):
            part = "\n\n".join(documents[number:] + documents[:number])
            (work / "parts" / f"part-{number}").write_text(part + "\n")
        print("prepare_data.sh --packed --slurm 7", flush=True)
        done = cluster.run(
            *words, work / "slurm", "--slurm", "7", timeout=300, environment={"SBATCH_EXCLUSIVE": "exclusive"}
        )
        print(done.stdout, done.stderr, flush=True)
        jobs = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("job ")]
        wait(cluster, jobs, "mlbert", 3, random.Random(9))
        local = cluster.run(*words, work / "local", timeout=600)
        assert local.returncode == 0, local.stderr
        for name in ("instances", "packed", "eval"):
            found = [tree(work / kind / name) for kind in ("slurm", "local")]
            print(f"  {name}: {len(found[0])} files, equal to one machine: {found[0] == found[1]}", flush=True)


if __name__ == "__main__":
    main()
