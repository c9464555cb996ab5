"""What a folder holds that somebody wants to train from: told by file names and the first bytes of one file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from mlbert.data.formats.open import ACCEPTED, describe
from mlbert.data.formats.tfrecord import is_text
from mlbert.data.prepare.clean import wiki_files
from mlbert.data.prepare.text_parts import expand_inputs
from mlbert.host.errors import UserError

_LOOKED_AT = 65_536  # bytes


class Kind(StrEnum):
    """Kinds of input, by the step that they begin with."""

    wikiextractor = "wikiextractor"
    text = "text"
    tfrecord = "tfrecord"
    nvidia = "nvidia"
    prepared = "prepared"


def recognise(path: Path) -> Kind:
    """The kind of a folder, or of one text part or TFRecord file. Raises UserError: it is none that can be prepared, or
    it is damaged."""
    if path.is_dir() and any(path.rglob("wiki_*")):
        wiki_files(path)
        return Kind.wikiextractor
    if _is_text(path):
        return Kind.text
    try:
        kind = describe(path if path.is_dir() else path.parent).kind
    except UserError as error:
        if path.is_dir() and error.code != "data.missing":
            raise  # a data set of a known kind, but damaged
        reason = "is not recognised" if path.exists() else "there is no such file or folder"
        code = "data.format" if path.exists() else "file.missing"
        raise UserError(code, path, reason, f"Give text parts, a WikiExtractor folder, {ACCEPTED}") from None
    if kind.startswith("nvidia"):
        return Kind.nvidia
    return Kind.tfrecord if kind == "tfrecord" else Kind.prepared


def _is_text(path: Path) -> bool:
    """Whether the first part is text: TFRecord files may have the same names."""
    try:
        with expand_inputs([path], skip_bad=True)[0].open("rb") as file:
            return is_text(file.read(_LOOKED_AT))
    except (UserError, OSError):
        return False
