"""The report as one HTML page that works offline, without scripts, in light and dark mode, on phones and on paper.

The report page of a pre-training run on custom text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes

from mlbert.mlperf.check import run_checks
from mlbert.mlperf.findings import Finding, Outcome
from mlbert.mlperf.metrics import read_points
from mlbert.mlperf.result_set import ResultSet
from mlbert.report import charts, tables
from mlbert.report.results import TERAFLOPS_PER_SEQUENCE, Result
from mlbert.report.svg import (
    DOTTED,
    HEIGHT,
    WIDTH,
    Chart,
    Key,
    colour,
    count,
    draw,
    few_ticks,
    percent,
    speed,
    style_of_system,
    time_unit,
)
from mlbert.report.tables import ReportTable

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Tile(NamedTuple):
    """A number and its description."""

    value: str
    words: str


class Headline(NamedTuple):
    """The result in large letters, its description, and further numbers."""

    value: str
    words: str
    tiles: Sequence[Tile]


def report_page(results: Sequence[Result]) -> str:
    """Return the HTML page for one or more systems."""
    lone = results[0] if len(results) == 1 else None
    hyperparameters = tables.hyperparameters(results)
    colours = [style_of_system(index).variable for index in range(len(results))]
    return (
        environment()
        .get_template("report.html")
        .render(
            title=lone.system.name if lone else f"{len(results)} systems",
            words=tables.verdict(results),
            headline=_headline(lone) if lone else None,
            comparison=None if lone else tables.comparison(results, colours),
            charts=_charts(results),
            runs=[(result.system.name, tables.runs(result)) for result in results],
            hyperparameters=hyperparameters,
            marks={cell.mark for row in hyperparameters.rows for cell in row if isinstance(cell, tables.Cell)},
            peaks=_peaks(results),
            teraflops=TERAFLOPS_PER_SEQUENCE,
            machines=tables.machines(results),
            findings=[(result.system.name, _findings(result)) for result in results],
            provenance=tables.provenance(results),
            trace=[(result.system.name, tables.trace_commands(result)) for result in results if result.ours],
            reproduce=[(r.system.name, commands) for r in results if (commands := tables.reproduce_commands(r))],
            notes=[f"{result.system.name}: {note}" for result in results for note in result.system.notes],
        )
    )


def findings_page(findings: Sequence[Finding], subject: str) -> str:
    """Return the findings of `mlbert submission check` as an HTML page in the same style."""
    num_errors = sum(finding.outcome is Outcome.ERROR for finding in findings)
    verdict = f"{num_errors} of {len(findings)} checks failed" if num_errors else "Nothing failed"
    counts = [Tile(str(sum(f.outcome is outcome for f in findings)), outcome.value.lower()) for outcome in Outcome]
    headline = Headline(verdict, f"{len(findings)} checks", [tile for tile in counts if tile.value != "0"])
    template = environment().get_template("findings.html")
    return template.render(title=f"Check of {subject}", words="", headline=headline, findings=findings)


def _headline(result: Result) -> Headline:
    """Return the headline for one system."""
    value = tables.time_to_train(result).capitalize()
    return Headline(value, tables.meaning(result), [tile for tile in _tiles(result) if tile.value not in ("-", "")])


def _tiles(result: Result) -> list[Tile]:
    facts = result.system.facts or {}
    tiles = [
        Tile(f"{result.num_converged} of {len(result.runs)}", "runs reached the target"),
        Tile("-" if result.target is None else f"{result.target:.4g}", "target accuracy"),
        Tile(str(result.logged("submission_division") or "-"), "division"),
        Tile(count(result.batch), "sequences a batch"),
    ]
    if result.accelerators:
        tiles.append(Tile(f"{result.accelerators:,}", str(facts.get("accelerator_model_name") or "accelerators")))
    tiles.append(Tile(speed(result.samples_per_second), "samples/s, evaluations included"))
    tiles.append(Tile(count(result.mean_samples), "samples to the target, olympic mean"))
    mean = result.olympic_seconds
    if result.scaling is not None and mean is not None and math.isfinite(mean):
        score = f"score in minutes: the time x {result.scaling:.4f}, for fewer samples than the reference"
        tiles.append(Tile(f"{mean * result.scaling / 60:.3f}", score if result.scaling > 1 else "score in minutes"))
    tiles += [Tile(percent(share), f"of the {what}") for what, share in result.peak_shares.items()]
    return tiles


def _charts(results: Sequence[Result]) -> list[tuple[str, list[Chart]]]:
    """Return the figures by section, without empty sections."""
    sections = (
        ("Learning", [charts.accuracy(results, "samples"), charts.accuracy(results, "seconds")]),
        ("Time", [charts.times_to_train(results), charts.where_time_went(results)]),
        ("Speed and seeds", [charts.speeds(results), charts.samples_to_target(results)]),
        ("Steps", [charts.metric(results, *pair) for pair in (("loss", "Loss"), ("learning_rate", "Learning rate"))]),
    )
    found = [(title, [chart for chart in charts if chart is not None]) for title, charts in sections]
    return [(title, charts) for title, charts in found if charts]


def _peaks(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    return [
        (result.system.name, percent(share), what) for result in results for what, share in result.peak_shares.items()
    ]


def _findings(result: Result) -> list[Finding]:
    """Return the findings of our own checks on the logs, worst first."""
    system = result.system
    logs = [run.source.log for run in result.runs]
    findings = run_checks(ResultSet(logs, system.facts, None, system.tree if system.facts else None), system.name)
    order = list(Outcome)
    return sorted(findings, key=lambda finding: -order.index(finding.outcome))


@cache
def environment() -> Environment:
    """Return the Jinja environment for the templates."""
    loader = PackageLoader("mlbert.report")
    return Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_controls,
    )


def _without_controls(value: object) -> object:
    """Replace characters that HTML forbids or that change the writing direction."""
    return type(value)(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value)) if isinstance(value, str) else value


Points = list[tuple[float, float]]  # seconds and value


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
    accuracy, loss = _points(metrics, "evaluation", "eval_accuracy"), _points(metrics, "step", "loss")
    charts = [_chart("Held-out accuracy", accuracy, baselines), _chart("Training loss", loss, {})]
    return (
        environment()
        .get_template("own_text.html")
        .render(
            title=name,
            brand="BERT pre-training on custom text",
            words="",
            headline=Headline(*headline, [Tile(*tile) for tile in tiles]),
            charts=[chart for chart in charts if chart is not None],
            guesses=ReportTable(["sentence", "word", "guesses"], guesses, texts=3),
            facts=ReportTable(["what", "value"], [[key, str(value)] for key, value in facts.items()], texts=2),
        )
    )


def _points(metrics: Path, kind: str, name: str) -> Points:
    return [(point["seconds"], point[name]) for point in read_points(metrics)[0] if point["kind"] == kind]


def _chart(title: str, points: Points, baselines: Mapping[str, float]) -> Chart | None:
    if not points:
        return None
    scale, unit = time_unit(points[-1][0])

    def paint(axes: Axes) -> None:
        axes.xaxis.set_major_locator(few_ticks())
        for value in baselines.values():
            axes.axhline(value, color=colour("muted"), linewidth=1.2, linestyle=DOTTED)
        axes.plot([x / scale for x, _ in points], [y for _, y in points], color=colour("s0"), linewidth=1.3)
        axes.set_xlabel(f"{unit} of training")

    keys = [Key("line", "s0", title.lower())]
    keys += [Key("dotted", "muted", f"{name} {value:.3f}") for name, value in baselines.items()]
    description = f"{title} over the time of training."
    return Chart(title, draw(title.lower().replace(" ", "-"), title, description, (WIDTH, HEIGHT), paint), keys)
