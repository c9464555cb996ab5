"""Read the documents of a folder of text files, each a list of sentences.

`documents` reads every ``*.txt`` below the folder. With ``one_per_line``, each line is a sentence
and a blank line ends a document. Otherwise each file is one document and its paragraphs are split
into sentences.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from mlbert.data.formats.manifest import check_folder, file_sha256, reading
from mlbert.data.prepare.corpus_files import IN_FOLDER, text_blocks, text_lines
from mlbert.data.prepare.sentences import split_sentences
from mlbert.host.errors import UserError
from mlbert.host.files import plain_size


def text_files(folder: Path) -> list[Path]:
    """Return the ``*.txt`` files below a folder, sorted by relative name.

    Raises UserError: the folder does not exist, cannot be read, or has no text file; or one is a
    link to nothing, a pipe or a device.
    """
    remedy = "Give a folder with *.txt files"
    check_folder(folder, remedy)
    with reading(folder, remedy):
        os.listdir(folder)  # rglob treats an unreadable folder as empty
    files = [path for path in folder.rglob("*.txt") if not path.is_dir()]
    for path in files:
        plain_size(path, IN_FOLDER)
    if not files:
        raise UserError("data.missing", folder, "contains no *.txt file", remedy)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def name_note(folder: Path) -> str:
    """Return a sentence about the visible files below a folder that are not `text_files`,
    or an empty text.
    """
    names = sorted(
        path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    kinds = Counter(
        Path(name).suffix or "without suffix" for name in names if not name.endswith(".txt")
    )
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(5))
    return (
        f"{kinds.total():,} of {len(names):,} files are left out because of their names: {listed}"
        if kinds
        else ""
    )


def keep_out(folder: Path, out: Path) -> None:
    """Check that ``out`` is not in the input folder.

    Raises UserError: it is, so its text files would be read the next time.
    """
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(
            "file.in-input",
            out,
            f"is the input folder {folder} or inside it",
            "Choose another --out",
        )


def documents(folder: Path, one_per_line: bool = False) -> Iterator[list[str]]:
    """Yield the documents of a folder as the module docstring describes.

    Raises UserError: a file cannot be read or is not UTF-8 (names the line),
    or all files are empty.
    """
    empty = True
    for path in text_files(folder):
        for document in _documents(text_lines(path, "Cut it into several"), one_per_line):
            empty = False
            yield document
    if empty:
        raise UserError("data.empty", folder, "its text files are all empty", "Give text")


def source_name(folder: Path, one_per_line: bool) -> dict[str, str | bool]:
    """Return an identifier of the text, which is stored with the data and compared on a rerun.

    Raises UserError as `documents`.
    """
    state = hashlib.sha256()
    for path in text_files(folder):
        state.update(f"{path.relative_to(folder).as_posix()}\0{file_sha256(path)}\n".encode())
    return {"kind": "text", "sha256": state.hexdigest(), "one_per_line": one_per_line}


def _documents(lines: Iterable[str], one_per_line: bool) -> Iterator[list[str]]:
    blocks = text_blocks(chain.from_iterable(map(str.splitlines, lines)))
    if one_per_line:
        yield from ([line.strip() for line in block] for block in blocks)
    elif sentences := [
        sentence for block in blocks for sentence in split_sentences(" ".join(block))
    ]:
        yield sentences
