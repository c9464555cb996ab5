"""Check that README links resolve and that every command runs, in order, in a copy of the tree.

The copy shortens the demo (one pass over the text, a target that any model reaches, early
evaluations) and measures steps of two packs; everything else is what the reader runs. Its `.venv`
forwards to this test's interpreter.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from programs import copy_files, run_checked, user_environ, write_program
from tree.conftest import READMES, ROOT, relative

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")
NAMED = re.compile(
    r"`((?:mlbert|tests|tools|docs|launch|csrc|configs|systems|results|records|benchmarks)/[\w./-]+)`"
)
# Blocks that contain one of these words are not executed here.
NOT_EXECUTED = {
    "./run_tests.sh": "is the suite that runs this test",
    "acme_x1_n1": "is on a page that test_followed_pages.py runs",
    "examples/mlperf_plain.py": "is what test_mlperf_callback.py runs, and checks what comes out",
    "sbatch": (
        "would submit to whatever cluster this machine belongs to; test_launchers.py runs run.sub"
    ),
}
# Exports with which the first evaluation is early and the last.
SHORT = {
    "TARGET_MLM_ACCURACY": "1e-9",
    "EVAL_ITER_START_SAMPLES": "700",
    "EVAL_ITER_SAMPLES": "100",
    "NUM_EVAL_EXAMPLES": "100",
}
# Folders whose commands each take seconds to import TensorFlow.
WITH_TENSORFLOW = {
    "tensorflow2",
    "tf2_cpu_demo",
}
MAX_SECONDS = 600
PACKAGE_HOME = Path("benchmarks/bert/implementations/pytorch")


def run(root: Path, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = user_environ(PYTHONPATH=root / PACKAGE_HOME)
    options = {"cwd": folder, "env": environ, "stdin": subprocess.DEVNULL, "timeout": MAX_SECONDS}
    return run_checked("bash", "-c", f"set -eu\n{command}", **options)


@pytest.fixture(scope="module")
def stage(tracked: list[Path], tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stage") / "tree"
    copy_files(tracked, tree_root, root)
    for config in root.glob("benchmarks/bert/implementations/*cpu_demo/config_*.sh"):
        text = config.read_text()
        for name, value in SHORT.items():
            text, times = re.subn(
                rf"^export {name}=.*$", f"export {name}={value}", text, flags=re.MULTILINE
            )
            assert times == 1, f"{config.name} does not export {name}"
        # Two threads synchronize at every step, which is slower than one thread on a busy machine.
        config.write_text(text + "export CPU_THREADS=1\n")
    quickstart = root / "quickstart.sh"
    text, times = re.subn(
        r"(?m)^mlbert prepare python-text ", r"\g<0>--dupe-factor 1 ", quickstart.read_text()
    )
    assert times == 1
    quickstart.write_text(text)
    # setup_venv.sh considers this `.venv` complete; it forwards to this interpreter.
    programs = root / ".venv" / "bin"
    for name, words in {"python": "", "python3": "", "mlbert": "-m mlbert"}.items():
        # quickstart.sh ignores the PYTHONPATH of its caller.
        write_program(
            programs / name,
            f"#!/bin/sh\nexport PYTHONPATH='{root / PACKAGE_HOME}'${{PYTHONPATH:+:$PYTHONPATH}}\n"
            f'exec {sys.executable} {words} "$@"\n',
        )
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    parts = (
        f"{root}\n".encode()
        + (root / "pyproject.toml").read_bytes()
        + (root / "constraints.txt").read_bytes()
    )
    digest = (
        subprocess.run(["sha256sum"], input=parts, capture_output=True, check=True)
        .stdout.split()[0]
        .decode()
    )
    (root / ".venv" / "mlbert-installed").write_text(f"{digest}\n")
    return root


def commands(readme: Path) -> list[str]:
    blocks = BLOCK.findall(readme.read_text(encoding="utf-8"))
    return [block for block in blocks if not any(words in block for words in NOT_EXECUTED)]


def run_blocks(stage: Path, readme: Path) -> int:
    for command in (found := commands(readme)):
        run(
            stage,
            command.replace("bench step ", "bench step --packs 2 "),
            (stage / readme.relative_to(ROOT)).parent,
        )
    return len(found)


@pytest.fixture(scope="module")
def quickstarted(stage: Path) -> Path:
    """Run the root README, whose quickstart the others use."""
    assert run_blocks(stage, ROOT / "README.md") >= 3
    out = stage / "runs/quickstart"
    assert {"result_0.txt", "run_0", "data"} <= {path.name for path in out.iterdir()}
    return stage


@pytest.mark.timeout(2 * MAX_SECONDS)
def test_the_first_readme_runs_as_written(quickstarted: Path) -> None:
    assert (quickstarted / "runs/quickstart/report.html").stat().st_size > 10_000
    log = (quickstarted / "runs/quickstart/result_0.txt").read_text(encoding="utf-8")
    assert '"key": "experiments", "value": 1,' in log, "one run is a whole series here"


# test_followed_pages follows that page, whose commands need the files of its examples.
@pytest.mark.timeout(MAX_SECONDS)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if WITH_TENSORFLOW & set(path.parts) else [])
        for path in READMES
        if path not in (ROOT / "README.md", ROOT / "docs/worked_examples.md") and commands(path)
    ],
    ids=relative,
)
def test_readmes_run_as_written(quickstarted: Path, path: Path) -> None:
    assert run_blocks(quickstarted, path)


@pytest.mark.slow
@pytest.mark.timeout(2 * MAX_SECONDS)
def test_ten_runs_produce_a_submission_tree(quickstarted: Path) -> None:
    out = quickstarted / "runs/ten"
    command = "./quickstart.sh --out runs/ten --runs 10"
    shutil.copytree(quickstarted / "runs/quickstart/data", out / "data")
    (out / "CONTENTS.txt").write_text("made by the test\n")
    run(quickstarted, command, quickstarted)
    system = next((out / "systems").glob("*.json")).stem
    logs = {path.name for path in (out / "results" / system / "bert").iterdir()}
    assert logs == {f"result_{i}.txt" for i in range(10)}
    assert (out / "benchmarks/bert/implementations/pytorch/mlbert/training/loop.py").is_file()
    again = run(quickstarted, command, quickstarted)
    assert len(re.findall(r"^Run \d is finished", again.stdout, re.MULTILINE)) == 10


def test_links_resolve_and_code_blocks_name_their_language(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (readme.parent / target).exists()] == []
    assert all(FENCE.findall(text)[::2]), (
        "write the language after ```; this suite executes bash blocks"
    )


def test_named_paths_exist(readme: Path, tree_root: Path) -> None:
    """Check paths such as `mlbert/training/loop.py`;
    acme_x1_n1 is the system that an example creates.
    """
    pytorch = tree_root / PACKAGE_HOME
    homes = (tree_root, pytorch, pytorch.parent, readme.parent)
    named = [
        path
        for path in NAMED.findall(readme.read_text(encoding="utf-8"))
        if "acme_x1_n1" not in path
    ]
    # Records describe the tree at an earlier commit.
    if tree_root / "records" not in readme.parents:
        assert [path for path in named if not any((home / path).exists() for home in homes)] == []
