"""Shell programs: their first lines, and their messages when something is missing."""

import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from programs import assert_refused, run_checked, run_quietly, wait_for, write_program

LAUNCH = "benchmarks/bert/implementations/pytorch/launch"
BARE = {"PATH": "/usr/bin:/bin"}


def test_programs_stop_at_the_first_error_and_avoid_eval_and_in_place_edits(
    shell_file: Path,
) -> None:
    text = shell_file.read_text()
    is_program = text.startswith("#!")
    if is_program:
        assert text.startswith("#!/bin/bash\n")
        assert "\nset -euo pipefail\n" in text
    else:
        # A sourced file must not change the options of the shell that it is sourced into.
        assert "set -e" not in text
        assert "# shellcheck shell=bash" in text
    words = text.split()
    assert "eval" not in words
    assert "-i" not in words or "sed" not in words
    # Slurm accepts a job script that is not executable.
    assert os.access(shell_file, os.X_OK) == (is_program and shell_file.suffix != ".sub")


def test_launchers_require_a_config_and_data(system_folder: Path, tmp_path: Path) -> None:
    """Without a job, it checks both; run_and_time.sh checks the config too."""
    program = system_folder.parent / "pytorch/launch/run_and_time.sh"
    assert_refused(run_quietly(program, env=BARE), "CONFIG_FILE is not set")
    done = run_quietly("bash", "run.sub", cwd=system_folder, env=BARE)
    assert done.returncode != 0
    assert "source config_<system>.sh" in done.stderr
    config = sorted(system_folder.glob("config_*.sh"))[0]
    line = f"source {config.name} && LOGDIR={tmp_path} DATADIR_PHASE2=/nowhere bash run.sub"
    done = run_quietly("bash", "-c", line, cwd=system_folder, env=BARE)
    assert done.returncode == 2
    assert "DATADIR_PHASE2=/nowhere cannot be read here" in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines()), done.stderr


def test_quickstart_rejects_wrong_arguments_and_systems(tree_root: Path) -> None:
    done = run_quietly(tree_root / "quickstart.sh", env={**BARE, "OSTYPE": "darwin23"})
    assert_refused(done, "error: Linux is required, but this is darwin23. Try: docker run ")
    for arguments, words in {
        "--runs none": "not a number",
        "--runs 0": "not a number",
        "--runs": "--runs needs a value",
        "--out": "--out needs a value",
        "--venv": "--venv needs a value",
        "--what": "unknown argument --what",
        "--out /proc/nowhere": "cannot be created",
    }.items():
        assert_refused(run_quietly(tree_root / "quickstart.sh", *arguments.split()), words)


def test_quickstart_does_not_write_into_a_folder_with_other_files(
    tree_root: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "results/mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert_refused(
        run_quietly(tree_root / "quickstart.sh", "--out", tmp_path, "--runs", "2"),
        "contains other files",
    )
    assert mine.read_text() == "mine"
    (tmp_path / "CONTENTS.txt").write_text("Somebody else's list.\n")
    assert_refused(
        run_quietly(tree_root / "quickstart.sh", "--out", tmp_path, "--runs", "2"),
        "contains other files",
    )
    assert mine.read_text() == "mine"


def test_setup_does_not_empty_an_environment_that_it_did_not_make(
    tree_root: Path, tmp_path: Path
) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    mine = tmp_path / ".venv/lib/mine.py"  # an environment without pip, as uv makes it
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")

    def set_up(python: str) -> subprocess.CompletedProcess[str]:
        setup = f"source '{tree_root / LAUNCH}/setup_venv.sh'; find_python() {{ {python}; }}"
        return run_quietly("bash", "-c", f"{setup}; setup_venv '{tmp_path}'")

    without_python = 'echo "error: no Python" >&2; return 2'
    done = set_up(without_python)
    assert_refused(done, f"{tmp_path}/.venv is not an environment with pip")
    assert mine.read_text() == "mine"
    (tmp_path / ".venv/mlbert-installed").touch()  # this program made it, and Python was removed
    assert_refused(set_up(without_python), "no Python")
    assert mine.exists()
    assert set_up("echo false").returncode == 2
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["mlbert-made-this"]


