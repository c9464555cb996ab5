"""Check that the folders and files of a submission are named as the rules require."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlperf_logging.benchmark_meta import get_result_file_counts

from mlaudit import seal
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.result_set import NAMES
from mlaudit.rules import BENCHMARK, NUM_RESULT_FILES
from mlaudit.scratch_copy import RESULT_PATTERN, Workplace
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.host.system_description import FOLDER as TEMPLATES
from mlbert.host.system_description import MARK, unfilled

_RESULT_NAMES = frozenset(f"result_{index}.txt" for index in range(NUM_RESULT_FILES))
_TOOL_FILES = frozenset({"scaling.json"})  # written by official tools next to the logs
_RUN_FILE = re.compile(rf"run_.+\.({'|'.join(map(re.escape, NAMES))})")
_NAMES = "rules: results/<system>/bert/result_0.txt to result_9.txt, systems/<system>.json"


def check_layout(place: Workplace, left_out: Sequence[Complaint]) -> Complaints:
    """Folders and files are named as the rules require,
    and every result has its system description.
    """
    yield from left_out
    for name in ("systems", "results"):
        if not (place.copy / name).is_dir():
            yield _wrong(f"{name}/ is missing")
    folders = _entries(place.copy / "results")
    descriptions = [path for path in _entries(place.copy / "systems") if path.name != TEMPLATES]
    systems = {path.stem for path in descriptions if path.suffix == ".json"}
    for name in sorted(systems - {folder.name for folder in folders}):
        yield Complaint(Outcome.WARN, f"systems/{name}.json has no results/{name}", _NAMES)
    for path in descriptions:
        if path.suffix != ".json":
            yield Complaint(Outcome.WARN, f"{place.name(path)} is not a .json", _NAMES)
        if fields := unfilled(read_system(path)):
            yield _wrong(f"{place.name(path)} still says {MARK} in {', '.join(fields)}")
    if not (place.given / "benchmarks" / BENCHMARK / "implementations").is_dir():
        text = f"benchmarks/{BENCHMARK}/implementations is missing, so the code is not checked"
        yield Complaint(Outcome.WARN, text, "rules: the code of a result is submitted with it")
    for folder in folders:
        yield from _check_folder(folder, systems, place)
    if not folders:
        yield _wrong("results/ contains no system")


def _check_folder(folder: Path, systems: Iterable[str], place: Workplace) -> Complaints:
    """Check the contents of ``results/<system>``."""
    if not folder.is_dir():
        yield Complaint(Outcome.WARN, f"{place.name(folder)} is not a folder of a system", _NAMES)
        return
    if folder.name not in systems:
        yield _wrong(f"systems/{folder.name}.json is missing")
    for path in _entries(folder):
        if (
            path.name != BENCHMARK
            and path.name not in seal.FILES
            and not _RUN_FILE.fullmatch(path.name)
        ):
            yield Complaint(Outcome.NOTE, f"{place.name(path)} {_what_else(path)}")
    yield from _check_result_names(folder / BENCHMARK, place)


def _what_else(path: Path) -> str:
    """Describe an entry of ``results/<system>`` that is not the benchmark's."""
    if is_other_benchmark(path):
        return f"contains results of {path.name}, which are not checked: only {BENCHMARK} is"
    return f"is not the benchmark {BENCHMARK}; only the official tools look at it"


def is_other_benchmark(folder: Path) -> bool:
    """Return True for a folder of ``results/<system>`` that is named like another benchmark of
    MLPerf Training.
    """
    is_known = folder.name in get_result_file_counts("training")
    return is_known and folder.name != BENCHMARK and folder.is_dir()


def _wrong(text: str) -> Complaint:
    return Complaint(Outcome.ERROR, text, _NAMES)


def _entries(folder: Path) -> list[Path]:
    """List a folder without README.md, which is allowed because the official tools ignore files
    here.
    """
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def _check_result_names(folder: Path, place: Workplace) -> Complaints:
    """Expect ten logs. package_checker reads any result_*.txt,
    but the rules name them result_0 to result_9.
    """
    if not folder.is_dir():
        is_other = folder.parent.is_dir() and any(path.is_dir() for path in _entries(folder.parent))
        text = f"{place.name(folder)} is missing"
        if is_other:  # a system may have only other benchmarks
            yield Complaint(Outcome.NOTE, text)
        else:
            yield _wrong(text)
        return
    logs = {path.name for path in folder.glob(RESULT_PATTERN) if path.is_file()}
    others = sorted(
        {path.name for path in folder.iterdir()} - logs - _TOOL_FILES - {"power", "README.md"}
    )
    for name in others:
        yield Complaint(Outcome.WARN, f"{place.name(folder / name)} is unknown", _NAMES)
    if len(logs) != NUM_RESULT_FILES:
        missing = ", ".join(sorted(_RESULT_NAMES - logs)) if logs < _RESULT_NAMES else ""
        text = f"{place.name(folder)} contains {len(logs)} logs, not {NUM_RESULT_FILES}"
        yield _wrong(text + (f": {missing} is missing" if missing else ""))
    elif logs != _RESULT_NAMES:
        extra = ", ".join(sorted(logs - _RESULT_NAMES))
        text = (
            f"{place.name(folder)} contains {extra}, which the official tools take for results too"
        )
        yield Complaint(Outcome.NOTE, text, _NAMES)


def read_system(path: Path) -> dict[str, Any]:
    """Return the system description, or {} if it is unreadable (the tools and the division check
    report that).
    """
    try:
        return read_json(path, "")
    except UserError:
        return {}
