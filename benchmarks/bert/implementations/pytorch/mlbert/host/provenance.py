"""Where code comes from: the tree, its commit, the versions of what it needs."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json

SOURCE_STATEMENT = "source.json"
PACKAGE_HOME = "benchmarks/bert/implementations/pytorch/mlbert"
TENSORFLOW2 = "tensorflow2"  # the recipe that TensorFlow runs
TENSORFLOW2_HOME = "benchmarks/bert/implementations/tensorflow2/tf2_bert"

_PACKAGE = Path(__file__).resolve().parents[1]
_DISTRIBUTIONS = (
    *("mlbert", "torch", "triton", "tensorflow", "tensorflow-cpu"),
    *("numpy", "h5py", "tokenizers", "safetensors", "mlperf-logging"),
)


def tree_root() -> Path:
    """The submission tree that this package lies in; the package's parent folder when it is installed elsewhere."""
    root = _PACKAGE.parents[PACKAGE_HOME.count("/")]
    return root if root / PACKAGE_HOME == _PACKAGE else _PACKAGE.parent


def shipped(name: str) -> Path:
    """The folder ``configs`` or ``csrc``: beside the package in the tree, inside it where a wheel was installed."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def tree_relative(path: Path, root: Path | None = None) -> str:
    """The file's name in the tree, with forward slashes, wherever the package is installed; outside of it the whole
    path."""
    path, root = path.resolve(), (root or tree_root()).resolve()
    if path.is_relative_to(_PACKAGE):
        return f"{PACKAGE_HOME}/{path.relative_to(_PACKAGE).as_posix()}"
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def recipe_file(name: str) -> str:
    """The file of a recipe, relative to the tree."""
    return f"{TENSORFLOW2_HOME}/recipe.py" if name == TENSORFLOW2 else f"{PACKAGE_HOME}/recipes/{name}.py"


def package_versions() -> dict[str, str]:
    """Distribution to version, of those that decide a run and are installed."""
    return {name: found for name in _DISTRIBUTIONS if (found := _version(name)) is not None}


def command_line() -> str:
    """The command that started this process, as a shell would take it."""
    return hide_credentials(shlex.join(sys.orig_argv))


def hide_credentials(text: str) -> str:
    """The text without the name and password of an address such as ``https://name:password@host/``."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)


def version() -> str:
    """Version of the package and the commit of its tree, for ``mlbert --version``."""
    commit, modified = git_state(tree_root())
    changed = ", changed" if modified else ""
    return f"mlbert {_version('mlbert') or 'not installed'} ({commit}{changed})"


def git_state(root: Path) -> tuple[str, bool]:
    """Commit of the tree and whether files differ from it; those in results/, which runs write, do not count.

    An exported tree has no git; there the statement that the export left (``source.json``) answers. Without both
    the files name themselves, see `tree_digest`.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == root.resolve():
        commit = _git(root, "rev-parse", "HEAD")
        if commit is not None:
            return commit, bool(_git(root, "status", "--porcelain", "--", ".", ":(exclude)results"))
    try:
        statement = read_json(root / SOURCE_STATEMENT, "Restore it")
        return str(statement["commit"]), bool(statement["dirty"])
    except (UserError, KeyError):
        return tree_digest(root), False


def tree_digest(root: Path) -> str:
    """``tree:sha256:`` and a digest of names and contents of the package's Python files."""
    folder = next(home for home in (root / PACKAGE_HOME, root / "mlbert", root) if home.is_dir())
    digest = hashlib.sha256()
    for path in sorted(file for file in folder.rglob("*.py") if file.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content}  {path.relative_to(folder).as_posix()}\n".encode())
    return f"tree:sha256:{digest.hexdigest()}"


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
