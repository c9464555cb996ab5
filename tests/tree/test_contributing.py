"""Follow the examples of CONTRIBUTING.md in a copy of the tree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from programs import copy_files, run_checked, run_quietly, user_environ, write_mlbert

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 200


@pytest.fixture(scope="module")
def copy(tracked: list[Path], tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree without results and records, and apply the page's new files and changes."""
    root = tmp_path_factory.mktemp("contributing") / "tree"
    copy_files(tracked, tree_root, root, without=("results", "records"))
    write_mlbert(root / ".venv/bin")
    for language, text in BLOCK.findall((root / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        if language == "python":
            place, body = text.removeprefix("# ").split("\n", 1)
            assert not (root / place).exists(), f"{place} is no new file"
            (root / place).write_text(body, encoding="utf-8")
        elif language == "diff":
            run_checked("git", "apply", "--recount", "-", cwd=root, input=text)
    return root


def run(root: Path, command: str) -> subprocess.CompletedProcess[str]:
    homes = [str(root / "benchmarks/bert/implementations" / name) for name in ("pytorch", "tensorflow2")]
    path = f"{root}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = user_environ(PYTHONPATH=os.pathsep.join(homes), PATH=path)
    return run_quietly("bash", "-c", f"set -euo pipefail\n{command}", cwd=root, env=environ, timeout=SECONDS)


@pytest.mark.slow
def test_the_commands_after_the_examples_succeed(copy: Path) -> None:
    blocks = [text for language, text in BLOCK.findall((copy / "CONTRIBUTING.md").read_text()) if language == "bash"]
    assert blocks[0].startswith("./quickstart.sh")  # test_readme runs it
    done = run(copy, "\n".join(blocks[1:]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 3
    assert "muon, lion" in (copy / "docs/settings.md").read_text()


def test_the_new_check_reports_a_home_folder_and_no_published_log(copy: Path, tree_root: Path, tmp_path: Path) -> None:
    honest = tree_root / "results/cpu_demo/bert/result_0.txt"
    edited = tmp_path / "result_0.txt"
    edited.write_text(honest.read_text(encoding="utf-8").replace('"file": "', '"file": "/home/', 1))
    for log, is_reported in ((edited, True), (honest, False)):
        done = run(copy, f"mlbert submission check {log}")
        assert ("line 1 names a home folder" in " ".join(done.stdout.split())) == is_reported, done.stdout
