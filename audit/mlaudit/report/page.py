"""Render HTML pages: the report, the findings of a check, a plan,
and the result of pre-training on custom text.

A page is one file that works offline, without scripts, in light and dark mode,
on phones and on paper.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from mlaudit.findings import Finding, Outcome
from mlaudit.own_checks import run_checks
from mlaudit.planner import request
from mlaudit.planner.cost import Estimate, Prices
from mlaudit.planner.timing import held_out
from mlaudit.report import charts, round_tables, tables
from mlaudit.report.results import TERAFLOPS_PER_SEQUENCE, Result
from mlaudit.report.svg import SERIES, Chart
from mlaudit.report.tables import ReportTable, count, percent, speed
from mlaudit.result_set import ResultSet
from mlaudit.round_table import AuditedRound
from mlaudit.rules import UNVERIFIED
from mlbert.host.metrics import titles
from mlbert.host.metrics_file import read_points
from mlbert.host.texts import counted

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_ERRORS = ("mean", "median", "within_15", "worst")


class Headline(NamedTuple):
    """The result in large letters, its description, and further numbers."""

    value: str
    words: str
    tiles: Sequence[tuple[str, str]]  # number and description


def report_page(results: Sequence[Result], prices: Prices) -> str:
    """Return the HTML page for one or more systems."""
    lone = results[0] if len(results) == 1 else None
    hyperparameters = tables.hyperparameters(results)
    return _render(
        "report.html",
        title=_title(results),
        words=tables.verdict(results),
        headline=_headline(lone) if lone else None,
        comparison=None if lone else tables.comparison(results),
        colors=[f"s{index % SERIES}" for index in range(len(results))],
        charts=_charts(results),
        runs=[(result.system.name, tables.runs(result)) for result in results],
        costs=[
            (r.system.name, table)
            for r in results
            if (table := tables.costs(r, prices)) is not None
        ],
        hyperparameters=hyperparameters,
        marks={
            cell.mark
            for row in hyperparameters.rows
            for cell in row
            if isinstance(cell, tables.Cell)
        },
        peaks=[
            (r.system.name, percent(share), what)
            for r in results
            for what, share in r.peak_shares.items()
        ],
        teraflops=TERAFLOPS_PER_SEQUENCE,
        machines=tables.machines(results),
        findings=[(result.system.name, _findings(result)) for result in results],
        provenance=tables.provenance(results),
        trace=[
            (result.system.name, tables.trace_commands(result)) for result in results if result.ours
        ],
        reproduce=[
            (r.system.name, commands) for r in results if (commands := tables.reproduce_commands(r))
        ],
        notes=[
            f"{result.system.name}: {note}" for result in results for note in result.system.notes
        ],
    )


def _title(results: Sequence[Result]) -> str:
    """Return what the report is about."""
    what = f"{len(results)} systems side by side"
    if len(results) == 1:
        lone = results[0]
        what = f"{lone.system.name}, {counted(len(lone.runs), 'run')}"
    return f"Training report: {what}"


def findings_page(findings: Sequence[Finding], subject: str) -> str:
    """Return the findings of `mlbert submission check` as an HTML page in the same style."""
    counts = Counter(finding.outcome for finding in findings)
    num_errors = counts[Outcome.ERROR]
    verdict = (
        f"{num_errors} of {len(findings)} checks failed" if num_errors else "All checks passed"
    )
    tiles = [
        (str(counts[outcome]), outcome.value.lower()) for outcome in Outcome if counts[outcome]
    ]
    headline = Headline(verdict, f"{len(findings)} checks", tiles)
    return _render(
        "findings.html",
        title=f"Check of {subject}",
        words="",
        headline=headline,
        findings=sorted(findings, key=lambda finding: -finding.severity),
    )


def round_page(audited: AuditedRound, subject: str) -> str:
    """Return the table of a round as an HTML page, with the findings of each result."""
    findings = [finding for row in audited.rows for finding in row.findings]
    found = Counter(finding.outcome for finding in (*findings, *audited.copies))
    submitters = {row.submitter for row in audited.rows}
    tiles = [
        (count(len(submitters)), "submitters"),
        (count(sum(row.runs for row in audited.rows)), "logs"),
        (count(found[Outcome.ERROR]), "errors"),
        (count(found[Outcome.WARN]), "warnings"),
    ]
    plural = "" if len(audited.rows) == 1 else "s"
    return _render(
        "round.html",
        title=f"Results in {subject}",
        words="",
        headline=Headline(f"{len(audited.rows)} result{plural}", "", tiles),
        results=round_tables.page_table(audited),
        rows=audited.rows,
        copies=[one for one in audited.copies if one.outcome is not Outcome.PASS],
    )


def _headline(result: Result) -> Headline:
    """Return the headline for one system, without unknown numbers."""
    facts = result.system.facts or {}
    mean = result.olympic_seconds
    tiles = [
        (f"{result.num_converged} of {len(result.runs)}", "runs reached the target"),
        ("-" if result.target is None else f"{result.target:.4g}", "target accuracy"),
        (str(result.logged("submission_division") or "-"), "division"),
        (count(result.batch), "sequences a batch"),
        (
            count(result.accelerators or None),
            str(facts.get("accelerator_model_name") or "accelerators"),
        ),
        (speed(result.samples_per_second), "samples/s with evaluations, median of the runs"),
        (count(result.mean_samples), "samples to the target, olympic mean"),
    ]
    if result.scaling is not None and mean is not None and math.isfinite(mean):
        score = f"score in minutes: the time x {result.scaling:.4f}, "
        score += "for fewer samples than the reference"
        tiles.append(
            (
                f"{mean * result.scaling / 60:.3f}",
                score if result.scaling > 1 else "score in minutes",
            )
        )
    tiles += [(percent(share), f"of the {what}") for what, share in result.peak_shares.items()]
    value = tables.time_to_train(result).capitalize()
    return Headline(value, tables.meaning(result), [tile for tile in tiles if tile[0] != "-"])


def _charts(results: Sequence[Result]) -> list[tuple[str, list[Chart]]]:
    """Return the figures by section, without empty sections."""
    sections = (
        ("Learning", [charts.accuracy(results, "samples"), charts.accuracy(results, "seconds")]),
        ("Time", [charts.times_to_train(results), charts.where_time_went(results)]),
        ("Speed and seeds", [charts.speeds(results), charts.samples_to_target(results)]),
        ("Steps", [charts.metric(results, key, title) for key, title in titles().items()]),
    )
    found = [
        (title, [chart for chart in charts if chart is not None]) for title, charts in sections
    ]
    return [(title, charts) for title, charts in found if charts]


def _findings(result: Result) -> list[Finding]:
    """Return the findings of our own checks on the logs, worst first."""
    system = result.system
    logs = [run.source.log for run in result.runs]
    tree = system.tree if system.facts else None
    results = ResultSet(logs, system.facts, None, tree, result.benchmark, result.round)
    findings = run_checks(results, system.name)
    return sorted(findings, key=lambda finding: -finding.severity)


def plan_page(best: Estimate, sweep: Sequence[Estimate] = (), choice: str = "") -> str:
    """Return the page of a plan: ``best`` as the headline, its sweep,
    and the choice for a budget.
    """
    job = best.job
    tiles = [
        (request.band(best.score_band), "90 % interval of the score of ten runs"),
        (request.band(best.run_band), "90 % interval of one run"),
        (count(best.samples), "samples to the target on average"),
        (count(job.batch), "sequences a batch"),
        (count(best.sequences_per_second), "sequences/s while training"),
        (percent(best.share_of_peak), "of the 16-bit peak"),
        (f"{best.memory.total:.0f} GB", "memory per GPU"),
        (best.limit, "limits the speed most"),
    ]
    if best.dollars is not None:
        tiles.append((f"{best.dollars:,.2f}", "dollars a run"))
    if best.kilowatt_hours is not None:
        tiles.append((f"{best.kilowatt_hours:,.2f}", "kWh a run"))
    return _render(
        "plan.html",
        title=f"Plan: {job.gpus:,} {job.label} on {counted(job.nodes, 'node')}",
        words=f"An estimate, not a measurement. {request.expected_error_of(job)}. {UNVERIFIED}",
        headline=Headline(request.duration(best.seconds), "estimated time to train", tiles),
        charts=[charts.sweep(sweep)] if sweep else [],
        sweep=request.table(sweep) if sweep else None,
        choice=choice.splitlines(),
        answers=request.answers(best),
        errors=ReportTable(
            ["fit without all results of the", "mean error", "median", "within 15 %", "largest"],
            [
                [name, *(percent(error[key]) for key in _ERRORS)]
                for name, error in held_out().items()
            ],
        ),
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mlaudit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_controls,
    )


def _render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(values)


def _without_controls(value: object) -> object:
    """Replace characters that HTML forbids or that change the writing direction."""
    if not isinstance(value, str):
        return value
    return type(value)(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value))


def _facts_table(facts: Mapping[str, object]) -> ReportTable:
    rows = [[name, str(value)] for name, value in facts.items()]
    return ReportTable(["what", "value"], rows, texts=2)


def own_text_page(
    name: str,
    headline: tuple[str, str],
    tiles: Sequence[tuple[str, str]],
    metrics: Path,
    baselines: Mapping[str, float],
    guesses: Sequence[Sequence[str]],
    facts: Mapping[str, object],
) -> str:
    """Return the HTML page.

    Args:
        headline: the result in large letters, and its description.
        tiles: numbers with their descriptions.
        metrics: the run's metrics.jsonl.
        baselines: predictor to accuracy.
        guesses: sentence, masked word, and guesses.
        facts: facts about the run, name to value.
    """
    points, _ = read_points(metrics)
    accuracy = [
        (point["seconds"], point["eval_accuracy"])
        for point in points
        if point["kind"] == "evaluation"
    ]
    loss = [(point["seconds"], point["loss"]) for point in points if point["kind"] == "step"]
    figures = [
        charts.curve_chart(
            "Held-out accuracy",
            [charts.Curve("s0", "held-out accuracy", accuracy)],
            "seconds",
            lambda axes: charts.paint_levels(axes, baselines),
        ),
        charts.curve_chart("Training loss", [charts.Curve("s0", "training loss", loss)], "seconds"),
    ]
    return _render(
        "own_text.html",
        title=name,
        brand="BERT pre-training on custom text",
        words="",
        headline=Headline(*headline, tiles),
        charts=[figure for figure in figures if figure is not None],
        guesses=ReportTable(["sentence", "word", "guesses"], guesses, texts=3),
        facts=_facts_table(facts),
    )


def prepared_text_page(
    name: str,
    headline: tuple[str, str],
    tiles: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    header: Sequence[str],
    sources: Sequence[Sequence[str]],
    facts: Mapping[str, object],
) -> str:
    """Return the HTML page about text that was prepared for training.

    Args:
        headline: the result in large letters, and its description.
        tiles: numbers with their descriptions.
        warnings: what to look at before training.
        header, sources: names of the columns, and a row for each source of text.
        facts: name to value.
    """
    return _render(
        "prepared_text.html",
        title=name,
        brand="Text prepared for training",
        words="",
        headline=Headline(*headline, tiles),
        warnings=warnings,
        sources=ReportTable(header, sources, texts=2),
        facts=_facts_table(facts),
    )
