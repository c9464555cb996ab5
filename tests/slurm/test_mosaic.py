"""The Mosaic programs' job script on a real Slurm."""

import json
import sys
from pathlib import Path

import pytest

import mlbert
from cluster import Cluster
from mosaic_texts import BASE, make_texts


@pytest.mark.slow
def test_main_trains_on_two_nodes(cluster: Cluster, tmp_path: Path, tree_root: Path) -> None:
    make_texts(tmp_path, tree_root)
    home = tree_root / "benchmarks/mosaic_bert"
    script = (home / "yamls/cloud/slurm.sub").read_text().replace(" --gpus-per-node=8", "")  # these nodes have no GPUs
    (tmp_path / "slurm.sub").write_text(script)
    words = ("model.name=mosaic_bert", "max_duration=4ba", "eval_interval=4ba", "save_folder=out")
    package = {"PYTHONPATH": str(Path(mlbert.__file__).parents[1]), "PYTHON": sys.executable}
    submit = ("sbatch", "--parsable", "-N", "2", "--ntasks-per-node=1", "-t", "10", "slurm.sub")
    done = cluster.run(*submit, home / "main.py", "main.yaml", *BASE, *words, cwd=tmp_path, environment=package)
    assert done.returncode == 0, done.stderr
    state = cluster.wait_for_end(done.stdout.strip())["JobState"]
    assert state == "COMPLETED", (tmp_path / f"slurm-{done.stdout.strip()}.out").read_text()
    summary = json.loads((tmp_path / "out/run_0/summary.json").read_text())
    assert (summary["ranks"], summary["status"], summary["samples"]) == (2, "success", 64)
