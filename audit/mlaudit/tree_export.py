"""Export a submission tree without tests, tools, records, caches and dot files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.logs import too_large
from mlbert.host.errors import UserError
from mlbert.host.files import writing
from mlbert.host.json_files import read_json
from mlbert.host.provenance import SOURCE_STATEMENT, git_state

_TOP_LEVEL_LEFT_OUT = frozenset({"tests", "tools", "records", "runs", "build", "dist", "venv"})
_FOLDERS_LEFT_OUT = frozenset({"__pycache__", "node_modules"})
_SUFFIXES_LEFT_OUT = (".pyc", ".pyo", ".so", ".o", ".egg-info")
_EXPORTED = "source.json names the commit and the digest of each of its files"
_CODE = "benchmarks"


def is_checkout(tree: Path) -> bool:
    """Return True if the folder is the top of a git checkout."""
    return (tree / ".git").exists()


def export_tree(tree: Path, target: Path) -> int:
    """Copy a tree to a new or empty folder, with links replaced by files,
    and write ``source.json``.

    ``source.json`` has ``commit``, ``dirty`` and ``files`` (name to SHA-256 of every file in
    ``benchmarks/``), which prove the commit of the code without git.

    Args:
        tree: a checkout (its tracked files are copied, and new ones in results/ and systems/)
            or a plain folder.
        target: the folder to write.

    Returns:
        The number of files written, not counting ``source.json``.

    Raises:
        UserError: the target is not empty or not writable,
            or a file cannot be part of a submission.
    """
    tree = tree.resolve()
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError("file.exists", target, "is not an empty folder", "Name a new one")
    names = [
        name
        for name in _list_files(tree)
        if _belongs(name) and not (tree / name).is_relative_to(target)
    ]
    if not names:
        raise UserError(
            "file.missing", tree, "contains no file to export", "Name a submission tree"
        )
    _refuse_illegal(tree, names)
    with writing(target, "Choose a folder that is writable"):
        for name in names:
            destination = target / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, destination)
        commit, dirty = git_state(tree)
        files = {str(name): digest_of(target / name) for name in names if name.parts[0] == _CODE}
        statement = json.dumps({"commit": commit, "dirty": dirty, "files": files}, indent=2) + "\n"
        (target / SOURCE_STATEMENT).write_text(statement, encoding="utf-8")
    return len(names)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differs(path: Path, digest: object) -> str | None:
    """Return why a file does not match a digest, or None if it does."""
    if not path.is_file():
        return "is missing"
    try:
        return None if digest_of(path) == digest else "is another file"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def is_export(tree: Path) -> bool:
    """Return True if `export_tree` wrote the folder and it is not a checkout."""
    return (tree / SOURCE_STATEMENT).is_file() and not is_checkout(tree)


def stated_digests(tree: Path) -> dict[str, str]:
    """Map file names to their SHA-256 in an export's ``source.json``.

    Raises UserError if it cannot be read.
    """
    files = read_json(tree / SOURCE_STATEMENT, "").get("files")
    return {name: str(digest) for name, digest in files.items()} if isinstance(files, dict) else {}


def check_source(tree: Path) -> Complaints:
    """Every file that source.json lists exists and is unchanged since the export."""
    try:
        files = stated_digests(tree)
    except UserError:
        yield Complaint(Outcome.ERROR, f"{SOURCE_STATEMENT} cannot be read", _EXPORTED)
        return
    if not files:
        yield Complaint(
            Outcome.NOTE,
            f"{SOURCE_STATEMENT} lists no files, so only its word says which code this is",
        )
    for name, digest in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield Complaint(
                Outcome.ERROR,
                f"{SOURCE_STATEMENT} lists {name}, which is outside the tree",
                _EXPORTED,
            )
        elif (problem := differs(tree / name, digest)) is not None:
            yield Complaint(Outcome.ERROR, f"{name} {problem}", _EXPORTED)


def _list_files(tree: Path) -> list[PurePosixPath]:
    if is_checkout(tree):
        command = ["git", "-C", str(tree), "ls-files", "-z"]
        new = [*command, "--others", "--exclude-standard", "--", "results", "systems"]
        try:
            listed = "".join(
                subprocess.run(words, capture_output=True, check=True).stdout.decode()
                for words in (command, new)
            )
        except (OSError, subprocess.CalledProcessError) as error:
            reason = "is a git checkout that git cannot list"
            raise UserError(
                "program.failed", tree, reason, "Install git, or repair the checkout"
            ) from error
        names = sorted({PurePosixPath(name) for name in listed.split("\0") if name})
        return [name for name in names if (tree / name).is_symlink() or (tree / name).is_file()]
    names = []
    for folder, subfolders, files in os.walk(tree):
        subfolders[:] = sorted(name for name in subfolders if not _is_left_out(name))
        here = PurePosixPath(Path(folder).relative_to(tree).as_posix())
        names += [here / name for name in sorted(files)]
    return names


def _belongs(name: PurePosixPath) -> bool:
    return name.parts[0] not in _TOP_LEVEL_LEFT_OUT and not any(
        _is_left_out(part) for part in name.parts
    )


def _is_left_out(part: str) -> bool:
    return part.startswith(".") or part in _FOLDERS_LEFT_OUT or part.endswith(_SUFFIXES_LEFT_OUT)


def _refuse_illegal(tree: Path, names: list[PurePosixPath]) -> None:
    for name in names:
        path = tree / name
        if " " in str(name):
            reason = "has a space in its name, which the repository checker rejects"
            raise UserError("submission.file-name", str(name), reason, "Rename it")
        if not path.is_file():
            reason = (
                "is a broken link or a link to a folder"
                if path.is_symlink()
                else "is neither a file nor a folder"
            )
            raise UserError(
                "submission.file-name", str(name), reason, "Replace it with a regular file"
            )
        if problem := too_large(path):
            raise UserError(
                "file.too-large",
                str(name),
                problem,
                "Leave it out: the repository checker rejects it",
            )
