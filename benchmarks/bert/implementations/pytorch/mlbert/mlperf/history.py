"""The git history of a tree, as far as it has one."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SECONDS = 60.0


def git(tree: Path, *words: str) -> str | None:
    """What git prints, to its last newline; ``None`` where it fails or the tree is no checkout."""
    if not (tree / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, timeout=_SECONDS, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):  # a name with half a character, or a null
        return None
    return done.stdout.decode("utf-8", errors="replace")


def has_commit(tree: Path, commit: object) -> bool:
    """Whether the history has it."""
    is_name = isinstance(commit, str) and len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    return is_name and git(tree, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def num_commits(tree: Path, begin: str, end: str) -> int:
    """Commits that lead to ``end`` and not to ``begin``; both must be in the history."""
    return int(git(tree, "rev-list", "--count", f"{begin}..{end}") or 0)


def changed_files(tree: Path, begin: str, end: str) -> list[str]:
    """Names of the files below benchmarks/ that differ."""
    return (git(tree, "diff", "--name-only", begin, end, "--", "benchmarks") or "").splitlines()
