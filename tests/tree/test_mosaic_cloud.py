"""The cloud launch files for the Mosaic programs: valid against the schema, and they start the given program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from programs import assert_refused, write_program

FOLDER = Path("benchmarks/mosaic_bert")
SCHEMAS = Path(__file__).parents[1] / "assets/deploy/skypilot.json"
RECORDER = """#!/bin/bash
printf "%s\\n" "$(basename "$0")" "$@" "WORLD_SIZE=${WORLD_SIZE:-}" "MASTER_ADDR=${MASTER_ADDR:-}"
"""


@pytest.fixture(scope="module")
def task(tree_root: Path) -> dict:
    return yaml.safe_load((tree_root / FOLDER / "yamls/cloud/skypilot.yaml").read_text())


def run_recorded(script: list[str], folder: Path, tmp_path: Path, **environ: str) -> list[str]:
    """Run the script with stand-ins for its programs and return what they recorded."""
    for name in ("python3", "mlbert", "srun"):
        write_program(tmp_path / "bin" / name, RECORDER)
    environ["PATH"] = f"{tmp_path}/bin:/usr/bin:/bin"
    done = subprocess.run(script, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_skypilot_task_matches_the_schema(task: dict) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (extra: test)")
    schemas = json.loads(SCHEMAS.read_text())
    for name, value in [("task", task), ("resources", task["resources"]), ("storage", task["file_mounts"]["/data/c4"])]:
        validator = jsonschema.validators.validator_for(schemas[name])(schemas[name])
        assert list(validator.iter_errors(value)) == []


@pytest.mark.parametrize(
    ("program", "nodes", "started"),
    [
        ("main.py", "2", ["mlbert", "launch", "local", "-n", "8", "main.py"]),
        ("glue.py", "1", ["python3", "glue.py"]),
        ("sequence_classification.py", "1", ["mlbert", "launch", "local", "-n", "8", "sequence_classification.py"]),
    ],
)
def test_skypilot_starts_the_program(
    task: dict, tree_root: Path, tmp_path: Path, program: str, nodes: str, started: list[str]
) -> None:
    exports = {**task["envs"], "PROGRAM": program, "SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    exports |= {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    lines = run_recorded(["bash", "-c", task["run"]], tree_root, tmp_path, **exports)
    assert lines[: len(started)] == started
    assert (tree_root / FOLDER / program).is_file()
    assert (tree_root / FOLDER / task["envs"]["YAML"]).is_file()
    assert task["envs"]["WORDS"] in lines
    assert ("data_remote=/data/c4" in lines) == (program == "main.py")
    if program == "main.py":
        assert lines[-2:] == ["WORLD_SIZE=16", "MASTER_ADDR=10.0.0.1"]


def test_slurm_starts_one_rank_per_task(tree_root: Path, tmp_path: Path) -> None:
    script = tree_root / FOLDER / "yamls/cloud/slurm.sub"
    exports = {"SLURM_SUBMIT_DIR": str(tree_root / FOLDER), "PYTHON": "/usr/bin/python3"}
    lines = run_recorded(["bash", str(script), "main.py", "a.yaml", "b=1"], tmp_path, tmp_path, **exports)
    assert lines[:6] == ["srun", "--kill-on-bad-exit=1", "/usr/bin/python3", "main.py", "a.yaml", "b=1"]
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=exports, check=False)
    assert_refused(done, "no program")
