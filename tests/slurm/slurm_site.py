"""A site on a test cluster: a tree with one system folder, like a vendor's,
from which jobs are submitted.
"""

import contextlib
import subprocess
from pathlib import Path

import mlbert
from cluster import Cluster
from mlaudit.logs import read_log
from training_settings import exports

# The training program, which waits in each step. A run
# that something happens to need not keep a processor busy.
WAITING = """\
import os
import time

from mlbert.cli.train import main
from mlbert.runs.progress import Clock


def seconds(clock, now=Clock.seconds):
    time.sleep(float(os.environ["PAUSE_S"]))
    return now(clock)


Clock.seconds = seconds
main()
"""


def statuses(log: Path) -> list[str]:
    """Return the status in each run_stop of an MLPerf log."""
    return [event.metadata["status"] for event in read_log(log).all("run_stop")]


class Site:
    """A tree with one system folder, whose config trains a tiny model on generated tokens;
    `runs` has all LOGDIRs.
    """

    def __init__(self, cluster: Cluster, root: Path, tree_root: Path) -> None:
        self.cluster = cluster
        self.runs = root / "runs"
        implementations = root / "benchmarks/bert/implementations"
        system = implementations / "test_system"
        system.mkdir(parents=True)
        ours = tree_root / "benchmarks/bert/implementations"
        (implementations / "pytorch").symlink_to(ours / "pytorch")
        for stub in ("run.sub", "run_pretraining.py"):
            (system / stub).write_bytes((ours / "cpu_demo" / stub).read_bytes())
        values = exports(root) | {"LOGDIR": str(self.runs / "out"), "SAVE_CHECKPOINT_STEPS": "0"}
        values |= {
            "DGXNNODES": "2",
            "DGXNGPU": "1",
            "NEXP": "1",
            "WALLTIME": "10",
            "CLEAR_CACHES": "0",
        }
        values |= {"CHECK_COMPLIANCE": "0", "DGXSYSTEM": "test_2x1x4x2"}
        self.config = system / "config_test_2x1x4x2.sh"
        (system / "env.sh").write_text(
            f'source "{ours}/pytorch/launch/reset_settings.sh"\n'
            'export CONFIG_FILE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && '
            'pwd)/${BASH_SOURCE[1]##*/}"\n'
        )
        lines = ['source "$(dirname "${BASH_SOURCE[0]}")/env.sh"']
        lines += [f"export {name}='{value}'" for name, value in values.items()]
        self.config.write_text("\n".join(lines) + "\n")

    def submit(self, *sbatch_words: str, nodes: int = 2, **exports: object) -> str:
        """Source the config, apply the overrides and submit the job; return its id.

        PAUSE_S makes steps wait.
        """
        return self._submit("sbatch --parsable", sbatch_words, nodes, exports)[0]

    def chain(self, links: int, nodes: int = 2, **exports: object) -> list[str]:
        return self._submit(f"python3 -m mlbert launch chain {links}", (), nodes, exports)

    def _submit(
        self, command: str, words: tuple[str, ...], nodes: int, exports: dict[str, object]
    ) -> list[str]:
        if "PAUSE_S" in exports:
            (self.config.parent / "run_pretraining.py").write_text(WAITING)
        overrides = " ".join(
            f"{name}='{value}'" for name, value in {"DGXNNODES": nodes, **exports}.items()
        )
        line = (
            f'source "$1"; shift; export {overrides}; '
            f'{command} -N ${{DGXNNODES}} -t ${{WALLTIME}} "$@" run.sub'
        )
        package = {"PYTHONPATH": str(Path(mlbert.__file__).parents[1])}
        command = ["bash", "-c", line, "bash", self.config, *words]
        done = self.cluster.run(*command, cwd=self.config.parent, environment=package)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def output(self, job: str) -> str:
        number = self.cluster.job(job).get("JobId", job)  # of an array's job, with its index
        path = self.config.parent / f"slurm-{number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_output(self, job: str, words: str, seconds: float) -> None:
        """Wait until the job has printed these words or has failed."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.cluster.wait_for(
                lambda: words in self.output(job) or self.cluster.job(job)["JobState"] == "FAILED",
                seconds,
                words,
            )
        assert words in self.output(job), self.output(job)

    def run(self, *sbatch_words: str, nodes: int = 2, **exports: object) -> tuple[str, str]:
        job = self.submit(*sbatch_words, nodes=nodes, **exports)
        state = self.cluster.wait_for_end(job)["JobState"]
        return state, self.output(job)