def test_quickstart_of_a_repository_that_cannot_be_written(
    tree_root: Path,
) -> None:
    """As another user if this one may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        (clone / LAUNCH).mkdir(parents=True)
        shutil.copy(tree_root / "quickstart.sh", clone)
        shutil.copy(tree_root / LAUNCH / "setup_venv.sh", clone / LAUNCH)
        for path in (Path(folder), clone):
            path.chmod(0o555)
        someone = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        done = run_quietly(*someone, clone / "quickstart.sh", env=BARE, cwd="/")
        assert_refused(done, "cannot be written. Choose folders elsewhere: ./quickstart.sh --out")
        words = ["--out", "/proc/out", "--venv", "/proc/venv"]
        done = run_quietly(*someone, clone / "quickstart.sh", *words, env=BARE, cwd="/")
        assert_refused(done, "/proc/out cannot be created")
        for path in (Path(folder), clone):
            path.chmod(0o755)
    setup = f"source '{tree_root / LAUNCH}/setup_venv.sh'; find_python() {{ echo python3; }}"
    done = run_quietly("bash", "-c", f"{setup}; setup_venv '{tree_root}' '' /proc/venv", env=BARE)
    assert_refused(done, "/proc/venv cannot be written. Name a folder for the virtual environment")


def test_an_interrupted_installation_is_one_line_and_status_130(
    tree_root: Path, tmp_path: Path
) -> None:
    """With a program in place of pip that ends as pip does: with a message and status 1."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    pip = (
        "trap 'echo ERROR: Operation cancelled by user >&2; exit 1' INT\n"
        'case "$*" in\n'
        "*--version*) exit 0 ;;\n"
        f"*install*) touch '{tmp_path}/began'; sleep 60 & wait ;;\n"
        "esac\n"
    )
    write_program(tmp_path / ".venv/bin/python", f"#!/bin/bash\n{pip}")
    command = f"source '{tree_root / LAUNCH}/setup_venv.sh'; setup_venv '{tmp_path}'"
    with subprocess.Popen(
        ["bash", "-c", command],
        env={**BARE, "TORCH_INDEX": "https://a/whl/cpu"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    ) as process:
        wait_for((tmp_path / "began").exists)
        os.killpg(process.pid, signal.SIGINT)
        _, messages = process.communicate(timeout=30)
    assert process.returncode == 130
    assert messages.strip() == "interrupted while installing; the same command continues"


@pytest.mark.parametrize(
    ("index", "words"),
    [("https://a/whl/cpu", "0.2 GB"), ("https://a/whl/cu128", "whl/cu128"), ("", "5 GB on disk")],
)
def test_torch_size_is_printed_and_its_index_can_be_chosen(
    index: str, words: str, tree_root: Path
) -> None:
    choose = '[[ -z "${TORCH_INDEX}" ]] || torch_index none'
    command = f"source '{tree_root / LAUNCH}/setup_venv.sh'; {choose}; torch_size '{index}'"
    done = run_quietly("bash", "-c", command, env={**BARE, "TORCH_INDEX": index})
    assert words in done.stdout.splitlines()[-1]
    assert done.stdout.startswith(index)


def find_python(
    tree_root: Path, path: Path, pythons: dict[str, bool], **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run setup_venv.sh's search for Python where PATH has only these {version: it can create
    environments}.
    """
    for version, has_venv in pythons.items():
        answers = f'case "$2" in *ensurepip*) exit {1 - has_venv};; *) echo {version} True;; esac'
        write_program(path / f"python{version}", f"#!/bin/sh\n{answers}\n")
    command = f"source '{tree_root / LAUNCH}/setup_venv.sh'; find_python"
    bash = shutil.which("bash") or "bash"
    return run_quietly(bash, "-c", command, env={"PATH": str(path), **environ})


def test_setup_chooses_a_python_that_can_create_environments(
    tree_root: Path, tmp_path: Path
) -> None:
    assert_refused(find_python(tree_root, tmp_path, {}), "no Python 3.11 or newer found")
    assert_refused(find_python(tree_root, tmp_path, {"3.12": False}), "apt install python3.12-venv")
    done = find_python(tree_root, tmp_path, {"3.11": False, "3.13": True})
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "python3.13"
    pythons = {"3.11": True, "3.12": True}
    done = find_python(tree_root, tmp_path, pythons, PYTHON="python3.12")
    assert Path(done.stdout.strip()).name == "python3.12"


def test_download_unpacks_verified_sources_only(tree_root: Path, tmp_path: Path) -> None:
    """Run a copy of download_code.sh that lists one small archive, which a mirror serves."""
    mirror = tmp_path / "mirror"
    source = tmp_path / "small-1.0"
    mirror.mkdir()
    source.mkdir()
    (source / "file.txt").write_text("content")
    archive = mirror / "small-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "small-1.0")
    digest = run_quietly("sha256sum", archive).stdout.split()[0]
    listed = rf"\1\nsmall 1.0 {digest} https://host.invalid/small.tar.gz\2"
    text = re.sub(
        r"(?s)(cat <<'LIST')\n.*?(\nLIST\n)", listed, (tree_root / "download_code.sh").read_text()
    )
    program = write_program(tmp_path / "tree/download_code.sh", text)
    assert_refused(run_quietly(program, "nothing"), "Known: small")
    done = run_quietly(program)
    assert done.returncode == 2
    assert "https://host.invalid/small.tar.gz cannot be downloaded" in done.stderr
    content = archive.read_bytes()
    archive.write_bytes(b"something else")
    assert_refused(run_quietly(program, "--mirror", f"file://{mirror}"), "Nothing was written")
    assert not (program.parent / "third_party").exists()
    archive.write_bytes(content)
    run_checked(program, "--mirror", f"file://{mirror}")
    assert (program.parent / "third_party/small/file.txt").read_text() == "content"
    assert "is already there" in run_checked(program, "small").stdout
