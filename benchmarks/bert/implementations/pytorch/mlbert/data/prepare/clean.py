"""Convert a WikiExtractor folder to text parts and an evaluation text;
recognize the kind of an input.

The first pass runs one job per 16 MB of consecutive files. It writes their articles to a unit file,
with an index of each article's length and MD5 next to it. The choice of evaluation articles needs
only the counts. The second pass runs one job per part, which copies the part's articles from the
units. Memory grows by only 20 bytes per article. ``clean.json`` is written last; until it exists,
the same command resumes an interrupted run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.data.formats.checksums import FileSum, file_xxh3
from mlbert.data.formats.manifest import check_folder, json_sha256, reading, write_json
from mlbert.data.formats.open import ACCEPTED, describe
from mlbert.data.formats.tfrecord import is_text
from mlbert.data.prepare import wiki_text
from mlbert.data.prepare.code_identity import MADE_BY, code_identity
from mlbert.data.prepare.corpus_files import IN_FOLDER
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import check_options, is_whole, keep_apart, read_summary
from mlbert.data.prepare.text_parts import expand_inputs
from mlbert.data.prepare.wiki_text import drawn_articles, read_hashes
from mlbert.host.errors import UserError
from mlbert.host.files import open_plain, plain_size, whole_file, write_atomically, writing
from mlbert.host.json_files import add_checksum
from mlbert.host.progress import Progress

FINISHED = "clean.json"
SCRATCH = "clean.tmp"
UNIT_BYTES = 16_000_000
FORM = 1  # version of the cleaned text; increment it with any change of a cleaning rule
MIN_FOUND = 0.5
_WIKI = re.compile(r"wiki_\d{1,6}")
_PART = re.compile(r"part-\d{5}-of-\d{5}")
_UNFINISHED = re.compile(r"(part-\d{5}-of-\d{5}|eval\.(txt|md5)|clean\.json)\.\d+(@[^@]+)?\.tmp")
_EVAL = ("eval.txt", "eval.md5")
_LOOKED_AT = 65_536  # bytes


@dataclass(frozen=True)
class CleanOptions:
    """Number of text parts of about equal size, and which articles to withhold."""

    num_parts: int = 500
    eval_articles: int = 10_000  # drawn as published
    eval_md5: Path | None = None  # withhold the articles with these hashes instead
    eval_min_found: float = MIN_FOUND  # fraction of these hashes that must be found


def clean(
    folder: Path, out: Path, options: CleanOptions, executor: Executor = Executor()
) -> dict[str, Any]:
    """Write ``part-00000-of-00500`` ..., ``eval.txt`` and ``eval.md5`` to ``out``; return the
    content of ``clean.json``. Raises UserError: the input is not WikiExtractor's, there is too
    little of it, or ``out`` holds something else.
    """
    keep_apart(out, [folder])
    progress = executor.progress
    files = wiki_files(folder)
    stats = [path.stat() for path in files]
    names = [path.relative_to(folder).as_posix() for path in files]
    wanted = {
        "form": FORM,
        "splitter": wiki_text.splitter_name(),
        "input": json_sha256(
            [[name, s.st_size, s.st_mtime_ns] for name, s in zip(names, stats, strict=True)]
        ),
        "num_parts": options.num_parts,
        "eval": options.eval_articles,
    }
    if options.eval_md5:
        wanted["eval"] = json_sha256(sorted(entry.hex() for entry in read_hashes(options.eval_md5)))
    if found := _finished(out, wanted, progress):
        shutil.rmtree(out / SCRATCH, ignore_errors=True)
        return found
    if missing := missing_files(names):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        progress(
            f"warning: {folder}: missing {missing[0]}{more}, although later files exist: "
            "their articles are left out"
        )
    units = _units(files, [s.st_size for s in stats], out / SCRATCH)
    _prepare_scratch(out, wanted)
    executor.run(make_unit, units, name="cleaning", where=out, sizes=[unit.size for unit in units])
    catalog = Catalogue.read(units)
    withheld = _withheld(catalog, options, progress)
    training = np.setdiff1d(np.flatnonzero(catalog.train_lengths), withheld, assume_unique=True)
    bounds = part_bounds(catalog.train_lengths[training], options.num_parts)
    parts = [
        (out / f"part-{i:05d}-of-{options.num_parts:05d}", training[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(bounds.tolist()))
    ]
    sizes = [int(catalog.train_lengths[articles].sum()) for _, articles in parts]
    make = partial(make_part, units, catalog.unit_starts)
    executor.run(make, parts, name="gathering", where=out, sizes=sizes)
    _write_evaluation(out, units, catalog, withheld)
    made = [*(path for path, _ in parts), *(out / name for name in _EVAL)]
    summary = {
        "wanted": wanted,
        "articles": len(training),
        "eval_articles": len(withheld),
        "files": {path.name: file_xxh3(path) for path in made},
    }
    write_json(out / FINISHED, add_checksum(summary))
    shutil.rmtree(out / SCRATCH)
    return summary


def wiki_files(folder: Path) -> list[Path]:
    """Return the files ``wiki_<number>`` below a folder, sorted by name.

    Raises UserError: the folder does not exist, or has no such file;
    or one is a link to nothing, a pipe or a device.
    """
    remedy = "Give the folder that WikiExtractor wrote (AA/wiki_00, ...)"
    check_folder(folder, remedy)
    found = sorted(folder.rglob("wiki_*"), key=lambda path: path.relative_to(folder).as_posix())
    files = [path for path in found if _WIKI.fullmatch(path.name) and not path.is_dir()]
    for path in files:
        plain_size(path, IN_FOLDER)
    if files:
        return files
    if packed := next((path for path in found if path.suffix in (".bz2", ".gz")), None):
        raise UserError("data.encoding", packed, "is compressed", "Unpack the files first")
    raise UserError("data.missing", folder, "contains no files such as wiki_00", remedy)


def missing_files(names: Sequence[str]) -> list[str]:
    """Return the files missing from sorted names such as ``AA/wiki_00``, inferred from the numbers
    of the others. WikiExtractor counts from 00 in every folder and puts the same number of files
    into each before it starts the next.
    """
    found: dict[str, list[int]] = {}
    for name in names:
        folder, _, number = name.rpartition("wiki_")
        found.setdefault(folder, []).append(int(number))
    full = max(
        (max(numbers) for folder, numbers in found.items() if folder != max(found)), default=0
    )
    missing = []
    for folder, numbers in found.items():
        last = max(numbers) if folder == max(found) else full
        missing += [
            f"{folder}wiki_{number:02d}" for number in sorted(set(range(last + 1)) - {*numbers})
        ]
    return missing


@dataclass(frozen=True)
class Unit:
    """Consecutive input files and the file that collects their articles."""

    files: tuple[Path, ...]
    size: int  # of all files, bytes
    text: Path

    @property
    def index(self) -> Path:
        """Lengths and MD5 sums of the articles; written after the text."""
        return self.text.with_suffix(".npz")


def _units(files: Sequence[Path], sizes: Sequence[int], scratch: Path) -> list[Unit]:
    groups: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        if groups[-1] and sum(sizes[i] for i in groups[-1]) + size > UNIT_BYTES:
            groups.append([])
        groups[-1].append(index)
    return [
        Unit(
            tuple(files[i] for i in group),
            sum(sizes[i] for i in group),
            scratch / f"unit-{number:06d}.txt",
        )
        for number, group in enumerate(groups)
    ]


def make_unit(unit: Unit) -> None:
    """Clean the files of one unit, unless an earlier run has done so."""
    if unit.index.exists() and unit.text.exists():
        return
    lengths: list[int] = []
    counts = []
    hashes = bytearray()
    with whole_file(unit.text) as target:
        for path in unit.files:
            before = len(lengths)
            for article in file_articles(path):
                lengths.append(target.write(article.encode()))
                hashes += hashlib.md5(article.rstrip().encode(), usedforsecurity=False).digest()
            counts.append(len(lengths) - before)
    md5 = np.frombuffer(bytes(hashes), np.uint8).reshape(-1, 16)
    with whole_file(unit.index) as target:
        np.savez(
            target,
            lengths=np.asarray(lengths, np.uint32),
            md5=md5,
            counts=np.asarray(counts, np.int64),
        )


def file_articles(path: Path) -> Iterator[str]:
    """Yield the cleaned articles of one WikiExtractor file in order, including the empty ones that
    the benchmark counts. Raises UserError as `mlbert.data.prepare.wiki_text.paragraphs`.
    """
    split = wiki_text.sentence_splitter()
    with reading(path), open_plain(path) as lines:
        articles = wiki_text.articles(
            wiki_text.sentence_lines(wiki_text.paragraphs(path, lines), split)
        )
    yield from articles


@dataclass(frozen=True)
class Catalogue:
    """All articles of all units. U units, A articles, F files."""

    unit_starts: np.ndarray  # int64 [U+1], number of the first article of each unit
    lengths: np.ndarray  # uint32 [A], bytes in the unit's text
    md5: np.ndarray  # uint8 [A, 16]
    per_file: np.ndarray  # int64 [F], articles of each file

    @classmethod
    def read(cls, units: Sequence[Unit]) -> Catalogue:
        """Read the index files of all units."""
        found = []
        for unit in units:
            with np.load(unit.index) as index:
                found.append((index["lengths"], index["md5"], index["counts"]))
        starts = np.cumsum([0, *(len(lengths) for lengths, _, _ in found)])
        lengths, md5, counts = (np.concatenate(column) for column in zip(*found, strict=True))
        return cls(starts.astype(np.int64), lengths, md5, counts)

    @property
    def train_lengths(self) -> np.ndarray:
        """uint32 [A]: 0 for an article without text (at most a line end)."""
        return np.where(self.lengths > 1, self.lengths, 0)


def _withheld(catalog: Catalogue, options: CleanOptions, progress: Progress) -> np.ndarray:
    if options.eval_md5 is None:
        return drawn_articles(catalog.per_file.tolist(), options.eval_articles)
    hashes = read_hashes(options.eval_md5) - {hashlib.md5(b"", usedforsecurity=False).digest()}
    # Half of each hash finds the candidates without creating a Python object per article.
    halves = np.frombuffer(b"".join(hashes), "<u8")[::2]
    candidates = np.flatnonzero(
        np.isin(np.ascontiguousarray(catalog.md5).view("<u8")[:, 0], halves)
    )
    chosen = np.asarray(
        [i for i in candidates.tolist() if catalog.md5[i].tobytes() in hashes], np.int64
    )
    found = len({catalog.md5[i].tobytes() for i in chosen})
    if not found:
        remedy = "Its sentences were split differently; omit --eval-md5"
        reason = f"this text contains none of its articles ({len(hashes):,})"
        raise UserError("data.other-text", options.eval_md5, reason, remedy)
    if found < options.eval_min_found * len(hashes):
        reason = f"only {found:,} of its {len(hashes):,} articles are in this text word for word"
        remedy = (
            "The others may be in the training text, with their sentences split differently: omit "
            "--eval-md5, or accept fewer with --eval-min-found"
        )
        raise UserError("data.other-text", options.eval_md5, reason, remedy)
    if found < len(hashes):
        progress(
            f"warning: {options.eval_md5}: {found:,} of {len(hashes):,} articles found; "
            "the others may be in the "
            "training text, with their sentences split differently"
        )
    else:
        progress(f"evaluation: all {found:,} articles of {options.eval_md5} found")
    return chosen


def part_bounds(lengths: np.ndarray, num_parts: int) -> np.ndarray:
    """Return int64 [num_parts+1], the bounds of consecutive articles in parts of about equal size,
    at least one article each. Raises UserError: fewer articles than parts.
    """
    if len(lengths) < num_parts:
        reason = f"{len(lengths)} articles cannot fill {num_parts} parts"
        raise UserError("data.too-small", "--parts", reason, "Use fewer parts")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    bounds = np.searchsorted(starts, [starts[-1] * i // num_parts for i in range(num_parts + 1)])
    bounds[-1] = len(lengths)
    for part in range(1, num_parts):
        bounds[part] = min(
            max(bounds[part], bounds[part - 1] + 1), len(lengths) - (num_parts - part)
        )
    return bounds


def make_part(
    units: Sequence[Unit], unit_starts: np.ndarray, part: tuple[Path, np.ndarray]
) -> None:
    """Write one part, with a blank line between articles, unless an earlier run has done so.

    ``part`` is its path and its ascending article numbers over all units.
    """
    path, articles = part
    if path.exists():
        return
    with whole_file(path) as target:
        separator = b""
        for article in read_articles(units, unit_starts, articles):
            target.write(separator + article.strip(b"\n") + b"\n")
            separator = b"\n"


def read_articles(
    units: Sequence[Unit], unit_starts: np.ndarray, numbers: np.ndarray
) -> Iterator[bytes]:
    """Yield the articles with the given ascending numbers as stored in the units."""
    for unit in np.unique(np.searchsorted(unit_starts, numbers, side="right") - 1):
        with np.load(units[unit].index) as index:
            ends = np.cumsum(index["lengths"], dtype=np.int64)
        inside = (
            numbers[(numbers >= unit_starts[unit]) & (numbers < unit_starts[unit + 1])]
            - unit_starts[unit]
        )
        with units[unit].text.open("rb") as text:
            for number in inside.tolist():
                start = int(ends[number - 1]) if number else 0
                text.seek(start)
                yield text.read(int(ends[number]) - start)


def _write_evaluation(
    out: Path, units: Sequence[Unit], catalog: Catalogue, withheld: np.ndarray
) -> None:
    articles = list(read_articles(units, catalog.unit_starts, withheld))
    write_atomically(out / _EVAL[0], b"".join(article + b"\n\n" for article in articles))
    write_atomically(
        out / _EVAL[1], "".join(f"{catalog.md5[i].tobytes().hex()}\n" for i in withheld)
    )


def _finished(out: Path, wanted: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
    if (summary := read_summary(out / FINISHED)) is None:
        return None
    check_options(out, {"options": summary["wanted"]}, wanted)
    sums = [FileSum(out / name, str(xxh3), "") for name, xxh3 in summary["files"].items()]
    return summary if is_whole(out, lambda: sums, progress) else None


def _prepare_scratch(out: Path, wanted: dict[str, Any]) -> None:
    """Create an empty scratch folder, or keep that of an interrupted run with the same code,
    input and options.
    """
    plan = out / SCRATCH / "plan.json"
    begun_with = {**wanted, MADE_BY: code_identity()}
    wanted_bytes = (json.dumps(begun_with, indent=1) + "\n").encode()
    with writing(out, "Choose another --out"):
        for path in [path for path in out.glob("*.tmp") if _UNFINISHED.fullmatch(path.name)]:
            path.unlink()
        if not (out / FINISHED).exists() and plan.exists() and plan.read_bytes() == wanted_bytes:
            return
        made = [path for path in out.glob("*") if _PART.fullmatch(path.name) or path.name in _EVAL]
        if made and not (out / SCRATCH).exists() and not (out / FINISHED).exists():
            raise UserError(
                "file.in-the-way", made[0], "was not made by this command", "Choose another --out"
            )
        for path in made:
            path.unlink()
        (out / FINISHED).unlink(missing_ok=True)
        shutil.rmtree(out / SCRATCH, ignore_errors=True)
        (out / SCRATCH).mkdir(parents=True)
    write_atomically(plan, wanted_bytes)


def recognize(path: Path) -> str:
    """Return the kind of a folder, text part or TFRecord file, named after the step that accepts
    it: wikiextractor, text, tfrecord, nvidia or prepared. Raises UserError: it cannot be prepared,
    or it is damaged.
    """
    if path.is_dir() and any(path.rglob("wiki_*")):
        wiki_files(path)
        return "wikiextractor"
    if _is_text(path):
        return "text"
    try:
        kind = describe(path if path.is_dir() else path.parent).kind
    except UserError as error:
        if path.is_dir() and error.code != "data.missing":
            raise  # a damaged data set of a known kind
        reason = "is not recognized" if path.exists() else "there is no such file or folder"
        code = "data.format" if path.exists() else "file.missing"
        raise UserError(
            code, path, reason, f"Give text parts, a WikiExtractor folder, {ACCEPTED}"
        ) from None
    if kind.startswith("nvidia"):
        return "nvidia"
    return "tfrecord" if kind == "tfrecord" else "prepared"


def _is_text(path: Path) -> bool:
    """Return whether the first part is text; TFRecord files may have the same names."""
    try:
        with open_plain(expand_inputs([path], skip_bad=True)[0]) as file:
            return is_text(file.read(_LOOKED_AT))
    except (UserError, OSError):
        return False
