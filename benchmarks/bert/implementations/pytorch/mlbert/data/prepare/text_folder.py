"""A folder of text files as documents of sentences.

Every ``*.txt`` below the folder is read. A blank line ends a document when the file is one sentence a line already
(``one_per_line``); otherwise a file is one document and its paragraphs are split into sentences.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from mlbert.data.formats.manifest import file_sha256, no_folder, reading
from mlbert.data.prepare.prose import split_sentences
from mlbert.host.errors import UserError


def text_files(folder: Path) -> list[Path]:
    """The ``*.txt`` files below a folder, in order of their relative names. Raises UserError: no such folder,
    unreadable, or no text file in it."""
    remedy = "Give a folder with *.txt files"
    if not folder.is_dir():
        raise UserError("file.missing", folder, no_folder(folder), remedy)
    with reading(folder, remedy):
        os.listdir(folder)  # rglob takes a folder that cannot be read for an empty one
    files = [path for path in folder.rglob("*.txt") if path.is_file()]
    if not files:
        raise UserError("data.missing", folder, "holds no *.txt file", remedy)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def keep_out(folder: Path, out: Path) -> None:
    """Raises UserError where ``out`` lies in the folder: its text files would be read the next time."""
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError("file.in-input", out, f"lies in the input folder {folder}, or is it", "Choose another --out")


def documents(folder: Path, one_per_line: bool = False) -> Iterator[list[str]]:
    """Documents of a folder; see the module. Raises UserError: a file cannot be read or is not UTF-8 (names the line),
    or there is no text at all."""
    empty = True
    for path in text_files(folder):
        for document in _documents(_read(path), one_per_line):
            empty = False
            yield document
    if empty:
        raise UserError("data.empty", folder, "its text files are all empty", "Give text")


def source_name(folder: Path, one_per_line: bool) -> dict[str, str | bool]:
    """What the text is: stored with the data, compared on a rerun. Raises UserError as `documents`."""
    state = hashlib.sha256()
    for path in text_files(folder):
        state.update(f"{path.relative_to(folder).as_posix()}\0{file_sha256(path)}\n".encode())
    return {"kind": "text", "sha256": state.hexdigest(), "one_per_line": one_per_line}


def _read(path: Path) -> str:
    with reading(path):
        data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError("data.encoding", path, f"line {line} is not UTF-8", "Convert the file to UTF-8") from None


def _documents(text: str, one_per_line: bool) -> Iterator[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            blocks[-1].append(line.strip())
        elif blocks[-1]:
            blocks.append([])
    if not one_per_line:
        blocks = [[sentence for block in blocks for sentence in split_sentences(" ".join(block))]]
    yield from (block for block in blocks if block)
