"""Read the code that a log names: files at the log's commit, the calls at a line,
and the repository's git history.
"""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mlperf_logging.mllog import constants

from mlaudit.logs import Log
from mlaudit.tree_export import differs, stated_digests
from mlbert.host import provenance
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.provenance import git_state, tree_digest
from mlbert.host.repository import PACKAGE_HOME

# Packages without this file are traced with their own code.
_DECLARATIONS = f"{PACKAGE_HOME}/config/section.py"
_MAX_NAME = 255  # characters that file systems allow

# Calls of these functions log the end of the run, whatever the reason.
_CALLS_THAT_END_A_RUN = ("aborting", "close_interrupted")


def git(tree: Path, *words: str) -> str | None:
    """Return git's output with its final newline, or None if it fails
    or the folder is not a checkout.
    """
    return provenance.git(tree, *words) if (tree / ".git").exists() else None


def has_commit(tree: Path, commit: object) -> bool:
    """Return True if the history has the commit, given by its 40 hexadecimal digits."""
    is_name = (
        isinstance(commit, str) and len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    )
    return is_name and git(tree, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def num_commits(tree: Path, begin: str, end: str) -> int:
    """Count the commits reachable from ``end`` but not from ``begin``.

    Both must be in the history.
    """
    return int(git(tree, "rev-list", "--count", f"{begin}..{end}") or 0)


def changed_files(tree: Path, begin: str, end: str) -> list[str]:
    """Return the names of the files below benchmarks/ that differ between two commits."""
    return (git(tree, "diff", "--name-only", begin, end, "--", "benchmarks") or "").splitlines()


class Sources:
    """The files of a tree as they were when a log was written.

    If the tree is a git checkout with the log's commit, files are read from that commit.
    """

    def __init__(self, tree: Path, log: Log) -> None:
        self.tree = tree
        # Why the files may not be those that wrote the log, or None if they are.
        self.gap: str | None = None
        # The log's commit, if the history has it and no file had been modified.
        self.commit: str | None = None
        self._texts: dict[str, str | None] = {}
        self._digests: dict[str, str] = {}
        with contextlib.suppress(UserError):
            self._digests = stated_digests(tree)
        self.lacks_commit = False  # True if the complete git history does not have the log's commit
        commit = log.value("commit")
        if not isinstance(commit, str):
            self.gap = "the log names no commit"
        elif log.value("tree_modified"):
            self.gap = f"the tree had been modified since commit {commit}"
        elif has_commit(tree, commit):
            self.commit = commit
        elif commit not in (git_state(tree)[0], tree_digest(tree)):
            self.gap = f"commit {commit} is not available"
            self.lacks_commit = git(tree, "rev-parse", "--is-shallow-repository") == "false\n"
        elif git_state(tree)[1]:
            self.gap = f"the tree had been modified since commit {commit} when it was exported"

    @property
    def committed_ms(self) -> float | None:
        """Return the time of the log's commit in ms since 1970,
        or None if the history does not have it.
        """
        if self.commit is None:
            return None
        seconds = (git(self.tree, "show", "-s", "--format=%ct", self.commit) or "").strip()
        return 1000.0 * int(seconds) if seconds.isdecimal() else None

    def is_altered(self, name: str) -> bool:
        """Return True if a file of an export does not match its digest in source.json."""
        if self.commit is not None or name not in self._digests:
            return False
        return differs(self.tree / name, self._digests[name]) is not None

    def text(self, name: str) -> str | None:
        """Return a file's text by its name in the tree, or None if there is no such file."""
        if not is_inside(name):
            return None
        if name not in self._texts:
            self._texts[name] = self._read(name)
        return self._texts[name]

    def _read(self, name: str) -> str | None:
        if self.commit is not None:
            return _shown(self.tree, self.commit, name)
        try:
            return read_plain(self.tree / name, "").decode(errors="replace")
        except UserError:
            return None

    def line(self, name: str, number: int) -> str | None:
        """Return one line of a file, counted from 1, or None if it does not exist."""
        return line_of(self.text(name), number)

    def nodes(self, name: str) -> tuple[ast.AST, ...]:
        """Return all nodes of a file's syntax tree, the module first.

        Empty if it is not valid Python.
        """
        return nodes_of(self.text(name) or "")

    def call_of(self, name: str, line: int, key: str) -> ast.Call | None:
        """Return the innermost call that spans a line of a file and names a key, or None."""
        here = [
            call
            for call in _calls_of(self.text(name) or "")
            if call.lineno <= line <= (call.end_lineno or 0) and _names_key(call, key)
        ]
        return min(here, key=lambda call: (call.end_lineno or 0) - call.lineno, default=None)

    def python_files(self, folder: str) -> list[str]:
        """Return the names of the Python files below a folder of the tree."""
        if self.commit is not None:
            listed = git(self.tree, "ls-tree", "-r", "--name-only", self.commit, "--", folder) or ""
            return [name for name in listed.splitlines() if name.endswith(".py")]
        return [
            path.relative_to(self.tree).as_posix()
            for path in sorted((self.tree / folder).rglob("*.py"))
        ]


def own_trace(sources: Sources, words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Trace a log with the package of the log's commit if that has no sections of settings,
    which `trace` reads.

    Args:
        sources: the tree at the log's commit.
        words: arguments of ``submission trace``, with absolute paths.

    Returns:
        The finished command, or None if this package can trace the log.
    """
    if sources.commit is None or sources.text(_DECLARATIONS) is not None:
        return None
    home = str(Path(PACKAGE_HOME).parent)
    with tempfile.TemporaryDirectory(prefix="mlbert_trace_") as folder:
        archive = Path(folder) / "package.tar"
        command = [
            "git",
            "-C",
            str(sources.tree),
            "archive",
            "-o",
            str(archive),
            sources.commit,
            "--",
            home,
        ]
        subprocess.run(command, check=True)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        environ = {**environment(), "PYTHONPATH": str(Path(folder) / home)}
        program = "from mlbert.cli.main import main; main()"  # old packages cannot be run with -m
        command = [sys.executable, "-P", "-c", program, "submission", "trace", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def is_inside(name: str) -> bool:
    """Return True if a file name in a log can be that of a file inside a tree."""
    is_plain = name.isascii() and name.isprintable() and len(name) < _MAX_NAME
    return is_plain and not Path(name).is_absolute() and ".." not in Path(name).parts


def line_of(text: str | None, number: int) -> str | None:
    """Return one line of a text, counted from 1, stripped, or None if it does not exist."""
    lines = (text or "").splitlines()
    return lines[number - 1].strip() if 1 <= number <= len(lines) else None


@lru_cache(maxsize=256)
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a program's syntax tree, the module first.

    Empty if it is not valid Python.
    """
    try:
        return tuple(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return ()


@lru_cache(maxsize=256)
def _calls_of(text: str) -> tuple[ast.Call, ...]:
    return tuple(node for node in nodes_of(text) if isinstance(node, ast.Call))


def _names_key(call: ast.Call, key: str) -> bool:
    """Return True if a call has the key as an argument or calls a function of that name."""
    name = terminal_name(call.func)
    if name == key or (key == constants.RUN_STOP and name in _CALLS_THAT_END_A_RUN):
        return True
    return any(
        is_key(argument, key) for argument in (*call.args, *(word.value for word in call.keywords))
    )


def is_key(argument: ast.expr, key: str) -> bool:
    """Return True if an argument is the key: a string, an f-string that begins like it and fits, or
    a constant of `mlperf_logging`.
    """
    if isinstance(argument, ast.JoinedStr) and key_of(argument.values[0]):
        parts = (re.escape(text) if (text := key_of(part)) else ".+" for part in argument.values)
        return re.fullmatch("".join(parts), key) is not None
    return key_of(argument) == key


def key_of(argument: ast.expr) -> str | None:
    """Return the string value of an argument that is a literal
    or an `mlperf_logging` constant, else None.
    """
    if isinstance(argument, ast.Constant):
        return argument.value if isinstance(argument.value, str) else None
    return getattr(constants, terminal_name(argument) or "", None)


def terminal_name(node: ast.expr) -> str | None:
    """Return the last part of a dotted name, or None for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


@lru_cache(maxsize=512)
def _shown(tree: Path, commit: str, name: str) -> str | None:
    """Return a file of a commit. Cached, because commits never change."""
    return git(tree, "show", f"{commit}:{name}")
