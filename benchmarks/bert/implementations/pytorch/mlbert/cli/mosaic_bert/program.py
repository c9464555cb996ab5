"""What the fine-tuning programs share with each other: words, layers of settings, and metrics of a finished run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mlbert import recipes
from mlbert.cli.mosaic_bert.leaves import Layer
from mlbert.core.config import Resolved, resolve
from mlbert.core.errors import UserError


def split_words(program: str, args: Sequence[str]) -> tuple[Path, list[str]]:
    """The YAML file and the ``name=value`` words. Raises UserError: no file."""
    if not args or "=" in args[0] or args[0].startswith("-"):
        raise UserError(program, "is given no YAML file", f"Write {program} yamls/... [name=value ...]")
    return Path(args[0]), list(args[1:])


def resolve_layer(path: Path, layer: Layer) -> Resolved:
    """The checked configuration of a layer of settings; exports do not count, as in the published programs."""
    defaults = recipes.load(str(layer["recipe"][0])).DEFAULTS
    return resolve(defaults, {}, {}, [], [], layer, [path])


def last_evaluation(run: Path) -> dict[str, float]:
    """Metrics of the last evaluation in a run folder's ``metrics.jsonl``. Raises UserError: there is none."""
    path, prefix = run / "metrics.jsonl", "eval_"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        last = [line for line in lines if line["kind"] == "evaluation"][-1]
    except (OSError, ValueError, KeyError, IndexError):
        raise UserError(path, "holds no evaluation", "Remove its folder and run again") from None
    return {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}
