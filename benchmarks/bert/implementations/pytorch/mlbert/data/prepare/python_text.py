"""Collect the English text of a Python installation as documents of sentences.

The sources are help topics of ``pydoc_data``, docstrings and block comments of the standard
library, its long messages and help texts, its text and HTML files, the license, and the
documentation of compiled modules. Source files are parsed, never imported. Only compiled modules
are imported, in a separate interpreter. The same Python installation produces the same documents in
the same order.
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path

from mlbert.data.prepare.prose import MIN_WORDS, prose_sentences
from mlbert.host.errors import UserError

MIN_SENTENCES = 1000  # with fewer, the installation's documentation has been stripped
OWN_DOCUMENT_SENTENCES = 4
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
TEXT_SUFFIXES = frozenset({".txt", ".html", ".rst", ".md"})
TEXT_NAMES = frozenset({"README", "CREDITS", "LICENSE", "NEWS"})
SKIPPED_FILES = frozenset({"Grammar.txt", "PatternGrammar.txt", "sitecustomize.py"})

_COMMENT = re.compile(r"^[ \t]*#+[ \t]?(.*)$")
_TITLE = re.compile(r"\n(?=[^\n]+\n([=*\-~^#+\"])\1{3,}[ \t]*\n)")
_TAG = re.compile(r"<[^>]+>")
_HIDDEN = re.compile(r"<(script|style|pre|head)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_BLOCK_TAG = re.compile(
    r"</?(?:p|div|li|ul|ol|dl|dt|dd|h\d|section|tr|td|table|br)\b[^>]*>", re.IGNORECASE
)
_HEADING_TAG = re.compile(r"(?=<h\d\b)", re.IGNORECASE)

Documents = Iterator[list[str]]


def documents() -> Documents:
    """Yield all documents of this Python installation, each a list of sentences.

    Raises UserError: the standard library has no readable source (a stripped installation).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sentences = 0
    topics = root / "pydoc_data" / "topics.py"
    for document in chain(
        _from_topics(topics), _from_sources(root), _from_text_files(root), _from_compiled_modules()
    ):
        sentences += len(document)
        if document:
            yield document
    if sentences < MIN_SENTENCES:
        remedy = "Use `mlbert prepare text`"
        raise UserError(
            "data.too-small",
            root,
            "this Python installation contains almost no documentation",
            remedy,
        )


def source_name() -> dict[str, str]:
    """Return the origin of the text, which is stored with the data and compared on a rerun."""
    library = sysconfig.get_paths()["stdlib"]
    return {"kind": "python-text", "python": platform.python_version(), "library": library}


def _from_topics(path: Path) -> Documents:
    if not path.is_file():
        return
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield from _sections(value.value)


def _sections(text: str) -> Documents:
    """Yield one document per titled section."""
    start = 0
    for match in _TITLE.finditer(text):
        yield prose_sentences(text[start : match.start()])
        start = match.end()
    yield prose_sentences(text[start:])


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes())


def _files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        found += [Path(folder, name) for name in sorted(names) if name not in SKIPPED_FILES]
    return found


def documents_by_file() -> Iterator[tuple[str, list[str]]]:
    """Return the documents of the standard library's source files,
    each with its file's path within the library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return (
        (path.relative_to(root).as_posix(), document)
        for path, document in _from_files(root)
        if document
    )


def _from_sources(root: Path) -> Documents:
    return (document for _, document in _from_files(root))


def _from_files(root: Path) -> Iterator[tuple[Path, list[str]]]:
    for path in _files(root):
        if path.suffix != ".py" or path.parent.name == "pydoc_data":
            continue
        try:
            tree = _parsed(path)
            lines = path.read_text("utf-8", errors="ignore").splitlines()
        except (SyntaxError, ValueError, OSError):
            continue  # templates with placeholders, or unreadable: not worth stopping for
        yield from ((path, document) for document in _from_module(tree, lines))


def _from_module(tree: ast.Module, lines: list[str]) -> Documents:
    """Yield the module's own text, then its classes and functions;
    text between them belongs to the module.
    """
    own = ast.get_docstring(tree)
    if own:
        yield from _sections(own)
    groups = []
    previous_end = 0
    for node in tree.body:
        first = node.lineno - 1
        end = node.end_lineno or node.lineno
        above = _from_comments(lines[previous_end:first])
        within = _from_comments(lines[first:end])
        may_stand_alone = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        groups.append((may_stand_alone, [*above, *_from_strings(node, skip=own), *within]))
        previous_end = end
    yield from _grouped([*groups, (False, _from_comments(lines[previous_end:]))])


def _grouped(groups: Iterable[tuple[bool, list[str]]]) -> Documents:
    """Yield one document for each group that may stand alone and is long enough;
    the rest form one document.
    """
    rest: list[str] = []
    for may_stand_alone, sentences in groups:
        if may_stand_alone and len(sentences) >= OWN_DOCUMENT_SENTENCES:
            yield sentences
        else:
            rest += sentences
    yield rest


def _from_strings(tree: ast.AST, skip: str | None) -> list[str]:
    """Return docstrings and other prose constants, in source order."""
    found = []
    waiting: list[object] = [tree]
    while waiting:  # ast.walk takes twice as long
        node = waiting.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.count(" ") >= MIN_WORDS:
                found.append(((node.lineno, node.col_offset), inspect.cleandoc(node.value)))
        elif isinstance(node, list):
            waiting += node
        elif isinstance(node, ast.AST):
            waiting += [getattr(node, name) for name in node._fields]
    return [
        sentence for _, text in sorted(found) if text != skip for sentence in prose_sentences(text)
    ]


def _from_comments(lines: list[str]) -> list[str]:
    """Return the prose of comment blocks of two or more lines."""
    sentences: list[str] = []
    for is_comment, matches in groupby(map(_COMMENT.match, lines), key=bool):
        block = [match[1] for match in matches if match]
        if is_comment and len(block) >= 2:
            sentences += prose_sentences("\n".join(block))
    return sentences


def documents_below(root: Path) -> Documents:
    """Return the documents of the source and text files of a folder of packages."""
    return chain(_from_sources(root), _from_text_files(root))


def _from_text_files(root: Path) -> Documents:
    for path in _files(root):
        if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES:
            yield from sections_of(path, path.read_text("utf-8", errors="ignore"))


def sections_of(path: Path, text: str) -> Documents:
    """Yield one document per titled section of a file's text;
    the file name says whether it is HTML.
    """
    if ".html" not in path.suffixes:
        yield from _sections(text)
        return
    for section in _HEADING_TAG.split(_HIDDEN.sub("", text)):
        yield prose_sentences(html.unescape(_TAG.sub("", _BLOCK_TAG.sub("\n\n", section))))


def _from_compiled_modules() -> Documents:
    """Yield one document for each class and function with enough text;
    the rest of a module form one document.
    """
    command = [
        sys.executable,
        "-I",
        "-S",
        "-W",
        "ignore",
        str(Path(__file__).with_name("compiled_docs.py")),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False
    )
    if done.returncode != 0:
        reason = (
            "cannot report the documentation of its compiled modules "
            f"({done.stderr.strip()[-200:]})"
        )
        raise UserError(
            "data.too-small", sys.executable, reason, "Try another Python, or `mlbert prepare text`"
        )
    for groups in json.loads(done.stdout).values():
        yield from _grouped(
            (True, [line for text in group for line in prose_sentences(text)]) for group in groups
        )
