"""Recognize the finished output of a step, which is kept if it is whole
and has the same options.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mlbert.data.formats.checksums import FileSum, check_files, file_sums, listed_sums
from mlbert.data.formats.manifest import MANIFEST, Manifest, read_manifest
from mlbert.data.formats.tfrecord_plain import RecordList, read_list
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_checksummed
from mlbert.host.progress import Progress

WORK_FOLDER = ".tasks"  # in the output; see `mlbert.data.prepare.step_tasks`


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary that a finished step wrote, or None if it did not finish.

    Raises UserError: damaged.
    """
    if not path.exists():
        return None
    remedy = "Remove the folder and prepare again"
    if (found := parse_checksummed(read_plain(path, remedy).decode("utf-8", "replace"))) is None:
        raise UserError("data.damaged", path, "is damaged", remedy)
    return found


def check_options(out: Path, provenance: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Compare the options of a finished folder with the requested ones, which must have the types
    that JSON returns. Raises UserError: they differ.
    """
    if provenance.get("options") != options:
        remedy = "Choose another --out, or remove it"
        raise UserError(
            "prepare.other-options", out, "was prepared with different input or options", remedy
        )


def is_whole(out: Path, check: Callable[[], Iterable[FileSum]], progress: Progress) -> bool:
    """Return whether all files of a finished folder are intact; report that there is nothing to do,
    or what is rebuilt. ``check`` returns the files' checksums and raises UserError if one is
    missing or has another size.
    """
    try:
        sums = list(check())
        with progress.task(f"checking {out}", len(sums), "files") as advance:
            for file in sums:
                if problem := file.problem():
                    raise problem
                advance(1)
    except UserError as problem:
        progress(f"{problem.subject}: {problem.problem}: rebuilding it")
        return False
    # Of a run that was killed after its last file.
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
    progress(f"{out} is finished with these options: nothing to do")
    return True


def whole_shards(*manifests: Manifest) -> list[FileSum]:
    """Check prepared sets, as the ``check`` of `is_whole`."""
    for manifest in manifests:
        check_files(manifest)
    return [file for manifest in manifests for file in file_sums(manifest)]


def finished_manifest(out: Path, options: Mapping[str, Any], progress: Progress) -> Manifest | None:
    """Return the manifest of ``out`` if it was finished with the same options, or None if it was
    not finished or a file is damaged. Raises UserError as `check_options`.
    """
    if not (out / MANIFEST).exists():
        return None
    found = read_manifest(out)
    check_options(out, found.provenance, options)
    return found if is_whole(out, lambda: whole_shards(found), progress) else None


def finished_list(out: Path, options: Mapping[str, Any], progress: Progress) -> RecordList | None:
    """Do the same as `finished_manifest` for TFRecords."""
    found = read_list(out)
    if found is None:
        return None
    check_options(out, found.provenance, options)

    def check() -> list[FileSum]:
        found.check_sizes([out / name for name in found.by_name])
        return listed_sums(out)

    return found if is_whole(out, check, progress) else None


def keep_apart(out: Path, inputs: Iterable[Path]) -> None:
    """Check that no output overwrites an input, also through links. Raises UserError."""
    target = out.resolve()
    for given in inputs:
        inside = given.iterdir() if given.is_dir() else ()
        if given.resolve() == target or (not given.is_dir() and given.resolve().parent == target):
            raise UserError("file.in-input", out, "is the input folder", "Choose another --out")
        if any(path.is_symlink() and path.resolve().parent == target for path in inside):
            raise UserError(
                "file.in-input",
                out,
                f"contains the files that {given} links to",
                "Choose another --out",
            )
