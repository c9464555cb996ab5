"""Provenance of the code: the tree, its commit, and the versions of its dependencies."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from mlbert.host.errors import UserError, hide_credentials
from mlbert.host.json_files import read_json
from mlbert.host.repository import HOMES, PACKAGE, PACKAGE_HOME, TENSORFLOW2_HOME, repository

SOURCE_STATEMENT = "source.json"
TENSORFLOW2 = "tensorflow2"  # the recipe run by TensorFlow

_READ_BY_RUNS = (".py", ".sh", ".sub", ".json", ".yaml", ".yml", ".c", ".cpp", ".cu", ".cuh", ".h")
_WRITTEN = (":(exclude)results", ":(exclude)systems")
_DISTRIBUTIONS = (
    "mlbert",
    "torch",
    "triton",
    "tensorflow",
    "tensorflow-cpu",
    "numpy",
    "h5py",
    "tokenizers",
    "safetensors",
    "mlperf-logging",
)


def tree_root() -> Path:
    """Return the repository that contains this package,
    or the package's parent folder if there is none.
    """
    return repository() or PACKAGE.parent


def shipped(name: str) -> Path:
    """Return the folder ``configs`` or ``csrc``: next to the package in a repository,
    inside it in an installed wheel.
    """
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def tree_relative(path: Path, root: Path | None = None) -> str:
    """Return a file's path in the repository, with forward slashes; the full path outside it.

    The path is the same wherever the package is installed.
    """
    path = path.resolve()
    root = (root or tree_root()).resolve()
    for package, home in HOMES.items():
        installed = PACKAGE.parent / package
        if path.is_relative_to(installed):
            return f"{home}/{path.relative_to(installed).as_posix()}"
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def recipe_file(name: str) -> str:
    """Return the file of a recipe, relative to the tree."""
    return (
        f"{TENSORFLOW2_HOME}/recipe.py"
        if name == TENSORFLOW2
        else f"{PACKAGE_HOME}/recipes/{name}.py"
    )


def package_versions() -> dict[str, str]:
    """Return the versions of the installed distributions that affect a run, by name."""
    return {
        name: found for name in _DISTRIBUTIONS if (found := installed_version(name)) is not None
    }


def command_line() -> str:
    """Return the command that started this process, quoted for a shell."""
    return hide_credentials(shlex.join(sys.orig_argv))


def package_version() -> str:
    """Return the version of the installed distribution,
    or of a source checkout that is not installed.
    """
    if (installed := installed_version("mlbert")) is not None:
        return installed
    try:
        text = (tree_root() / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"  # the package alone, copied somewhere


def version(program: str = "mlbert") -> str:
    """Return the version of the distribution and the repository's commit,
    for ``--version`` of a program.
    """
    commit, modified = git_state(tree_root())
    changed = ", changed" if modified else ""
    return f"{program} {package_version()} ({commit}{changed})"


def git_state(root: Path) -> tuple[str, bool]:
    """Return the tree's commit, and whether code or settings differ from it or are new.

    An exported tree has no git: there the exported statement (``source.json``) is used. Without
    either, the commit is `tree_digest`.
    """
    top = git(root, "rev-parse", "--show-toplevel")
    if top is not None and Path(top.strip()).resolve() == root.resolve():
        commit = git(root, "rev-parse", "HEAD")
        if commit is not None:
            changed = (
                git(
                    root,
                    "status",
                    "--porcelain",
                    "-z",
                    "--no-renames",
                    "-uall",
                    "--",
                    ".",
                    *_WRITTEN,
                )
                or ""
            )
            return commit.strip(), any(name.endswith(_READ_BY_RUNS) for name in changed.split("\0"))
    try:
        statement = read_json(root / SOURCE_STATEMENT, "Restore it")
        return str(statement["commit"]), bool(statement["dirty"])
    except (UserError, KeyError):
        return tree_digest(root), False


def tree_digest(root: Path) -> str:
    """Return ``tree:sha256:`` and a digest of the names and contents of our packages' Python files.

    The digest of a repository is that of the wheel made from it. If a folder has none of our
    packages, all its Python files count.
    """
    folders = {}
    for package, home in HOMES.items():
        for place in (root / home, root / package):
            if place.is_dir():
                folders[package] = place
                break
    if not folders:
        folders["."] = root
    digest = hashlib.sha256()
    for package, folder in folders.items():
        files = [path for path in folder.rglob("*.py") if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        digest.update(f"{files_sha256(folder, names)}  {package}\n".encode())
    return f"tree:sha256:{digest.hexdigest()}"


def files_sha256(folder: Path, names: Iterable[str]) -> str:
    """Return a SHA-256 of the names and contents of files in a folder, in any order.

    Raises OSError.
    """
    digest = hashlib.sha256()
    for path in sorted(folder / name for name in names):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content}  {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


def git(root: Path, *arguments: str) -> str | None:
    """Return git's output with its final newline, or None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    except (
        OSError,
        ValueError,
        subprocess.SubprocessError,
    ):  # invalid file name: a surrogate or a null byte
        return None
    return done.stdout.decode("utf-8", errors="replace")


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
