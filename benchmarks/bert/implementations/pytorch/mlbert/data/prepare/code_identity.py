"""The identity of the code that prepares data: what decides the bytes of a step's output,
apart from its input and options.
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from pathlib import Path

from mlbert.host import native
from mlbert.host.provenance import files_sha256, installed_version

MADE_BY = "made_by"  # key of the `code_identity` in a plan
_CODE_FOLDERS = ("formats", "prepare")  # of `mlbert.data`
C_SOURCES = (  # of the libraries that these folders load
    "growing.h",
    "instances.c",
    "tfrecord.h",
    "tfrecord_frame.c",
    "tfrecord_read.c",
    "tfrecord_write.c",
    "wordpiece.c",
)


def tool_name() -> str:
    """Return this package and its version, as stored in manifests."""
    return f"mlbert {installed_version('mlbert') or 'unknown'}"


@functools.cache
def code_identity() -> dict[str, str]:
    """Return everything but input and options that decides the bytes of a step's output.

    This is the package and its version; a SHA-256 of the code that reads, generates and writes
    data, in Python and C; and the version of Python's Unicode tables, by which words are split.
    """
    data = Path(__file__).parents[1]
    modules = [
        path.relative_to(data).as_posix()
        for folder in _CODE_FOLDERS
        for path in (data / folder).rglob("*.py")
    ]
    sources = [name for name in C_SOURCES if (native.SOURCE_FOLDER / name).is_file()]
    digests = [files_sha256(data, modules), files_sha256(native.SOURCE_FOLDER, sources)]
    return {
        "tool": tool_name(),
        "code": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "unicode": unicodedata.unidata_version,
    }
