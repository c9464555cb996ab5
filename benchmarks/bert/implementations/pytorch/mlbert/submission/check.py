"""The whole check: official tools in the right order on a copy, then our own checks; one list of findings."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlbert.core.errors import UserError
from mlbert.core.rules import BENCHMARK, NUM_RESULT_FILES, olympic_mean
from mlbert.submission import official
from mlbert.submission.export import export_tree, is_checkout
from mlbert.submission.findings import Complaint, Complaints, Finding, Outcome, finding_of
from mlbert.submission.logs import Log, read_log
from mlbert.submission.own_checks import run_checks
from mlbert.submission.result_set import ResultSet
from mlbert.submission.templates import FOLDER as TEMPLATES
from mlbert.submission.templates import MARK, unfilled

RESULT_PATTERN = "result_*.txt"
_RESULT_NAMES = frozenset(f"result_{index}.txt" for index in range(NUM_RESULT_FILES))
_PARTS = ("systems", "results", f"benchmarks/{BENCHMARK}")
_TOOL_FILES = frozenset({"scaling.json"})
_NAMES = "rules: results/<system>/bert/result_0.txt to result_9.txt, systems/<system>.json"
_READABLE = "rules: a submission holds its files itself"
_LAYOUT_PASSED = "Folders and files have the names of the rules; systems and results belong together."
_DROPPED = "the one of ten that the scoring drops: "

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
    """Check a submission tree, a system's results, a folder of result files, or one log.

    Works on a temporary copy; nothing below ``path`` changes. A git checkout is judged by its export.

    Args:
        path: what to check.
        division: "open" or "closed" if the caller insists on one.
        progress: told what runs next.

    Raises:
        UserError: the path is none of them.
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
            problem = _copy_tree(path, place.copy)
            return _check_tree(path, division, place, problem)
        folder = path / BENCHMARK if (path / BENCHMARK).is_dir() else path
        names = sorted(name for name in folder.glob(RESULT_PATTERN) if name.is_file())
        if not names:
            raise UserError(path, f"holds neither systems/ and results/ nor {RESULT_PATTERN}", "Name one that does")
        place.copy.mkdir()
        logs = [Path(shutil.copy2(name, place.copy / name.name)) for name in names]
        return _check_logs(logs, division, place)


def _copy_tree(tree: Path, copy: Path) -> Finding | None:
    """Copies a tree; a finding where a checkout holds what cannot be exported, and is copied as it is."""
    problem = None
    if is_checkout(tree):
        try:
            export_tree(tree, copy)
            return None
        except UserError as error:
            problem = Finding("own: export", ".", Outcome.ERROR, f"{error} [{_READABLE}]")
            shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        for name in _PARTS if problem else (".",):  # a checkout may hold data that is no part of a submission
            if (tree / name).is_dir():
                shutil.copytree(tree / name, copy / name, symlinks=True, ignore=ignored)
    except OSError as error:
        raise UserError(tree, f"cannot be copied to {copy} ({error})", "Make room there, or set TMPDIR") from error
    return problem


def _check_tree(tree: Path, division: str | None, place: _Workplace, problem: Finding | None) -> list[Finding]:
    findings = [problem] if problem else []
    for system in sorted((place.copy / "systems").glob("*.json")):
        place.progress(f"system_desc_checker {system.name}")
        findings.append(official.check_system(system, place.name(system), place.scratch))
    findings.append(finding_of("own: layout", ".", list(_check_layout(place)), _LAYOUT_PASSED))
    result_sets = []
    for folder in sorted(path for path in (place.copy / "results").glob(f"*/{BENCHMARK}") if path.is_dir()):
        logs = sorted(log for log in folder.glob(RESULT_PATTERN) if log.is_file())
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
    """A row for each log that fails, and one for all that pass; of ten, one that fails is dropped by the scoring."""
    findings = []
    for log in logs:
        place.progress(f"compliance_checker {log.name}")
        findings.append(official.check_compliance(log, place.name(log), place.scratch))
    bad = [finding for finding in findings if finding.outcome is not Outcome.PASS]
    num_good = len(findings) - len(bad)
    if len(bad) == 1 and len(findings) == NUM_RESULT_FILES:
        bad = [replace(bad[0], outcome=Outcome.WARN, words=_DROPPED + bad[0].words)]
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


