"""Options and output that several ``mlbert prepare`` commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

Out = Annotated[Path, typer.Option("--out", help="Output folder; made when missing.", file_okay=False)]
VocabSize = Annotated[int, typer.Option(help="Entries of the vocabulary to train.")]
MaxSeqLength = Annotated[int, typer.Option(help="Longest sequence, tokens.")]
MaxPredictions = Annotated[int, typer.Option(help="Most masked tokens of a sequence; 0: the masked share of it.")]
MaskedLmProb = Annotated[float, typer.Option(help="Share of tokens to predict.")]
ShortSeqProb = Annotated[float, typer.Option(help="Share of instances with a random shorter target length.")]
DupeFactor = Annotated[int, typer.Option(help="Passes over the text, each with its own masks.")]
Seed = Annotated[int, typer.Option(help="Random seed of the instances of each part.")]
EvalShare = Annotated[float, typer.Option(help="Part of the documents to hold out for evaluation.")]
EvalSequences = Annotated[int, typer.Option(help="Evaluation sequences to keep.")]
SplitSeed = Annotated[int, typer.Option(help="Chooses the held-out documents.")]
MaxDocument = Annotated[int, typer.Option(help="Longer documents are cut into pieces, sentences.")]
Parts = Annotated[int, typer.Option(help="Training parts, one shard each.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core. The result is the same.")]
Cased = Annotated[bool, typer.Option("--cased", help="Keep case and accents.")]


def say(line: str) -> None:
    """Print one line, never wrapped."""
    console.print(line, soft_wrap=True, highlight=False)


def counted(count: int, noun: str) -> str:
    """For example ``1 file`` or ``2,000 files``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def num_workers(workers: int) -> int:
    """Processes to use for the option ``--workers``."""
    return workers or os.cpu_count() or 1
