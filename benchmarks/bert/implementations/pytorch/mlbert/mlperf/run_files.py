"""Where the files lie that a run writes beside its log: ``config.json``, ``metrics.jsonl`` and ``summary.json``.

A LOGDIR has ``result_0.txt`` and ``run_0/config.json``. In a tree they are ``results/<system>/bert/result_0.txt`` and
``results/<system>/run_0.config.json``: the official checkers take every folder in ``results/<system>`` for a benchmark
and every file beside the logs for a mistake, but do not look at files there.
"""

from __future__ import annotations

import re
from pathlib import Path

NAMES = ("config.json", "metrics.jsonl", "summary.json")
_LOG_NAME = re.compile(r"result_(.+)\.txt")


def run_file(log: Path, name: str) -> Path | None:
    """The file of a log's run, ``name`` being one of `NAMES`; ``None`` where there is none."""
    match = _LOG_NAME.fullmatch(log.name)
    if match is None:
        return None
    places = (log.parent / f"run_{match[1]}" / name, log.parent.parent / f"run_{match[1]}.{name}")
    return next((place for place in places if place.is_file()), None)
