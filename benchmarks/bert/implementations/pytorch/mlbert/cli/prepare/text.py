"""``mlbert prepare python-text`` and ``text``: any text to a finished data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mlbert.cli.prepare.options import (
    Cased,
    DupeFactor,
    EvalSequences,
    EvalShare,
    MaskedLmProb,
    MaxDocument,
    MaxPredictions,
    MaxSeqLength,
    Out,
    Parts,
    Seed,
    ShortSeqProb,
    SplitSeed,
    VocabSize,
    Workers,
    console,
    num_workers,
)
from mlbert.cli.prepare.progress import console_progress
from mlbert.prepare import pipeline, python_text, text_folder
from mlbert.prepare.instances import InstanceOptions

app = typer.Typer()


def _text_options(values: dict[str, Any]) -> pipeline.TextOptions:
    predictions = values["max_predictions"] or max(1, round(values["max_seq_length"] * values["masked_lm_prob"]))
    return pipeline.TextOptions(
        instances=InstanceOptions(
            max_seq_length=values["max_seq_length"],
            max_predictions_per_seq=predictions,
            masked_lm_prob=values["masked_lm_prob"],
            short_seq_prob=values["short_seq_prob"],
            dupe_factor=values["dupe_factor"],
            random_seed=values["seed"],
        ),
        vocab_size=values["vocab_size"],
        lower_case=not values["cased"],
        eval_share=values["eval_share"],
        eval_sequences=values["eval_sequences"],
        split_seed=values["split_seed"],
        num_parts=values["parts"],
        max_document_sentences=values["max_document_sentences"],
    )


def _report(out: Path, summary: dict[str, Any]) -> None:
    table = Table(title=f"prepared data in {out}", show_header=False)
    rows = {**summary["text"], **{k: summary[k] for k in ("vocab_size", "train_sequences", "eval_sequences")}}
    for key, value in rows.items():
        table.add_row(key.replace("_", " "), f"{value:,}")
    for key in ("most_frequent_accuracy", "bigram_accuracy"):
        table.add_row(key.replace("_", " "), f"{summary['baselines'][key]:.4f}")
    console.print(table)


@app.command("python-text")
def python_text_command(
    out: Out,
    vocab_size: VocabSize = 4096,
    max_seq_length: MaxSeqLength = 64,
    max_predictions: MaxPredictions = 0,
    masked_lm_prob: MaskedLmProb = 0.15,
    short_seq_prob: ShortSeqProb = 0.1,
    dupe_factor: DupeFactor = 10,
    seed: Seed = 12345,
    eval_share: EvalShare = 0.05,
    eval_sequences: EvalSequences = 2000,
    split_seed: SplitSeed = 0,
    max_document_sentences: MaxDocument = 32,
    parts: Parts = 2,
    workers: Workers = 0,
    cased: Cased = False,
) -> None:
    """Prepare the English text that this Python installation carries."""
    options = _text_options(locals())
    with console.status("reading the standard library's documentation"):
        summary = pipeline.prepare_text(
            python_text.documents(),
            out,
            options,
            python_text.source_name(),
            workers=num_workers(workers),
            progress=console_progress(),
        )
    _report(out, summary)


@app.command("text")
def text_command(
    folder: Annotated[Path, typer.Option("--input", help="Folder of *.txt files, UTF-8.")],
    out: Out,
    one_per_line: Annotated[
        bool, typer.Option("--one-per-line", help="One sentence a line, blank line between documents.")
    ] = False,
    vocab_size: VocabSize = 4096,
    max_seq_length: MaxSeqLength = 128,
    max_predictions: MaxPredictions = 0,
    masked_lm_prob: MaskedLmProb = 0.15,
    short_seq_prob: ShortSeqProb = 0.1,
    dupe_factor: DupeFactor = 10,
    seed: Seed = 12345,
    eval_share: EvalShare = 0.05,
    eval_sequences: EvalSequences = 2000,
    split_seed: SplitSeed = 0,
    max_document_sentences: MaxDocument = 32,
    parts: Parts = 2,
    workers: Workers = 0,
    cased: Cased = False,
) -> None:
    """Prepare a folder of your own text files."""
    options = _text_options(locals())
    source = text_folder.source_name(folder, one_per_line)
    documents = text_folder.documents(folder, one_per_line)
    summary = pipeline.prepare_text(
        documents, out, options, source, workers=num_workers(workers), progress=console_progress()
    )
    _report(out, summary)
