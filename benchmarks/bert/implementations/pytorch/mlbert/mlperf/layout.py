"""Names of a tree's folders and files: what the rules ask for, what only official tools look at, what is unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from mlbert.mlperf import seal
from mlbert.mlperf.findings import Complaint, Complaints, Outcome
from mlbert.mlperf.logs import is_too_deep
from mlbert.mlperf.rules import BENCHMARK, NUM_RESULT_FILES
from mlbert.mlperf.run_files import NAMES
from mlbert.mlperf.templates import FOLDER as TEMPLATES
from mlbert.mlperf.templates import MARK, unfilled
from mlbert.mlperf.workplace import RESULT_PATTERN, Workplace

_RESULT_NAMES = frozenset(f"result_{index}.txt" for index in range(NUM_RESULT_FILES))
_TOOL_FILES = frozenset({"scaling.json"})
_RUN_FILE = re.compile(rf"run_.+\.({'|'.join(map(re.escape, NAMES))})")
_NAMES = "rules: results/<system>/bert/result_0.txt to result_9.txt, systems/<system>.json"


def check_layout(place: Workplace) -> Complaints:
    """Folders and files have the names of the rules; systems and results belong together."""
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
        text = f"benchmarks/{BENCHMARK}/implementations is missing, so nothing is said of the code"
        yield Complaint(Outcome.WARN, text, "rules: the code of a result is submitted with it")
    for folder in folders:
        yield from _check_folder(folder, systems, place)
    if not folders:
        yield _wrong("results/ holds no system")


def _check_folder(folder: Path, systems: Iterable[str], place: Workplace) -> Complaints:
    """What lies in ``results/<system>``."""
    if not folder.is_dir():
        yield Complaint(Outcome.WARN, f"{place.name(folder)} is not a folder of a system", _NAMES)
        return
    if folder.name not in systems:
        yield _wrong(f"systems/{folder.name}.json is missing")
    for path in _entries(folder):
        if path.name != BENCHMARK and path.name not in seal.FILES and not _RUN_FILE.fullmatch(path.name):
            text = f"{place.name(path)} is not the benchmark {BENCHMARK}"
            yield Complaint(Outcome.NOTE, f"{text}; only the official tools look at it")
    yield from _check_result_names(folder / BENCHMARK, place)


def _wrong(text: str) -> Complaint:
    return Complaint(Outcome.ERROR, text, _NAMES)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds; a README.md is welcome where the official tools do not look at files."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def _check_result_names(folder: Path, place: Workplace) -> Complaints:
    """Ten logs under any result_*.txt, as package_checker reads them; the names of the rules are 0 to 9."""
    if not folder.is_dir():
        is_other = folder.parent.is_dir() and any(path.is_dir() for path in _entries(folder.parent))
        outcome = Outcome.NOTE if is_other else Outcome.ERROR  # a system may have other benchmarks only
        yield Complaint(outcome, f"{place.name(folder)} is missing", "" if is_other else _NAMES)
        return
    logs = {path.name for path in folder.glob(RESULT_PATTERN) if path.is_file()}
    others = sorted({path.name for path in folder.iterdir()} - logs - _TOOL_FILES - {"power", "README.md"})
    for name in others:
        yield Complaint(Outcome.WARN, f"{place.name(folder / name)} is unknown", _NAMES)
    if len(logs) != NUM_RESULT_FILES:
        missing = ", ".join(sorted(_RESULT_NAMES - logs)) if logs < _RESULT_NAMES else ""
        text = f"{place.name(folder)} holds {len(logs)} logs, not {NUM_RESULT_FILES}"
        yield _wrong(text + (f": {missing} is missing" if missing else ""))
    elif logs != _RESULT_NAMES:
        extra = ", ".join(sorted(logs - _RESULT_NAMES))
        text = f"{place.name(folder)} holds {extra}, which the official tools take for results too"
        yield Complaint(Outcome.NOTE, text, _NAMES)


def read_system(path: Path) -> dict[str, object]:
    """The description; empty when it cannot be read, which the official tools and the division check report."""
    try:
        text = path.read_text(encoding="utf-8")
        system = {} if is_too_deep(text) else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return system if isinstance(system, dict) else {}
