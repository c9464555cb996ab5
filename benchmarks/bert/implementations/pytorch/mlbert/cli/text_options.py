"""Options of the commands that read text: `mlbert pretrain` and several of `mlbert prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KINDS_OF_TEXT = "Files (txt, md, html, csv, jsonl, parquet, also .gz), folders, or saved datasets"
Column = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="COLUMN", help="Column of the text in csv, jsonl and parquet files."
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Encoding of the files that are not UTF-8, such as cp1252."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out files that cannot be read.")]
HeldOut = Annotated[
    Path | None,
    typer.Option(
        "--eval", metavar="TEXT", help="Text to evaluate on; default: a part of the text."
    ),
]
