"""Collect the English text installed on this machine:
a larger text than `python_text`, for measurements.

Sources are docstrings, comments and text files of every installed package, manual pages, and
``/usr/share/doc``. Repeated sentences are dropped, so that no sentence is in two documents. The
text depends on the installed packages; its digest identifies it (`write_text`).
"""

from __future__ import annotations

import gzip
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mlbert.data.prepare import python_text
from mlbert.data.prepare.prose import prose_sentences

MANUALS = Path("/usr/share/man")
SYSTEM_DOCUMENTS = Path("/usr/share/doc")
MIN_SENTENCES = 3  # per document, without repeated ones

_REQUEST = re.compile(r"^[.'](?:\\\"|\w+)[ \t]*(.*)$")  # a troff command line
_BREAKS = re.compile(r"^[.'](?:PP|P|LP|SH|SS|TP|IP|HP|sp|RS|RE|Pp|Sh|Ss|It)\b")
_ESCAPE = re.compile(r"\\(?:f(?:\[\w*\]|\(..|.)|s[+-]?\d|[|&^%,/:]|\*?\(..|\[\w+\])")
_KEPT_REQUESTS = re.compile(r"^[.'](?:B|I|BR|RB|IR|RI|BI|IB|SM|Nm|Fl|Ar|Xr|Dq|Em)\b")


def documents() -> Iterator[list[str]]:
    """Yield documents as lists of sentences, always in the same order on the same machine."""
    seen: set[int] = set()
    for document in chain(python_text.documents(), _packages(), _manuals(), _system_documents()):
        own = []
        for sentence in document:
            if (key := hash(sentence)) not in seen:
                seen.add(key)
                own.append(sentence)
        if len(own) >= MIN_SENTENCES:
            yield own


def write_text(path: Path, most_bytes: int) -> str:
    """Write documents, one sentence per line and a blank line after each document,
    up to ``most_bytes``.

    Returns the text's sha256.
    """
    digest = hashlib.sha256()
    written = 0
    with path.open("wb") as file:
        for document in documents():
            data = ("\n".join(document) + "\n\n").encode("utf-8", errors="ignore")
            file.write(data)
            digest.update(data)
            if (written := written + len(data)) >= most_bytes:
                break
    return digest.hexdigest()


def _packages() -> Iterator[list[str]]:
    paths = sysconfig.get_paths()
    for root in dict.fromkeys(
        (paths["purelib"], paths["platlib"], "/usr/lib/python3/dist-packages")
    ):
        yield from python_text.documents_below(Path(root))


def _manuals() -> Iterator[list[str]]:
    for path in sorted(MANUALS.glob("man*/*")):
        yield prose_sentences(manual_text(_read(path)))


def manual_text(text: str) -> str:
    """Return the text of a troff manual page: paragraph breaks become blank lines,
    other commands are dropped.
    """
    lines = []
    for line in text.splitlines():
        if _BREAKS.match(line):
            line = ""
        elif _KEPT_REQUESTS.match(line):
            line = _REQUEST.sub(r"\1", line).replace('"', "")
        elif line.startswith((".", "'")):
            continue
        lines.append(_ESCAPE.sub("", line).replace("\\-", "-").replace("\\e", "\\").strip())
    return "\n".join(lines)


def _system_documents() -> Iterator[list[str]]:
    for path in sorted(SYSTEM_DOCUMENTS.rglob("*")):
        if path.is_file() and "changelog" not in path.name.lower():
            yield from python_text.sections_of(path, _read(path))


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode(
            "utf-8", errors="ignore"
        )
    except (OSError, EOFError):
        return ""
