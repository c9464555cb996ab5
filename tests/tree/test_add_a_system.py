"""Follow docs/add_a_system.md step by step in a copy of the tree; the new system passes the tree checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from programs import copy_files, run_checked, user_environ, write_mlbert, write_program

PAGE = Path("docs/add_a_system.md")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = "acme_x1_n1"
FOLDER = Path("benchmarks/bert/implementations") / NAME
CONFIG = f"config_{NAME}_1x4x96x1_pack.sh"
SECONDS = 300


@pytest.fixture(scope="module")
def copy(tracked: list[Path], tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree without results and records, with a `.venv` for this interpreter and a stand-in for sbatch."""
    root = tmp_path_factory.mktemp("add") / "tree"
    copy_files(tracked, tree_root, root, without=("results", "records"))
    programs = root / ".venv/bin"
    write_mlbert(programs)
    note = '{ echo "$*"; env | grep -E "^(SYNTH_DATA|DGXNGPU|BATCHSIZE|MAX_STEPS)="; } >>"$TREE/submitted"'
    write_program(programs / "sbatch", f"#!/bin/sh\n{note}\n")
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    return root


def run(root: Path, command: str) -> subprocess.CompletedProcess[str]:
    environ = user_environ(PYTHONPATH=root / "benchmarks/bert/implementations/pytorch", TREE=root)
    return run_checked("bash", "-c", f"set -eu\n{command}", cwd=root, env=environ, timeout=SECONDS)


@pytest.fixture(scope="module")
def outputs(copy: Path) -> list[str]:
    """Return the output of each block on the page except the last, which runs all the tree tests."""
    commands = BLOCK.findall((copy / PAGE).read_text(encoding="utf-8"))
    assert commands[-1] == "./run_tests.sh tests/tree\n"
    return [run(copy, f"export PATH='{copy}/.venv/bin':\"$PATH\"\n{command}").stdout for command in commands[:-1]]


@pytest.mark.timeout(3 * SECONDS)
def test_page_creates_a_system(copy: Path, outputs: list[str]) -> None:
    names = {path.name for path in (copy / FOLDER).iterdir()}
    assert names == {"README.md", "env.sh", CONFIG, "run.sub", "run_pretraining.py"}
    assert "--gres=gpu:4" in (copy / FOLDER / "env.sh").read_text()
    plan = outputs[2]
    assert "global_batch_size 768 = BATCHSIZE 96 x 4 ranks x PACKING_FACTOR 2" in plan
    warnings = [line for line in plan.splitlines() if "warning" in line]
    assert len(warnings) == 2, warnings
    assert ["INIT_CHECKPOINT is none" in warnings[0], "SYNTH_DATA is yes" in warnings[1]] == [True, True]
    assert len(json.loads((copy / f"runs/{NAME}.json").read_text())) == 33


@pytest.mark.timeout(3 * SECONDS)
def test_page_submits_its_jobs(copy: Path, outputs: list[str]) -> None:
    assert outputs
    lines = (copy / "submitted").read_text().splitlines()
    assert [line for line in lines if line.startswith("-N")] == ["-N 1 -t 15 run.sub", "-N 1 -t 85 run.sub"]
    assert lines.count("SYNTH_DATA=1") == 1
    assert lines.count("DGXNGPU=4") == lines.count("BATCHSIZE=96") == 2


@pytest.mark.timeout(3 * SECONDS)
def test_new_system_passes_the_tree_checks(copy: Path, outputs: list[str]) -> None:
    row = next(line.strip() for line in outputs[0].splitlines() if line.strip().startswith("| ["))
    table = copy / "benchmarks/bert/implementations/README.md"
    last = "| [`dgxa100_n1`]"
    text = table.read_text()
    assert last in text
    new = row.replace("1x8x48x1", "1x4x96x1").replace("1 x 8 x 48 x 1", "1 x 4 x 96 x 1")
    table.write_text(text.replace(last, f"{new}\n{last}"))
    checks = f"'{sys.executable}' -m pytest -q -p no:cacheprovider tests/tree/test_configs.py tests/tree/test_shell.py"
    run(copy, f"{checks} -k '{NAME} or stubs or listed or template'")
