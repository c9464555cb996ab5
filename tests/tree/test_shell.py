"""Shell programs: their first lines, and their messages when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from programs import assert_refused, run_quietly, write_program

LAUNCH = "benchmarks/bert/implementations/pytorch/launch"
BARE = {"PATH": "/usr/bin:/bin"}


def test_programs_stop_at_the_first_error(shell_file: Path) -> None:
    text = shell_file.read_text()
    is_program = text.startswith("#!")
    if is_program:
        assert text.startswith("#!/bin/bash\n")
        assert "\nset -euo pipefail\n" in text
    else:
        # A sourced file must not change the options of the shell that it is sourced into.
        assert "set -e" not in text
        assert "# shellcheck shell=bash" in text
    # Slurm accepts a job script that is not executable.
    assert os.access(shell_file, os.X_OK) == (is_program and shell_file.suffix != ".sub")


def test_no_eval_and_no_in_place_edits(shell_file: Path) -> None:
    words = shell_file.read_text().split()
    assert "eval" not in words
    assert "-i" not in words or "sed" not in words


def test_run_and_time_requires_a_config(tree_root: Path) -> None:
    assert_refused(run_quietly(tree_root / LAUNCH / "run_and_time.sh", env=BARE), "CONFIG_FILE is not set")


def test_run_sub_requires_a_config_and_data(system_folder: Path, tmp_path: Path) -> None:
    """Without a job, it checks both."""
    done = run_quietly("bash", "run.sub", cwd=system_folder, env=BARE)
    assert done.returncode != 0
    assert "source config_<system>.sh" in done.stderr
    config = sorted(system_folder.glob("config_*.sh"))[0]
    line = f"source {config.name} && LOGDIR={tmp_path} DATADIR_PHASE2=/nowhere bash run.sub"
    done = run_quietly("bash", "-c", line, cwd=system_folder, env=BARE)
    assert done.returncode == 2
    assert "DATADIR_PHASE2=/nowhere cannot be read here" in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runs", "none"], "not a number"),
        (["--runs", "0"], "not a number"),
        (["--runs"], "--runs needs a value"),
        (["--out"], "--out needs a value"),
        (["--what"], "unknown argument --what"),
        (["--out", "/proc/nowhere"], "cannot be created"),
    ],
)
def test_quickstart_rejects_wrong_arguments(arguments: list[str], words: str, tree_root: Path) -> None:
    assert_refused(run_quietly(tree_root / "quickstart.sh", *arguments), words)


def test_quickstart_does_not_write_into_a_folder_with_other_files(tree_root: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.txt").write_text("mine")
    assert_refused(run_quietly(tree_root / "quickstart.sh", "--out", tmp_path, "--runs", "2"), "contains other files")
    assert (tmp_path / "results" / "mine.txt").read_text() == "mine"


def test_quickstart_requires_linux(tree_root: Path) -> None:
    done = run_quietly(tree_root / "quickstart.sh", env={**BARE, "OSTYPE": "darwin23"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: Linux is required, but this is darwin23. Try: docker run ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("index", "words"), [("https://a/whl/cpu", "0.2 GB"), ("https://a/whl/cu128", "whl/cu128"), ("", "5 GB on disk")]
)
def test_torch_size_is_printed_and_its_index_can_be_chosen(index: str, words: str, tree_root: Path) -> None:
    choose = '[[ -z "${TORCH_INDEX}" ]] || torch_index none'
    command = f"source '{tree_root / LAUNCH}/setup_venv.sh'; {choose}; torch_size '{index}'"
    done = run_quietly("bash", "-c", command, env={**BARE, "TORCH_INDEX": index})
    assert words in done.stdout.splitlines()[-1]
    assert done.stdout.startswith(index)


def find_python(tree_root: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run setup_venv.sh's search for Python with only the programs in ``path``."""
    command = f"source '{tree_root / LAUNCH}/setup_venv.sh'; find_python"
    return run_quietly(shutil.which("bash") or "bash", "-c", command, env={"PATH": str(path)})


def fake_python(folder: Path, name: str, version: str, modules: bool) -> None:
    """Create an interpreter that answers the two queries of setup_venv.sh."""
    answers = f'case "$2" in *ensurepip*) exit {0 if modules else 1};; *) echo {version} True;; esac'
    write_program(folder / name, f"#!/bin/sh\n{answers}\n")


@pytest.mark.parametrize(
    ("pythons", "answer"),
    [
        ({}, "no Python 3.11 or newer found"),
        ({"python3.12": False}, "apt install python3.12-venv"),
    ],
)
def test_setup_names_the_missing_package(
    pythons: dict[str, bool], answer: str, tree_root: Path, tmp_path: Path
) -> None:
    for name, modules in pythons.items():
        fake_python(tmp_path, name, name.removeprefix("python"), modules)
    assert_refused(find_python(tree_root, tmp_path), answer)


def test_setup_chooses_a_python_that_can_create_environments(tree_root: Path, tmp_path: Path) -> None:
    fake_python(tmp_path, "python3.11", "3.11", modules=False)
    fake_python(tmp_path, "python3.13", "3.13", modules=True)
    done = find_python(tree_root, tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "python3.13"


@pytest.fixture
def downloads(tree_root: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a copy of download_code.sh that lists one small archive, and a mirror that serves it."""
    mirror, source = tmp_path / "mirror", tmp_path / "small-1.0"
    mirror.mkdir()
    source.mkdir()
    (source / "file.txt").write_text("content")
    archive = mirror / "small-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "small-1.0")
    digest = run_quietly("sha256sum", archive).stdout.split()[0]
    text = (tree_root / "download_code.sh").read_text()
    before, rest = text.split("cat <<'LIST'\n", 1)
    after = rest.split("\nLIST\n", 1)[1]
    listed = f"cat <<'LIST'\nsmall 1.0 {digest} https://host.invalid/small.tar.gz\nLIST\n"
    return write_program(tmp_path / "tree/download_code.sh", f"{before}{listed}{after}"), mirror


def test_download_unpacks_verified_sources(downloads: tuple[Path, Path]) -> None:
    program, mirror = downloads
    done = run_quietly(program, "--mirror", f"file://{mirror}")
    assert done.returncode == 0, done.stderr
    assert (program.parent / "third_party/small/file.txt").read_text() == "content"
    again = run_quietly(program, "small")
    assert again.returncode == 0
    assert "is already there" in again.stdout


def test_download_rejects_a_wrong_checksum(downloads: tuple[Path, Path]) -> None:
    program, mirror = downloads
    (mirror / "small-1.0.tar.gz").write_bytes(b"something else")
    assert_refused(run_quietly(program, "--mirror", f"file://{mirror}"), "Nothing was written")
    assert not (program.parent / "third_party").exists()


def test_download_reports_an_unreachable_host(downloads: tuple[Path, Path]) -> None:
    program, _ = downloads
    done = run_quietly(program)
    assert done.returncode == 2
    assert "https://host.invalid/small.tar.gz cannot be downloaded" in done.stderr
    assert not (program.parent / "third_party").exists()


def test_download_rejects_an_unknown_name(tree_root: Path) -> None:
    assert_refused(run_quietly(tree_root / "download_code.sh", "nothing"), "Known: apex")
