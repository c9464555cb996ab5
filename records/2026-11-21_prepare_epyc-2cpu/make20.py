"""20 MB of English documentation strings of installed Python packages as four text parts.

A sentence a line, a blank line between modules.

    python make20.py SITE_PACKAGES OUTPUT_FOLDER
"""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path

from mlbert.prepare.sentences import split_sentences

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
warnings.simplefilter("ignore")
site, out = Path(sys.argv[1]), Path(sys.argv[2])
documents: list[str] = []
seen: set[str] = set()
total = 0
for path in sorted(site.rglob("*.py"), key=lambda path: str(path)[::-1]):
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        continue
    lines = []
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if not text or text in seen:
            continue
        seen.add(text)
        for paragraph in text.split("\n\n"):
            sentences = split_sentences(" ".join(paragraph.split()))
            lines += [sentence for sentence in sentences if len(sentence.split()) > 3]
    if len(lines) > 1:
        documents.append("\n".join(lines) + "\n")
        total += len(documents[-1].encode()) + 1
    if total >= 20_000_000:
        break
for number in range(4):
    (out / f"part-{number:05d}-of-00004").write_text("\n".join(documents[number::4]))
print(total, len(documents))
