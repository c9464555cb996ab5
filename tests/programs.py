"""Stand-in programs for tests of shell code, what they and the real ones print,
and ports for servers.
"""

import contextlib
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from unittest import mock

RunMlbert = Callable[..., tuple[int, str, str]]  # the fixture run_mlbert


def write_program(path: Path, text: str) -> Path:
    """Write an executable program; its folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write texts below the folder; return it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_mlbert(folder: Path, python: str | Path = sys.executable) -> Path:
    """Write a program `mlbert` that runs the package with this Python."""
    return write_program(folder / "mlbert", f'#!/bin/sh\nexec "{python}" -m mlbert "$@"\n')


def user_environ(**exports: object) -> dict[str, str]:
    """Return what every user's shell exports, how threads wait in tests, and these exports."""
    names = ("HOME", "LANG", "PATH", "XDG_CACHE_HOME", "OMP_WAIT_POLICY")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return kept | {name: str(value) for name, value in exports.items()}


def copy_files(
    paths: Iterable[Path], tree_root: Path, root: Path, without: Container[str] = ()
) -> None:
    """Copy files of the tree, except top-level folders."""
    for path in paths:
        name = path.relative_to(tree_root)
        if name.parts[0] not in without:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, root / name)


def run_quietly(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its status and output, whatever they are."""
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, **options
    )


def run_checked(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed and return its output."""
    done = run_quietly(*words, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def run_git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return run_checked("git", "-C", folder, *settings, *words).stdout.strip()


def commit_all(folder: Path) -> str:
    """Commit everything below the folder, which becomes a repository if it is none;
    return the commit.
    """
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "a commit")):
        run_git(folder, *words)
    return run_git(folder, "rev-parse", "HEAD")


def run_script(path: Path, *words: object) -> int:
    """Run a Python program in this process and return its exit status."""
    with mock.patch.object(sys, "argv", [str(path), *map(str, words)]):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def exports_of(config: Path) -> dict[str, str]:
    """Return the environment after sourcing a file in an otherwise empty one."""
    done = run_checked("bash", "-c", 'source "$0" && env -0', config, env={"PATH": "/usr/bin:/bin"})
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def assert_refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """Assert that a program ended with status 2 and one line, which contains the words."""
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert words in done.stderr


def words_as_dict(text: str) -> dict[str, str]:
    """Return {name: value} of the words name=value."""
    return dict(word.split("=", 1) for word in text.split())


def wait_for(is_met: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until the condition is met, for at most these seconds."""
    deadline = time.monotonic() + seconds
    while not is_met() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_met()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in sockets]
