"""The whole check: official tools in the right order on a copy, then our own checks; one list of findings."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbert.core.errors import UserError
from mlbert.core.rules import BENCHMARK, NUM_RESULT_FILES, olympic_mean
from mlbert.submission import official
from mlbert.submission.export import export_tree, is_checkout
from mlbert.submission.findings import Finding, Outcome
from mlbert.submission.logs import Log, read_log
from mlbert.submission.own_checks import ResultSet, run_checks
from mlbert.submission.templates import FOLDER as TEMPLATES
from mlbert.submission.templates import MARK, unfilled

RESULT_PATTERN = "result_*.txt"
_RESULT_NAMES = frozenset(f"result_{index}.txt" for index in range(NUM_RESULT_FILES))
_TOOL_FILES = frozenset({"scaling.json"})

Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Workplace:
    """Where the tools work: the copy, a scratch folder for their own files, and whom to tell."""

    copy: Path
    scratch: Path
    progress: Progress

    def name(self, path: Path) -> str:
        """The path as the user knows it, relative to the folder given."""
        return path.relative_to(self.copy).as_posix() if path != self.copy else "."


def check(path: Path, division: str | None = None, progress: Progress = lambda step: None) -> list[Finding]:
    """Check a submission tree, a folder of result files, or one log.

    Works on a temporary copy; nothing below ``path`` changes. A git checkout is judged by its export.

    Args:
        path: what to check.
        division: "open" or "closed" if the caller insists on one.
        progress: told what runs next.

    Raises:
        UserError: the path is none of the three.
    """
    if not path.exists():
        raise UserError(path, "does not exist", "Name a submission tree, a folder with result_*.txt, or one log")
    with tempfile.TemporaryDirectory(prefix="mlbert-check-") as temporary:
        place = _Workplace(Path(temporary) / "submission", Path(temporary) / "scratch", progress)
        place.scratch.mkdir()
        if path.is_file():
            place.copy.mkdir()
            shutil.copy2(path, place.copy / path.name)
            return _check_logs([place.copy / path.name], division, place)
        if (path / "systems").is_dir() and (path / "results").is_dir():
            _copy_tree(path, place.copy)
            return _check_tree(path, division, place)
        names = sorted(path.glob(RESULT_PATTERN))
        if not names:
            raise UserError(path, f"holds neither systems/ and results/ nor {RESULT_PATTERN}", "Name one that does")
        place.copy.mkdir()
        logs = [Path(shutil.copy2(name, place.copy / name.name)) for name in names]
        return _check_logs(logs, division, place)


def _copy_tree(tree: Path, copy: Path) -> None:
    if is_checkout(tree):
        export_tree(tree, copy)
        return
    try:
        shutil.copytree(tree, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise UserError(tree, f"cannot be copied to {copy} ({error})", "Make room there, or set TMPDIR") from error


def _check_tree(tree: Path, division: str | None, place: _Workplace) -> list[Finding]:
    findings = []
    for system in sorted((place.copy / "systems").glob("*.json")):
        place.progress(f"system_desc_checker {system.name}")
        findings.append(official.check_system(system, place.name(system), place.scratch))
    findings.append(_check_layout(place))
    result_sets = []
    for folder in sorted(path for path in (place.copy / "results").glob(f"*/{BENCHMARK}") if path.is_dir()):
        logs = sorted(folder.glob(RESULT_PATTERN))
        findings += _check_compliance(logs, place)
        if logs:
            facts = _read_system(place.copy / "systems" / f"{folder.parent.name}.json")
            result_sets.append((folder, ResultSet([read_log(log) for log in logs], facts, division, tree)))
    place.progress("package_checker")
    findings.append(official.check_package(place.copy, place.scratch))
    for folder, results in result_sets:
        findings.append(_check_convergence(folder, results, place))
    place.progress("result_summarizer")
    findings += official.summarize(place.copy, place.scratch)
    for written_by_tools in place.copy.glob("results/*/*/scaling.json"):
        written_by_tools.unlink()
    place.progress("repo_checker")
    findings.append(official.check_repository(place.copy, place.scratch))
    place.progress("own checks")
    for folder, results in result_sets:
        findings += run_checks(results, place.name(folder))
    return findings


def _check_logs(logs: list[Path], division: str | None, place: _Workplace) -> list[Finding]:
    """A folder of logs, or one log, outside a tree."""
    results = ResultSet([read_log(log) for log in logs], None, division)
    subject = place.name(logs[0]) if len(logs) == 1 else f"{len(logs)} logs"
    findings = [*_check_compliance(logs, place), _check_convergence(place.copy, results, place)]
    place.progress("own checks")
    return [*findings, *run_checks(results, subject), _time_to_train(results.logs, subject)]


def _check_compliance(logs: list[Path], place: _Workplace) -> list[Finding]:
    """A row for each log that fails, and one for all that pass."""
    findings = []
    for log in logs:
        place.progress(f"compliance_checker {log.name}")
        findings.append(official.check_compliance(log, place.name(log), place.scratch))
    bad = [finding for finding in findings if finding.outcome is not Outcome.PASS]
    num_good = len(findings) - len(bad)
    if not num_good:
        return bad
    subject = findings[0].subject
    if len(logs) > 1:
        subject = f"{place.name(logs[0].parent)}: {num_good} of {len(logs)} logs"
    return [Finding("compliance_checker", subject, Outcome.PASS, "SUCCESS"), *bad]


def _check_convergence(folder: Path, results: ResultSet, place: _Workplace) -> Finding:
    subject = place.name(folder)
    if results.wanted_division != "closed":
        return Finding("rcp_checker", subject, Outcome.SKIP, "only the closed division is compared with the reference")
    if len(results.logs) != NUM_RESULT_FILES:
        words = f"compares {NUM_RESULT_FILES} logs, here are {len(results.logs)}"
        return Finding("rcp_checker", subject, Outcome.SKIP, words)
    place.progress("rcp_checker")
    return official.check_convergence(folder, subject, place.scratch)


def _check_layout(place: _Workplace) -> Finding:
    """Names of folders and files, and that systems and results belong together."""
    complaints = []
    folders = _entries(place.copy / "results")
    descriptions = [path for path in _entries(place.copy / "systems") if path.name != TEMPLATES]
    systems = {path.stem for path in descriptions if path.suffix == ".json"}
    complaints += [f"systems/{name}.json has no results/{name}" for name in sorted(systems - {f.name for f in folders})]
    complaints += [f"{place.name(path)} is not a .json" for path in descriptions if path.suffix != ".json"]
    for path in descriptions:
        if fields := unfilled(_read_system(path)):
            complaints.append(f"{place.name(path)} still says {MARK} in {', '.join(fields)}")
    if not (place.copy / "benchmarks" / BENCHMARK / "implementations").is_dir():
        complaints.append(f"benchmarks/{BENCHMARK}/implementations is missing")
    for folder in folders:
        if not folder.is_dir():
            complaints.append(f"{place.name(folder)} is not a folder of a system")
            continue
        if folder.name not in systems:
            complaints.append(f"systems/{folder.name}.json is missing")
        others = [path for path in _entries(folder) if path.name != BENCHMARK]
        complaints += [f"{place.name(path)} is not the benchmark {BENCHMARK}" for path in others]
        complaints += _check_result_names(folder / BENCHMARK, place)
    if not folders:
        complaints.append("results/ holds no system")
    if complaints:
        return Finding("own: layout", ".", Outcome.ERROR, "; ".join(complaints))
    words = "Folders and files have the names of the rules; systems and results belong together."
    return Finding("own: layout", ".", Outcome.PASS, words)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds; a README.md is welcome where the official tools do not look at files."""
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def _check_result_names(folder: Path, place: _Workplace) -> list[str]:
    if not folder.is_dir():
        return [f"{place.name(folder)} is missing"]
    names = {path.name for path in folder.iterdir()} - _TOOL_FILES - {"power"}
    complaints = [f"{place.name(folder)}/{name} is missing" for name in sorted(_RESULT_NAMES - names)]
    return complaints + [f"{place.name(folder)}/{name} is unknown" for name in sorted(names - _RESULT_NAMES)]


def _read_system(path: Path) -> dict[str, object]:
    """The description; empty when it cannot be read, which the official tools and the division check report."""
    try:
        system = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return system if isinstance(system, dict) else {}


def _time_to_train(logs: Sequence[Log], subject: str) -> Finding:
    minutes = [log.minutes for log in logs if log.status == "success" and log.minutes is not None]
    if not minutes:
        return Finding("time to train", subject, Outcome.SKIP, "no run succeeded")
    if len(minutes) < 3:
        words = f"{', '.join(f'{value:.4g}' for value in minutes)} minutes"
    else:
        words = f"{olympic_mean(minutes):.4g} minutes (olympic mean of {len(minutes)} runs)"
    return Finding("time to train", subject, Outcome.NOTE, words)
