"""Follow the pages docs/worked_examples.md and docs/add_a_system.md step by step in a copy of the
tree.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from programs import copy_files, run_checked, run_quietly, user_environ, write_mlbert, write_program

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 300
FIRST_JOB = "docs/first_job.md"
EXAMPLES = "docs/worked_examples.md"
PAGE = Path("docs/add_a_system.md")
NAME = "acme_x1_n1"  # the system that the page adds
FOLDER = Path("benchmarks/bert/implementations") / NAME
CONFIG = f"config_{NAME}_1x4x96x2_pack.sh"


@pytest.fixture(scope="module")
def copy(tracked: list[Path], tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree without results, and apply the page's new files and changes."""
    root = tmp_path_factory.mktemp("contributing") / "tree"
    copy_files(tracked, tree_root, root, without=("results",))
    write_mlbert(root / ".venv/bin")
    for language, text in BLOCK.findall((root / EXAMPLES).read_text(encoding="utf-8")):
        if language == "python":
            place, body = text.removeprefix("# ").split("\n", 1)
            assert not (root / place).exists(), f"{place} is no new file"
            (root / place).write_text(body, encoding="utf-8")
        elif language == "diff":
            run_checked("git", "apply", "--recount", "-", cwd=root, input=text)
    return root


def run(root: Path, command: str, program=run_checked) -> str:
    implementations = root / "benchmarks/bert/implementations"
    homes = [
        str(implementations / "pytorch"),
        str(implementations / "tensorflow2"),
        str(root / "audit"),
    ]
    path = f"{root}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = user_environ(PYTHONPATH=os.pathsep.join(homes), PATH=path, TREE=root)
    return program(
        "bash", "-c", f"set -euo pipefail\n{command}", cwd=root, env=environ, timeout=SECONDS
    ).stdout


@pytest.mark.slow
def test_the_commands_after_the_examples_succeed(copy: Path) -> None:
    blocks = [
        text
        for language, text in BLOCK.findall((copy / EXAMPLES).read_text())
        if language == "bash"
    ]
    assert run(copy, "\n".join(blocks)).count("1 passed") == 5
    assert "muon, lion" in (copy / "docs/settings.md").read_text()


def test_the_new_check_reports_a_home_folder_and_no_published_log(
    copy: Path, tree_root: Path, tmp_path: Path
) -> None:
    honest = tree_root / "results/cpu_demo/bert/result_0.txt"
    edited = tmp_path / "result_0.txt"
    edited.write_text(honest.read_text(encoding="utf-8").replace('"file": "', '"file": "/home/', 1))
    for log, is_reported in ((edited, True), (honest, False)):
        said = run(copy, f"mlbert submission check {log}", program=run_quietly)
        assert ("line 1 names a home folder" in " ".join(said.split())) == is_reported, said


def test_the_page_for_a_first_job_shows_what_its_command_prints(copy: Path) -> None:
    page = (copy / FIRST_JOB).read_text()
    (block,) = [text for text in CONSOLE.findall(page) if "new-system" in text]
    command, *shown = block.removeprefix("$ ").splitlines()
    printed = run(copy, command).splitlines()
    assert [line for line in printed if line in shown] == shown
    folder, config = re.findall(r"^\$ (?:cd|source) (\S+_n4\S*)", page, re.MULTILINE)
    assert (copy / folder / config).is_file()
    shutil.rmtree(copy / folder)
    (copy / f"systems/templates/{Path(folder).name}.json").unlink()


@pytest.mark.timeout(3 * SECONDS)
def test_page_creates_a_system_that_passes_the_checks(copy: Path) -> None:
    programs = copy / ".venv/bin"
    note = (
        '{ echo "$*"; env | grep -E "^(SYNTH_DATA|DGXNGPU|BATCHSIZE|MAX_STEPS)="; '
        '} >>"$TREE/submitted"'
    )
    write_program(programs / "sbatch", f"#!/bin/sh\n{note}\n")
    (programs / "activate").touch()
    *commands, last = (
        text for language, text in BLOCK.findall((copy / PAGE).read_text()) if language == "bash"
    )
    assert last == "./run_tests.sh tests/tree\n"
    outputs = [run(copy, command) for command in commands]

    names = {path.name for path in (copy / FOLDER).iterdir()}
    assert names == {"README.md", "env.sh", CONFIG, "run.sub", "run_pretraining.py"}
    assert "--gres=gpu:4" in (copy / FOLDER / "env.sh").read_text()
    plan = outputs[1]
    assert "global_batch_size 768 = BATCHSIZE 96 x 4 ranks x PACKING_FACTOR 2" in plan
    warnings = [line for line in plan.splitlines() if "warning" in line]
    assert len(warnings) == 2, warnings
    assert ["INIT_CHECKPOINT is none" in warnings[0], "SYNTH_DATA is yes" in warnings[1]] == [
        True,
        True,
    ]
    assert len(json.loads((copy / f"runs/{NAME}.json").read_text())) == 33

    lines = (copy / "submitted").read_text().splitlines()
    assert [line for line in lines if line.startswith("-N")] == [
        "-N 1 -t 15 run.sub",
        "-N 1 -t 170 run.sub",
    ]
    assert lines.count("SYNTH_DATA=1") == 1
    assert lines.count("DGXNGPU=4") == lines.count("BATCHSIZE=96") == 2

    row = next(line.strip() for line in outputs[0].splitlines() if line.strip().startswith("| ["))
    table = copy / "benchmarks/bert/implementations/README.md"
    text = table.read_text()
    last = "| [`dgxa100_n1`]"
    assert last in text
    table.write_text(text.replace(last, f"{row}\n{last}"))
    checks = (
        f"'{sys.executable}' -m pytest -q -p no:cacheprovider tests/tree/test_configs.py "
        "tests/tree/test_shell.py"
    )
    run(copy, f"{checks} -k '{NAME} or stubs or listed or template'")
