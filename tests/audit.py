"""Valid logs with one edited line, and the findings of our own checks on them."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlaudit.own_checks import run_checks
from mlaudit.result_set import ResultSet

ROOT = Path(__file__).resolve().parents[1]
OURS = "cpu_demo"
TREE = ROOT / "tests/assets/own_tree"  # contains a result of this code
Report = dict[str, tuple[Outcome, str]]
_VALUE = r'"value": [^{]*?, "metadata"'


def edit(
    path: Path, key: str, pattern: str, replacement: str | Callable[[re.Match[str]], str]
) -> int:
    """Replace a pattern in every line of a key; return the number of the first line, from 1."""
    lines = path.read_text().splitlines(keepends=True)
    marked = [number for number, line in enumerate(lines) if f'"key": "{key}"' in line]
    assert marked, key
    before = list(lines)
    for number in marked:
        lines[number] = re.sub(pattern, replacement, lines[number])
    assert lines != before, (key, pattern)
    path.write_text("".join(lines))
    return marked[0] + 1


def set_value(path: Path, key: str, value: str) -> int:
    """Change a key's value; return the line number."""
    return edit(path, key, _VALUE, f'"value": {value}, "metadata"')


def add_line(path: Path, after: str, key: str, value: str) -> int:
    """Insert a line for another key after a key's line; return its number."""
    number = edit(path, after, r"(.*)\n", r"\1\n\1\n") + 1
    lines = path.read_text().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(f'"{after}"', f'"{key}"', 1)
    path.write_text("".join(lines))
    if key != after:
        set_value(path, key, value)
    return number


def copy_of_ours(folder: Path, num_logs: int = 1) -> list[Path]:
    """Copy the first logs of a result of this code
    and its system description into a tree in the folder.
    """
    (folder / "systems").mkdir(parents=True)
    results = folder / "results" / OURS / "bert"
    results.mkdir(parents=True)
    shutil.copy(TREE / "systems" / f"{OURS}.json", folder / "systems")
    names = sorted((TREE / "results" / OURS / "bert").glob("result_*.txt"))[:num_logs]
    return [Path(shutil.copy(name, results / name.name)) for name in names]


def system_of(logs: Sequence[Path]) -> Path:
    """Return the path of the system description of a copy."""
    return logs[0].parents[3] / "systems" / f"{logs[0].parents[1].name}.json"


def expect(found: Report, check: str, outcome: Outcome, *words: str) -> None:
    """Assert that a check has this outcome and that its message contains all of these words."""
    assert found[check][0] is outcome, found[check]
    for part in words:
        assert part in found[check][1], found[check]


def errors(log: Path) -> set[str]:
    """Return the checks that call one log wrong."""
    return {check for check, (outcome, _) in report([log]).items() if outcome is Outcome.ERROR}


def report(
    logs: Sequence[Path],
    tree: Path | None = None,
    division: str | None = None,
    system: Mapping[str, Any] | None = None,
) -> Report:
    """Return {check: (outcome, message)} of checks that do not pass;
    with a tree, read the system description too.
    """
    if tree is not None and system is None:
        system = json.loads(system_of(logs).read_text())
    rows = run_checks(ResultSet([read_log(log) for log in logs], system, division, tree), "here")
    found = {row.check.removeprefix("own: "): (row.outcome, row.words) for row in rows}
    return {check: said for check, said in found.items() if said[0] is not Outcome.PASS}
