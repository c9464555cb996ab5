"""The report page of a run on one's own text, which mlaudit draws.

This package imports nothing of mlaudit, which is looked up by name when a page is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mlbert.host.packages import import_beside

_MODULE = "mlaudit.report.page"


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
        name: of the run.
        headline: the result in large letters, and its description.
        tiles: numbers with their descriptions.
        metrics: the run's metrics.jsonl.
        baselines: predictor to accuracy.
        guesses: sentence, masked word, and guesses.
        facts: facts about the run, name to value.
    """
    draw = import_beside(_MODULE).own_text_page
    return str(draw(name, headline, tiles, metrics, baselines, guesses, facts))
