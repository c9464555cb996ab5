"""Stand-in programs for tests of shell code, what they and the real ones print, and ports for servers."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Container, Iterable, Mapping
from pathlib import Path


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


def copy_files(paths: Iterable[Path], tree_root: Path, root: Path, without: Container[str] = ()) -> None:
    """Copy files of the tree, except top-level folders."""
    for path in paths:
        name = path.relative_to(tree_root)
        if name.parts[0] not in without:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, root / name)


def run_quietly(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its status and output, whatever they are."""
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)


def exports_of(config: Path) -> dict[str, str]:
    """Return the environment after sourcing a file in an otherwise empty one."""
    done = run_quietly("bash", "-c", 'source "$0" && env -0', config, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def assert_refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """Assert that a program ended with status 2 and one line, which contains the words."""
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert words in done.stderr


def words_as_dict(text: str) -> dict[str, str]:
    """Return {name: value} of the words name=value."""
    return dict(word.split("=", 1) for word in text.split())


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]
