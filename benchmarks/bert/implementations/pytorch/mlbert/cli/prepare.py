"""``mlbert prepare``: text to prepared data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mlbert.prepare import pipeline, python_text, text_folder
from mlbert.prepare.instances import InstanceOptions

app = typer.Typer(no_args_is_help=True, help="Prepare training and evaluation data.")
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
Workers = Annotated[int, typer.Option(help="Processes; 0: one for each core. The result is the same.")]
Cased = Annotated[bool, typer.Option("--cased", help="Keep case and accents.")]


def _say(line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False)


def _workers(workers: int) -> int:
    return workers or os.cpu_count() or 1


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
            workers=_workers(workers),
            progress=_say,
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
    summary = pipeline.prepare_text(documents, out, options, source, workers=_workers(workers), progress=_say)
    _report(out, summary)


@app.command("instances")
def instances_command(
    inputs: Annotated[
        list[Path], typer.Option("--input", help="Text part: one sentence a line, blank line between documents.")
    ],
    vocab: Annotated[Path, typer.Option("--vocab", help="WordPiece vocabulary, vocab.txt.")],
    out: Out,
    max_seq_length: MaxSeqLength = 512,
    max_predictions: MaxPredictions = 76,
    masked_lm_prob: MaskedLmProb = 0.15,
    short_seq_prob: ShortSeqProb = 0.1,
    dupe_factor: DupeFactor = 10,
    seed: Seed = 12345,
    workers: Workers = 0,
    cased: Cased = False,
) -> None:
    """Turn text parts into a prepared set, equal to the benchmark's generator; one shard for each part."""
    options = InstanceOptions(
        max_seq_length=max_seq_length,
        max_predictions_per_seq=max_predictions or max(1, round(max_seq_length * masked_lm_prob)),
        masked_lm_prob=masked_lm_prob,
        short_seq_prob=short_seq_prob,
        dupe_factor=dupe_factor,
        random_seed=seed,
    )
    job = pipeline.InstanceJob(tuple(inputs), vocab, out, options, not cased)
    manifest = pipeline.prepare_instances(job, workers=_workers(workers), progress=_say)
    _say(f"{out}: {manifest.num_sequences:,} instances, {manifest.num_tokens:,} tokens")


@app.command("digest")
def digest_command(paths: Annotated[list[Path], typer.Argument(help="Prepared set or one of its shards.")]) -> None:
    """Print shard, number of instances and sha256 of their padded features."""
    for path in paths:
        for name, count, sha256 in pipeline.set_digests(path):
            typer.echo(f"{sha256}  {name}  {count}")
