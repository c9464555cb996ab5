"""Write the texts and the labeled rows of the case from installed packages: make_text.py FOLDER

domain.txt       documentation of cloud services' interfaces, from the package botocore
general.txt      as much documentation of packages for scientific computing
train_<n>_<i>.csv  n labeled rows, the i-th of three draws
eval.csv         rows to evaluate on

A row is the documentation of a parameter; its label is the parameter's type. The services of
domain.txt, of the training rows and of eval.csv are three disjoint groups.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import html
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlbert.data.prepare.python_text import documents_below

DOMAIN = "botocore"
GENERAL = ("scipy", "sklearn", "numpy", "pandas", "matplotlib", "networkx")
MOST_BYTES = 8_000_000  # of each text
# A type of a service's description -> our label; other types are left out.
LABELS = {
    "boolean": "boolean",
    "integer": "number",
    "long": "number",
    "list": "list",
    "string": "string",
    "structure": "structure",
    "timestamp": "time",
}
TRAIN_SIZES = (120, 1200)  # labeled rows
DRAWS = 3
EVAL_ROWS = 1200
LEAST_WORDS = 4  # of a row
MOST_WORDS = 40
OF_SERVICE = 40  # most rows of a service and label
_TAG = re.compile(r"<[^>]+>")
_BLOCK = re.compile(r"</?(?:p|li|ul|ol|note|important|dt|dd|dl|div|br|h\d)\b[^>]*>")
Row = tuple[str, str]  # text and label


def package(name: str) -> Path:
    """Return the folder of an installed package, or end with what to install."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed: pip install {'scikit-learn' if name == 'sklearn' else name}")
    return Path(spec.origin).parent


def services() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each service's name and the newest description of its interface."""
    for folder in sorted((package(DOMAIN) / "data").iterdir()):
        versions = sorted(folder.glob("*/service-2.json.gz"))
        if versions:
            yield folder.name, json.loads(gzip.decompress(versions[-1].read_bytes()))


def group(service: str) -> str:
    """Return the group of a service, by its name: half are for text."""
    number = int.from_bytes(hashlib.sha256(service.encode()).digest()[:4]) % 4
    return ("text", "text", "train", "eval")[number]


def paragraphs(documentation: str) -> list[str]:
    """Return the text of each block of an HTML documentation."""
    blocks = _BLOCK.split(documentation)
    plain = (" ".join(html.unescape(_TAG.sub("", block)).split()) for block in blocks)
    return [text for text in plain if text]


def domain_documents(description: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """Yield a document for each operation and shape, without paragraphs that were seen before."""
    parts: list[list[str]] = []
    for operation in description["operations"].values():
        parts.append([operation.get("documentation", "")])
    for shape in description["shapes"].values():
        members = [member.get("documentation", "") for member in shape.get("members", {}).values()]
        parts.append([shape.get("documentation", ""), *members])
    for part in parts:
        found = [text for documentation in part for text in paragraphs(documentation)]
        new = list(dict.fromkeys(text for text in found if text not in seen))
        seen.update(new)
        if new:
            yield "\n".join(new)


def rows_of(description: dict[str, Any]) -> Iterator[Row]:
    """Yield the first paragraph of each parameter's documentation, with its label."""
    shapes = description["shapes"]
    for shape in shapes.values():
        for member in shape.get("members", {}).values():
            label = LABELS.get(shapes[member["shape"]]["type"])
            text = paragraphs(member.get("documentation", ""))[:1]
            if label and text and len(text[0].split()) >= LEAST_WORDS:
                yield " ".join(text[0].split()[:MOST_WORDS]), label


def labeled_rows(of_services: list[list[Row]]) -> dict[str, list[Row]]:
    """Return the rows of each label, in random order.

    Without texts that have several labels, each text once, and few of each service.
    """
    labels = defaultdict(set)
    for rows in of_services:
        for text, label in rows:
            labels[text.lower()].add(label)
    found = defaultdict(list)
    seen = set()
    for number, rows in enumerate(of_services):
        order = list(rows)
        random.Random(number).shuffle(order)
        count: dict[str, int] = defaultdict(int)
        for text, label in order:
            key = text.lower()
            if key in seen or len(labels[key]) > 1 or count[label] == OF_SERVICE:
                continue
            seen.add(key)
            count[label] += 1
            found[label].append((text, label))
    for label, rows in found.items():
        random.Random(label).shuffle(rows)
    return found


def write_text(path: Path, documents: Iterator[str]) -> int:
    """Write documents with an empty line between, up to `MOST_BYTES`; return the bytes."""
    written = 0
    with path.open("wb") as file:
        for document in documents:
            data = (document + "\n\n").encode("utf-8", errors="ignore")
            file.write(data)
            written += len(data)
            if written >= MOST_BYTES:
                break
    return written


def write_rows(path: Path, rows: list[Row], seed: int) -> None:
    """Write rows in random order, with a header."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *order])


def main(folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    documents: list[str] = []
    rows: dict[str, list[list[Row]]] = {"train": [], "eval": []}
    seen: set[str] = set()
    num_text = 0
    for name, description in services():
        if group(name) == "text":
            num_text += 1
            documents += domain_documents(description, seen)
        else:
            rows[group(name)].append(list(rows_of(description)))
    random.Random(1).shuffle(documents)
    size = write_text(folder / "domain.txt", iter(documents))
    print(f"domain.txt: {size:,} bytes of {num_text} services")
    order = [
        "\n".join(document) for name in GENERAL for document in documents_below(package(name))
    ]
    random.Random(1).shuffle(order)
    print(f"general.txt: {write_text(folder / 'general.txt', iter(order)):,} bytes")
    kinds = sorted(set(LABELS.values()))
    held_out = labeled_rows(rows["eval"])
    of_kind = EVAL_ROWS // len(kinds)
    write_rows(folder / "eval.csv", [row for kind in kinds for row in held_out[kind][:of_kind]], 1)
    print(f"eval.csv: {of_kind} rows of each of {', '.join(kinds)}; {len(rows['eval'])} services")
    known = {text.lower() for parts in rows["eval"] for text, _ in parts}
    training = labeled_rows(rows["train"])
    for kind in kinds:
        training[kind] = [row for row in training[kind] if row[0].lower() not in known]
    for size in TRAIN_SIZES:
        for draw in range(1, DRAWS + 1):
            chosen = []
            for kind in kinds:
                chosen += random.Random(draw).sample(training[kind], size // len(kinds))
            write_rows(folder / f"train_{size}_{draw}.csv", chosen, draw)
    counts = ", ".join(f"{kind} {len(training[kind])}" for kind in kinds)
    print(f"training rows to draw from, of {len(rows['train'])} services: {counts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
