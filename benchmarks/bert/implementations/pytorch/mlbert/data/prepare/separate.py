"""Which articles the benchmark withholds for evaluation."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import reading
from mlbert.host.errors import UserError

SEED = 12345
SEED_STEP = 13
_MD5 = re.compile(r"[0-9a-f]{32}")


def drawn_articles(articles_per_file: Sequence[int], wanted: int) -> np.ndarray:
    """int64 [wanted]: numbers of the withheld articles, counted over all files, ascending.

    File i of n gives ``int((i + 1) * wanted / n) - int(i * wanted / n)`` articles, drawn without repeats by
    ``random.Random(12345 + 13 * i)`` as ``int(random() * articles)``: the rule by which the benchmark's evaluation
    text was separated.

    Raises UserError: a file has fewer articles than it has to give.
    """
    num_files = len(articles_per_file)
    chosen: list[int] = []
    first = 0
    for index, available in enumerate(articles_per_file):
        quota = int((index + 1) * wanted * 1.0 / num_files) - int(index * wanted * 1.0 / num_files)
        if quota > available:
            reason = f"{wanted} articles of {num_files} files means {quota} of file {index + 1}, which has {available}"
            raise UserError("data.too-small", "--eval-articles", reason, "Withhold fewer articles or give more text")
        rng = random.Random(SEED + SEED_STEP * index)
        drawn: set[int] = set()
        while len(drawn) < quota:
            drawn.add(int(rng.random() * available))
        chosen += (first + number for number in sorted(drawn))
        first += available
    return np.asarray(chosen, np.int64)


def read_hashes(path: Path) -> set[bytes]:
    """The distinct MD5 sums of an ``eval.md5``: one of 32 hexadecimal digits a line. Raises UserError: the file cannot
    be read, or a line is no MD5 sum (names it)."""
    remedy = "Give the benchmark's eval.md5"
    with reading(path, remedy):
        lines = path.read_bytes().decode("ascii", "replace").split("\n")
    hashes = set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not _MD5.fullmatch(line.strip()):
                raise UserError("data.row", path, f"line {number} is not an MD5 sum", remedy)
            hashes.add(bytes.fromhex(line))
    if not hashes:
        raise UserError("data.row", path, "holds no MD5 sum", remedy)
    return hashes
