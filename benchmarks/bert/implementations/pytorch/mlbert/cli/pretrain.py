"""``mlbert pretrain TEXT... --out DIR``: from text of one's own to a masked-LM model, in one command.

A first word that ends in .yaml or .yml is for MosaicML's ``main.py`` (`mlbert.cli.mosaic_bert.main`).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlbert.host.errors import UserError

LEAST_MINUTES, MOST_MINUTES, USUAL_MINUTES = 0.05, 525_600.0, 30.0
YAML_SUFFIXES = (".yaml", ".yml")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Size(StrEnum):
    """Of the model."""

    auto = "auto"
    tiny = "tiny"
    small = "small"
    base = "base"


@app.command()
def pretrain(
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT", help="Files (txt, md, jsonl, also .gz), folders, or sets of datasets."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run; called again, it goes on.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Of training in all; default 30.")] = None,
    hours: Annotated[float | None, typer.Option(help="Likewise, in hours.")] = None,
    size: Annotated[
        Size, typer.Option(help="Of the model; auto: what the time and the text are enough for.")
    ] = Size.auto,
    vocab: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A vocab.txt to use in place of a new one.")
    ] = None,
    cased: Annotated[
        bool, typer.Option("--cased", help="Keep capital letters and accents in a new vocabulary.")
    ] = False,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="MODEL_FOLDER", help="A BERT to go on from, with its vocabulary.")
    ] = None,
    mlperf: Annotated[bool, typer.Option("--mlperf", help="Write an MLPerf log, too.")] = False,
) -> int:
    """Pre-train a masked-LM model on your own text: prepare it, train, evaluate, export. Interrupted, or with more
    --minutes, the same command goes on. A first TEXT that ends in .yaml is MosaicML's configuration."""
    if texts[0].suffix in YAML_SUFFIXES:
        from mlbert.cli.mosaic_bert.main import pretrain as mosaic  # torch takes a second

        return mosaic(texts[0], [str(word) for word in texts[1:]])
    if out is None:
        raise UserError("config.missing", "--out", "is not given", "Name a folder for the model: --out DIR")
    seconds = _seconds(minutes, hours)
    if start is not None and (vocab is not None or cased or size is not Size.auto):
        raise UserError(
            "config.conflict", "--from", "brings its vocabulary and size", "Leave --vocab, --cased and --size out"
        )
    if vocab is not None and cased:
        remedy = 'Leave --cased out, and put a tokenizer_config.json with "do_lower_case": false beside the vocabulary'
        raise UserError("config.conflict", "--cased", "is for a new vocabulary", remedy)
    from mlbert.programs.custom_corpus.run import Asked  # torch takes a second
    from mlbert.programs.custom_corpus.run import pretrain as run

    return run(Asked(texts, out, seconds, size.value, vocab, cased, start, mlperf))


def _seconds(minutes: float | None, hours: float | None) -> float:
    if minutes is not None and hours is not None:
        raise UserError("config.conflict", "--minutes and --hours", "are both given", "Give one of them")
    name, told = ("--hours", hours) if hours is not None else ("--minutes", minutes)
    wanted = USUAL_MINUTES if told is None else told * (60.0 if hours is not None else 1.0)
    if not LEAST_MINUTES <= wanted <= MOST_MINUTES:
        remedy = f"Give {LEAST_MINUTES:g} minutes to a year ({MOST_MINUTES:,.0f} minutes)"
        raise UserError("config.range", f"{name} {told:g}", "is no time to train", remedy)
    return 60.0 * wanted
