"""A round's results as a table for a terminal or a page, as CSV, and as JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence

from mlaudit.report.tables import Cell, ReportTable, count, speed
from mlaudit.round_table import AuditedRound, RoundRow

# Columns of the CSV file: those of a row, then the findings in words.
CSV_COLUMNS = (
    "submitter",
    "system",
    "benchmark",
    "round",
    "division",
    "score_minutes",
    "minutes",
    "runs",
    "converged",
    "accelerators",
    "accelerator",
    "batch",
    "samples_to_target",
    "samples_per_second",
    "grid",
    "errors",
    "warnings",
    "notes",
)
_MARKS = {"ERROR": "bad", "warning": "differs"}
_NUMBERS = ("accel.", "score", "runs", "batch", "samples", "/s each", "grid")
# A vendor's name, and a model in parentheses after the name of its family.
_VENDOR = re.compile(r"^(NVIDIA|AMD|Intel|Google)\W+", re.IGNORECASE)
_MODEL = re.compile(r"\((\S+)\)$")


def page_table(audited: AuditedRound) -> ReportTable:
    """Return one row for each result, with the columns that fit a page."""
    rows: list[Sequence[str | Cell]] = []
    for row in audited.rows:
        texts = [row.system, row.submitter, row.benchmark, row.round, row.division]
        rows.append([*texts, _model(row), _findings(row), *_numbers(row)])
    columns = ["system", "submitter", "benchmark", "round", "division", "accelerator", "findings"]
    found = ReportTable([*columns, *_NUMBERS], rows, len(columns))
    return _without_equal(found, ("benchmark", "round", "division"))


def terminal_table(audited: AuditedRound) -> ReportTable:
    """Return one row for each result, with the columns that fit a terminal."""
    several = len({row.benchmark for row in audited.rows}) > 1
    rows: list[Sequence[str | Cell]] = []
    for row in audited.rows:
        name = f"{row.submitter} {row.system}".strip()
        if several:
            name += f" {row.benchmark}"
        rows.append([name, _findings(row), *_numbers(row)])
    found = ReportTable(["result", "findings", *_NUMBERS], rows, 2)
    return _without(found, ("runs", "batch"))


def _model(row: RoundRow) -> str:
    name = row.accelerator.strip()
    model = _MODEL.search(name)
    if model is not None:
        return model[1]
    return _VENDOR.sub("", name) or "-"


def _findings(row: RoundRow) -> Cell:
    words = row.findings_in_words
    mark = next((mark for name, mark in _MARKS.items() if name in words), "dim")
    return Cell(words, mark)


def _numbers(row: RoundRow) -> list[str]:
    return [
        count(row.accelerators),
        "-" if row.score_minutes is None else f"{row.score_minutes:.3f}",
        f"{row.converged} of {row.runs}",
        count(row.batch),
        count(row.samples_to_target),
        speed(row.samples_per_second),
        row.grid or "-",
    ]


def _without_equal(found: ReportTable, names: Sequence[str]) -> ReportTable:
    """Return a table without those of the named columns that say the same in every row."""
    places = {name: found.columns.index(name) for name in names}
    equal = [name for name, at in places.items() if len({str(row[at]) for row in found.rows}) == 1]
    return _without(found, equal)


def _without(found: ReportTable, names: Sequence[str]) -> ReportTable:
    kept = [place for place, name in enumerate(found.columns) if name not in names]
    columns = [found.columns[place] for place in kept]
    rows = [[row[place] for place in kept] for row in found.rows]
    return ReportTable(columns, rows, sum(place < found.texts for place in kept))


def as_csv(audited: AuditedRound) -> str:
    """Return the table as CSV; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*CSV_COLUMNS, "findings"])
    for row in audited.rows:
        values = row.as_dict()
        words = [f"{one.check}: {one.words}" for one in row.findings if one.complaints]
        writer.writerow([*(values[name] for name in CSV_COLUMNS), " | ".join(words)])
    return text.getvalue()


def as_json(audited: AuditedRound) -> str:
    """Return the table with all findings as JSON; null is unknown."""
    found = {
        "results": [row.as_dict() for row in audited.rows],
        "copies_between_systems": [finding.as_json() for finding in audited.copies],
        "other_benchmarks": dict(audited.others),
    }
    return json.dumps(found, indent=2) + "\n"