def _check_layout(place: _Workplace) -> Complaints:
    """Names of folders and files, and that systems and results belong together."""
    folders = _entries(place.copy / "results")
    descriptions = [path for path in _entries(place.copy / "systems") if path.name != TEMPLATES]
    systems = {path.stem for path in descriptions if path.suffix == ".json"}
    for name in sorted(systems - {folder.name for folder in folders}):
        yield Complaint(Outcome.WARN, f"systems/{name}.json has no results/{name}", _NAMES)
    for path in descriptions:
        if path.suffix != ".json":
            yield Complaint(Outcome.WARN, f"{place.name(path)} is not a .json", _NAMES)
        if fields := unfilled(_read_system(path)):
            yield _wrong(f"{place.name(path)} still says {MARK} in {', '.join(fields)}")
    if not (place.copy / "benchmarks" / BENCHMARK / "implementations").is_dir():
        text = f"benchmarks/{BENCHMARK}/implementations is missing, so nothing is said of the code"
        yield Complaint(Outcome.WARN, text, "rules: the code of a result is submitted with it")
    for folder in folders:
        if not folder.is_dir():
            yield Complaint(Outcome.WARN, f"{place.name(folder)} is not a folder of a system", _NAMES)
            continue
        if folder.name not in systems:
            yield _wrong(f"systems/{folder.name}.json is missing")
        for path in _entries(folder):
            if path.name != BENCHMARK:
                text = f"{place.name(path)} is not the benchmark {BENCHMARK}"
                yield Complaint(Outcome.NOTE, f"{text}; only the official tools look at it")
        yield from _check_result_names(folder / BENCHMARK, place)
    if not folders:
        yield _wrong("results/ holds no system")


def _wrong(text: str) -> Complaint:
    return Complaint(Outcome.ERROR, text, _NAMES)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds; a README.md is welcome where the official tools do not look at files."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def _check_result_names(folder: Path, place: _Workplace) -> Complaints:
    """Ten logs under any result_*.txt, as package_checker reads them; the names of the rules are 0 to 9."""
    if not folder.is_dir():
        is_other = folder.parent.is_dir() and bool(_entries(folder.parent))
        outcome = Outcome.NOTE if is_other else Outcome.ERROR  # a system may have other benchmarks only
        yield Complaint(outcome, f"{place.name(folder)} is missing", "" if is_other else _NAMES)
        return
    logs = {path.name for path in folder.glob(RESULT_PATTERN) if path.is_file()}
    others = sorted({path.name for path in folder.iterdir()} - logs - _TOOL_FILES - {"power", "README.md"})
    for name in others:
        if (folder / name).is_symlink() and not (folder / name).exists():
            yield Complaint(Outcome.ERROR, f"{place.name(folder)}/{name} is a link to nothing", _READABLE)
        else:
            yield Complaint(Outcome.WARN, f"{place.name(folder)}/{name} is unknown", _NAMES)
    if len(logs) != NUM_RESULT_FILES:
        missing = ", ".join(sorted(_RESULT_NAMES - logs)) if logs < _RESULT_NAMES else ""
        text = f"{place.name(folder)} holds {len(logs)} logs, not {NUM_RESULT_FILES}"
        yield _wrong(text + (f": {missing} is missing" if missing else ""))
    elif logs != _RESULT_NAMES:
        extra = ", ".join(sorted(logs - _RESULT_NAMES))
        text = f"{place.name(folder)} holds {extra}, which the official tools take for results too"
        yield Complaint(Outcome.NOTE, text, _NAMES)


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
