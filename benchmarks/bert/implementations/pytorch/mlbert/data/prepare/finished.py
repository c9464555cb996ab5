"""What a finished step leaves behind, so that it is neither made again nor overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlbert.data.formats.checksums import FileSum, check_files, file_sums, listed_sums
from mlbert.data.formats.manifest import MANIFEST, Manifest, read_manifest
from mlbert.data.formats.tfrecord_list import RecordList, read_list
from mlbert.data.prepare.jobs import Progress
from mlbert.host.checksummed_json import parse_checksummed
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain


def tool_name() -> str:
    """This package and its version, as stored in manifests."""
    try:
        return f"mlbert {version('mlbert')}"
    except PackageNotFoundError:
        return "mlbert unknown"


def read_summary(path: Path) -> dict[str, Any] | None:
    """What a step that finished wrote of itself; None where it did not finish. Raises UserError: damaged."""
    if not path.exists():
        return None
    remedy = "Remove the folder and prepare again"
    if (found := parse_checksummed(read_plain(path, remedy).decode("utf-8", "replace"))) is None:
        raise UserError("data.damaged", path, "is damaged", remedy)
    return found


def check_options(out: Path, provenance: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Compare what a finished folder says it was made with; the options asked for now are as they come back from JSON.
    Raises UserError: they are other ones."""
    if provenance.get("options") != options:
        raise UserError(
            "prepare.other-options",
            out,
            "was prepared with other input or options",
            "Choose another --out, or remove it",
        )


def is_whole(out: Path, check: Callable[[], Iterable[FileSum]], progress: Progress) -> bool:
    """Whether all files of a finished folder are as they were made; says that there is nothing to do, or what is made
    again. ``check`` raises UserError where one is missing or has another size, and returns their checksums."""
    try:
        for file in check():
            if problem := file.problem():
                raise problem
    except UserError as problem:
        progress(f"{problem.subject}: {problem.problem}: it is made again")
        return False
    progress(f"{out} is finished with these options: nothing to do")
    return True


def whole_shards(*manifests: Manifest) -> list[FileSum]:
    """The ``check`` of `is_whole` for prepared sets."""
    for manifest in manifests:
        check_files(manifest)
    return [file for manifest in manifests for file in file_sums(manifest)]


def finished_manifest(out: Path, options: Mapping[str, Any], progress: Progress) -> Manifest | None:
    """The manifest of ``out`` when it was finished with the same options; None when it was not finished, or a file is
    not as it was made. Raises UserError as `check_options`."""
    if not (out / MANIFEST).exists():
        return None
    found = read_manifest(out)
    check_options(out, found.provenance, options)
    return found if is_whole(out, lambda: whole_shards(found), progress) else None


def finished_list(out: Path, options: Mapping[str, Any], progress: Progress) -> RecordList | None:
    """`finished_manifest` for TFRecords."""
    found = read_list(out)
    if found is None:
        return None
    check_options(out, found.provenance, options)

    def check() -> list[FileSum]:
        found.check_sizes([out / name for name in found.by_name])
        return listed_sums(out)

    return found if is_whole(out, check, progress) else None


def keep_apart(out: Path, inputs: Iterable[Path]) -> None:
    """Make sure that nothing is written over what is read, whatever links lead there. Raises UserError."""
    target = out.resolve()
    for given in inputs:
        inside = given.iterdir() if given.is_dir() else ()
        if given.resolve() == target or (not given.is_dir() and given.resolve().parent == target):
            raise UserError("file.in-input", out, "is the input folder", "Choose another --out")
        if any(path.is_symlink() and path.resolve().parent == target for path in inside):
            raise UserError("file.in-input", out, f"holds the files that {given} links to", "Choose another --out")
