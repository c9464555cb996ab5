"""What a finished step leaves behind, so that it is neither made again nor overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlbert.core.errors import UserError
from mlbert.prepare.jobs import Progress
from mlbert.store.manifest import MANIFEST, Manifest, read_manifest


def tool_name() -> str:
    """This package and its version, as stored in manifests."""
    try:
        return f"mlbert {version('mlbert')}"
    except PackageNotFoundError:
        return "mlbert unknown"


def check_finished(out: Path, provenance: Mapping[str, Any], options: Mapping[str, Any], progress: Progress) -> None:
    """Compare what a finished folder says it was made with, and say that there is nothing to do; the options asked for
    now are as they come back from JSON. Raises UserError: they are other ones."""
    if provenance.get("options") != options:
        raise UserError(out, "was prepared with other input or options", "Choose another --out, or remove it")
    progress(f"{out} is finished with these options: nothing to do")


def finished_manifest(out: Path, options: Mapping[str, Any], progress: Progress) -> Manifest | None:
    """The manifest of ``out`` when it was finished with the same options; None when it was not finished.
    Raises UserError as `check_finished`."""
    if not (out / MANIFEST).exists():
        return None
    found = read_manifest(out)
    check_finished(out, found.provenance, options, progress)
    return found
