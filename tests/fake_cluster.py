"""A cluster of stand-ins that record how they were called."""

import json
import os
import subprocess
import sys
from pathlib import Path

from programs import run_quietly, write_program

# Records its arguments and the exports that differ between runs, then acts as the test's exports request.
STAND_IN = """#!{python}
import json, os, signal, sys
from pathlib import Path
name = Path(sys.argv[0]).name
keep = ("EXPERIMENT", "SEED", "RESUME", "CACHES_CLEARED", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH",
        "MLBERT_IMAGE_DIGEST")
note = dict(program=name, words=sys.argv[1:], exports={{k: os.environ[k] for k in keep if k in os.environ}})
with open(os.environ["NOTES"], "a") as file:
    file.write(json.dumps(note) + "\\n")
line = " ".join(sys.argv[1:])
if os.environ.get("WARN_AT", "nothing") in line:
    with open(f"/proc/{{os.getppid()}}/stat") as file:  # the job's shell is the grandparent of this process
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGUSR1)
if "requeue" in sys.argv:
    sys.exit("requeue is refused")
if line.startswith("image inspect"):
    print("registry/bert@sha256:5eed")
if name == "scontrol":
    answers = dict(hostnames="n1\\nn2", node="NodeAddr=10.0.0.1", config="TaskPlugin = task/affinity")
    print(next(answer for word, answer in answers.items() if word in sys.argv))
if name == "srun" and "--mpi=list" in line:
    print("pmi2 none")
if "run_and_time.sh" in line:
    run = Path(os.environ["LOGDIR"], "run_" + os.environ["EXPERIMENT"])
    run.mkdir(parents=True, exist_ok=True)
    status = int(os.environ.get("STATUS", "0"))
    if os.environ.get("RUN_STOP"):
        line = dict(key="run_stop", metadata=json.loads(os.environ["RUN_STOP"]))
        run.with_name(run.name.replace("run_", "result_") + ".txt").write_text(json.dumps(line) + "\\n")
    elif status < 2:
        (run / "summary.json").write_text("{{}}")
    sys.exit(status)
"""
PROGRAMS = ("srun", "scontrol", "squeue", "docker", "ssh", "mpirun", "enroot")

# The answer to GRADIENT_CLIPING.
MISSPELT = "warning: GRADIENT_CLIPING is exported but is not a setting; did you mean GRADIENT_CLIPPING?"


class FakeCluster:
    """A tree with a space in its path, stand-ins for the engines, and their recorded calls."""

    def __init__(self, root: Path, tree_root: Path) -> None:
        implementations = root / "a tree/benchmarks/bert/implementations"
        self.system = implementations / "any"
        self.system.mkdir(parents=True)
        ours = tree_root / "benchmarks/bert/implementations"
        (implementations / "pytorch").symlink_to(ours / "pytorch")
        (self.system / "run.sub").write_bytes((ours / "cpu_demo/run.sub").read_bytes())
        (self.system / "run_pretraining.py").touch()  # run.sub gets the settings from it before the ranks start
        self.launch = implementations / "pytorch/launch"
        self.logs, self.programs, self.notes = root / "logs", root / "bin", root / "notes"
        for name in PROGRAMS:
            write_program(self.programs / name, STAND_IN.format(python=sys.executable))
        self.exports = {"DGXSYSTEM": "any_2x4x4x1", "CONFIG_FILE": self.system / "config_any_2x4x4x1.sh"}
        self.exports |= {"DGXNNODES": 2, "DGXNGPU": 4, "RECIPE": "any", "LOGDIR": self.logs}
        self.exports |= {"CLEAR_CACHES": 0, "CHECK_COMPLIANCE": 0}

    @property
    def image(self) -> Path:
        """Create an image file. A job in a container gets a stand-in for the report too."""
        path = self.logs.with_name("bert.sqsh")
        path.touch()
        return path

    def start(self, launcher: str, *words: str, **exports: object) -> subprocess.CompletedProcess[str]:
        """Start run.sub, which is in the system's folder, or another launcher."""
        program = launcher if launcher == "run.sub" else self.launch / launcher
        own = {"PATH": f"{self.programs}:{os.environ['PATH']}", "NOTES": self.notes, "VIRTUAL_ENV": "none"}
        environment = {name: str(value) for name, value in {**own, **self.exports, **exports}.items()}
        return run_quietly("bash", program, *words, env=environment, cwd=self.system)

    def job(self, **exports: object) -> subprocess.CompletedProcess[str]:
        """Run run.sub as Slurm would."""
        slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[1-2]"}
        return self.start("run.sub", **{**slurm, **exports})

    def calls(self, program: str, word: str = "") -> list[dict]:
        """Return the recorded calls of a program that have an argument containing ``word``."""
        notes = [json.loads(line) for line in self.notes.read_text().splitlines()]
        return [n for n in notes if n["program"] == program and any(word in w for w in n["words"])]
