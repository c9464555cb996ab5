"""The report page of a pre-training run on custom text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from mlbert.mlperf.metrics import read_points
from mlbert.report.page import Headline, Tile, environment
from mlbert.report.svg import DOTTED, HEIGHT, WIDTH, Chart, Key, colour, draw, few_ticks, time_unit
from mlbert.report.tables import ReportTable

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
