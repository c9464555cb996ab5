"""Write rows.csv, 500 sentences from the docstrings of each of four packages of the standard library, and text/, the
docstrings of its other modules: make_text.py FOLDER"""

import ast
import csv
import random
import re
import sys
import sysconfig
from pathlib import Path

PACKAGES = ("asyncio", "email", "idlelib", "tkinter")


def docstrings(path):
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def sentences(text):
    for paragraph in text.split("\n\n"):
        if ">>>" not in paragraph:
            for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if len(sentence.split()) >= 5:
                    yield sentence


library, folder = Path(sysconfig.get_path("stdlib")), Path(sys.argv[1])
rows = []
for package in PACKAGES:
    found = sorted({s for path in (library / package).rglob("*.py") for d in docstrings(path) for s in sentences(d)})
    print(package, len(found), "sentences")
    random.Random(1).shuffle(found)
    # A name in the text that says which package it is would make the task trivial.
    found = [s for s in found if package not in s.lower()]
    rows += [(sentence, package) for sentence in found[:500]]
random.Random(2).shuffle(rows)
(folder / "text").mkdir(parents=True, exist_ok=True)
with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
    csv.writer(file).writerows([("sentence", "package"), *rows])

paths = library.rglob("*.py")
others = sorted(
    p
    for p in paths
    if not any(library / name in p.parents for name in (*PACKAGES, "test", "site-packages", "dist-packages"))
)
text = "\n\n".join(d for path in others for d in docstrings(path))
(folder / "text" / "docstrings.txt").write_text(text, encoding="utf-8", errors="replace")
print(len(rows), "rows;", len(text), "characters of text")
