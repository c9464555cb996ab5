"""Where a run's code came from: tree, commit, image and versions."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from mlbert.core.config import environment

SOURCE_STATEMENT = "source.json"
UNKNOWN = "unknown"

_PACKAGE_HOME = Path("benchmarks/bert/implementations/pytorch/mlbert")
_DISTRIBUTIONS = ("mlbert", "torch", "numpy", "h5py", "tokenizers", "safetensors", "mlperf-logging")


def tree_root() -> Path:
    """The submission tree that this package lies in; the package's parent folder when it is installed elsewhere."""
    package = Path(__file__).resolve().parents[1]
    root = package.parents[len(_PACKAGE_HOME.parts) - 1]
    return root if root / _PACKAGE_HOME == package else package.parent


def provenance(root: Path | None = None, data_manifest_sha256: str = UNKNOWN) -> dict[str, str | bool]:
    """Plain facts for the log and the run folder.

    Args:
        root: the tree; `tree_root` when absent.
        data_manifest_sha256: digest of the training set's manifest.

    Returns:
        ``commit`` (or "unknown"), ``dirty`` (uncommitted changes), ``image`` as CONT names it, ``image_digest`` as the
        launcher found it, ``image_commit`` that the Dockerfile left in the image, ``data_manifest_sha256``, ``python``,
        ``platform`` and ``version_<package>`` for each package that matters.
    """
    commit, dirty = git_state(root or tree_root())
    facts: dict[str, str | bool] = {
        "commit": commit,
        "dirty": dirty,
        "image": environment().get("CONT") or "none",
        "image_digest": environment().get("MLBERT_IMAGE_DIGEST") or "none",
        "image_commit": environment().get("MLBERT_IMAGE_COMMIT") or "none",
        "data_manifest_sha256": data_manifest_sha256,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _DISTRIBUTIONS:
        facts[f"version_{name}"] = _version(name)
    return facts


def version() -> str:
    """Version of the package and the commit of its tree, for ``mlbert --version``."""
    commit, dirty = git_state(tree_root())
    changed = ", changed" if dirty else ""
    return f"mlbert {_version('mlbert')} ({commit}{changed})"


def git_state(root: Path) -> tuple[str, bool]:
    """Commit of the tree and whether files differ from it.

    An exported tree has no git; there the statement that the export left (``source.json``) answers. Otherwise
    ("unknown", False).
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == root.resolve():
        commit = _git(root, "rev-parse", "HEAD")
        if commit is not None:
            return commit, bool(_git(root, "status", "--porcelain"))
    try:
        statement = json.loads((root / SOURCE_STATEMENT).read_text(encoding="utf-8"))
        return str(statement["commit"]), bool(statement["dirty"])
    except (OSError, ValueError, KeyError, TypeError):
        return UNKNOWN, False


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN
