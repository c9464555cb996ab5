"""Follow docs/add_a_system.md step by step in a copy of the tree; the new system passes the tree checks."""

import json
import re
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


def run(root: Path, command: str) -> str:
    environ = user_environ(PYTHONPATH=root / "benchmarks/bert/implementations/pytorch", TREE=root)
    return run_checked("bash", "-c", f"set -eu\n{command}", cwd=root, env=environ, timeout=SECONDS).stdout


@pytest.mark.timeout(3 * SECONDS)
def test_page_creates_a_system_that_passes_the_checks(tracked: list[Path], tree_root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    copy_files(tracked, tree_root, copy, without=("results", "records"))
    programs = write_mlbert(copy / ".venv/bin").parent
    note = '{ echo "$*"; env | grep -E "^(SYNTH_DATA|DGXNGPU|BATCHSIZE|MAX_STEPS)="; } >>"$TREE/submitted"'
    write_program(programs / "sbatch", f"#!/bin/sh\n{note}\n")
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    *commands, last = BLOCK.findall((copy / PAGE).read_text(encoding="utf-8"))
    assert last == "./run_tests.sh tests/tree\n"
    outputs = [run(copy, f"export PATH='{programs}':\"$PATH\"\n{command}") for command in commands]

    names = {path.name for path in (copy / FOLDER).iterdir()}
    assert names == {"README.md", "env.sh", CONFIG, "run.sub", "run_pretraining.py"}
    assert "--gres=gpu:4" in (copy / FOLDER / "env.sh").read_text()
    plan = outputs[2]
    assert "global_batch_size 768 = BATCHSIZE 96 x 4 ranks x PACKING_FACTOR 2" in plan
    warnings = [line for line in plan.splitlines() if "warning" in line]
    assert len(warnings) == 2, warnings
    assert ["INIT_CHECKPOINT is none" in warnings[0], "SYNTH_DATA is yes" in warnings[1]] == [True, True]
    assert len(json.loads((copy / f"runs/{NAME}.json").read_text())) == 33

    lines = (copy / "submitted").read_text().splitlines()
    assert [line for line in lines if line.startswith("-N")] == ["-N 1 -t 15 run.sub", "-N 1 -t 85 run.sub"]
    assert lines.count("SYNTH_DATA=1") == 1
    assert lines.count("DGXNGPU=4") == lines.count("BATCHSIZE=96") == 2

    row = next(line.strip() for line in outputs[0].splitlines() if line.strip().startswith("| ["))
    table = copy / "benchmarks/bert/implementations/README.md"
    text, last = table.read_text(), "| [`dgxa100_n1`]"
    assert last in text
    new = row.replace("1x8x48x1", "1x4x96x1").replace("1 x 8 x 48 x 1", "1 x 4 x 96 x 1")
    table.write_text(text.replace(last, f"{new}\n{last}"))
    checks = f"'{sys.executable}' -m pytest -q -p no:cacheprovider tests/tree/test_configs.py tests/tree/test_shell.py"
    run(copy, f"{checks} -k '{NAME} or stubs or listed or template'")
