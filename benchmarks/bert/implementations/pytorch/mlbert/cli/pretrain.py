"""``mlbert pretrain TEXT... --out DIR``: pre-train a masked-LM model on your own text,
in one command.

If the first argument ends in .yaml or .yml, run MosaicML's ``main.py`` instead
(`mosaic_yaml.commands.main_yaml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from mlbert.cli.text_options import KINDS_OF_TEXT, Column, Encoding, HeldOut, SkipBad
from mlbert.host.errors import UserError, public_names
from mlbert.host.option_checks import check_at_most_one, first_given, refuse_with
from mlbert.host.packages import import_sibling

LEAST_MINUTES = 0.05
MOST_MINUTES = 525_600.0
USUAL_MINUTES = 30.0
MOST_TOKENS = 1e14
YAML_SUFFIXES = (".yaml", ".yml")
YAML_PROGRAM = "mosaic_yaml.commands.main_yaml"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def pretrain(
    texts: Annotated[
        list[Path],
        typer.Argument(
            metavar="TEXT",
            help=f"{KINDS_OF_TEXT}; with --tokens also MDS sets.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; an existing run is resumed.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Total training time; default 30.")] = None,
    hours: Annotated[float | None, typer.Option(help="Total training time in hours.")] = None,
    size: Annotated[
        Literal["auto", "tiny", "small", "medium", "base"],
        typer.Option(help="Model size; auto: chosen from the training time and the text."),
    ] = "auto",
    vocab: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            "--vocab",
            metavar="FILE",
            help="A tokenizer.json, a vocab.txt, or its folder, to use instead of training one.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Entries of a new vocabulary; default: chosen from the model size and the text.",
        ),
    ] = None,
    cased: Annotated[
        bool | None,
        typer.Option(
            "--cased/--lower-case",
            help="Keep or remove case and accents; default: chosen from the text.",
        ),
    ] = None,
    held_out: HeldOut = None,
    column: Column = None,
    encoding: Encoding = None,
    skip_bad: SkipBad = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be read.")
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="MODEL_FOLDER", help="A BERT to start from, with its vocabulary."
        ),
    ] = None,
    grow_from: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_FOLDER",
            help="A smaller model whose weights are tiled into a larger one, of --shape.",
        ),
    ] = None,
    shape: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --grow-from: a bert_config.json or config.json."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Published model to train: modernbert-base, ettin-68m, small, ..."
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="Length of a phase in tokens, such as 30e9; with --preset."),
    ] = None,
    phase: Annotated[
        Literal["stage1", "extend", "decay"],
        typer.Option(help="With --tokens; extend and decay start --from the phase before."),
    ] = "stage1",
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=16, max=32768, help="Tokens of a row; default 1024, then 8192."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS", min=1, max=10**6, help="Rows per step; default: as published."
        ),
    ] = None,
    warmup_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0,
            max=MOST_TOKENS,
            help="Tokens over which the rate rises; default: as published, but at most a tenth.",
        ),
    ] = None,
    mlperf: Annotated[bool, typer.Option("--mlperf", help="Also write an MLPerf log.")] = False,
) -> int:
    """Pre-train a masked-LM model on your own text: prepare it, train, evaluate, export.

    The same command resumes an interrupted run, or extends it with more --minutes or --tokens. With
    --tokens it also trains on many GPUs: mlbert launch local -n 8 pretrain TEXT ..., torchrun or
    srun. With --minutes, it runs as one process. If the first TEXT ends in .yaml, it is a MosaicML
    configuration.

    \b
    Examples:
      mlbert pretrain texts/ --out my-model --minutes 30
      mlbert pretrain rows.csv --text body --dry-run
      mlbert pretrain rows.csv --text body --from my-model/model --out more
      mlbert pretrain texts/ --preset modernbert-base --tokens 30e9 --out base
      mlbert launch local -n 8 pretrain texts/ --preset small --tokens 1e9 --out m
    """
    if texts[0].suffix in YAML_SUFFIXES:
        status: int = import_sibling(YAML_PROGRAM).pretrain(
            texts[0], [str(word) for word in texts[1:]]
        )
        return status
    if out is None and not dry_run:
        raise UserError(
            "config.missing", "--out", "is missing", "Name a folder for the model: --out DIR"
        )
    of_phase = {
        "--preset": preset,
        "--length": length,
        "--batch": batch,
        "--warmup-tokens": warmup_tokens,
        "--phase": None if phase == "stage1" else phase,
    }
    by_clock = {
        "--minutes": minutes,
        "--hours": hours,
        "--size": None if size == "auto" else size,
        "--grow-from": grow_from,
    }
    _check_one_length(tokens, of_phase, by_clock)
    seconds = training_seconds(minutes, hours)
    if (grow_from is None) != (shape is None):
        reason = "--grow-from and --shape go together"
        remedy = "Give the smaller model and the larger model's shape"
        raise UserError("config.missing", "mlbert pretrain", reason, remedy)
    check_at_most_one({"--from": start, "--grow-from": grow_from})
    starts = start is not None or grow_from is not None
    if starts and (vocab is not None or size != "auto"):
        name = "--from" if start is not None else "--grow-from"
        reason = "already sets the vocabulary and the size"
        raise UserError("config.conflict", name, reason, "Remove --tokenizer and --size")
    _check_vocabulary(vocab is None and not starts, cased, vocab_size)
    from mlbert.data.prepare.corpus_files import check_encoding

    check_encoding(encoding)
    from mlbert.programs.custom_corpus import phases, run  # torch takes a second
    from mlbert.programs.custom_corpus.phase_plan import PhaseRequest

    out = out or Path("model")
    asked = run.Asked(
        texts=texts,
        out=out,
        seconds=seconds,
        size=size,
        vocab=vocab,
        vocab_size=vocab_size,
        cased=cased,
        held_out=held_out,
        column=column,
        encoding=encoding,
        skip_bad=skip_bad,
        start=start,
        grow_from=grow_from,
        shape=shape,
        mlperf=mlperf,
        dry_run=dry_run,
    )
    with public_names(run.OPTIONS):
        if tokens is None:
            return run.pretrain(asked)
        request = PhaseRequest(
            preset=preset,
            phase=phase,
            tokens=round(tokens),
            length=length,
            rows=batch,
            warmup_tokens=None if warmup_tokens is None else round(warmup_tokens),
        )
        return phases.pretrain(asked, request)


def _check_one_length(
    tokens: float | None, of_phase: Mapping[str, object], by_clock: Mapping[str, object]
) -> None:
    """Raise UserError unless either the clock or a number of tokens sets the length.

    Args:
        tokens: length of a phase.
        of_phase: options that need it, None if not given.
        by_clock: options that exclude it, None if not given.
    """
    if tokens is None:
        name = first_given(of_phase)
        if name is not None:
            reason = "needs the number of tokens to train on"
            raise UserError("config.missing", name, reason, "Add --tokens, such as 1e9")
        return
    if not 1 <= tokens <= MOST_TOKENS:
        remedy = f"Give 1 to {MOST_TOKENS:g} tokens, such as 30e9"
        raise UserError("config.range", f"--tokens {tokens:g}", "is not a valid length", remedy)
    refuse_with("--tokens", by_clock)


def _check_vocabulary(is_new: bool, cased: bool | None, vocab_size: int | None) -> None:
    for name, value in (("--cased/--lower-case", cased), ("--vocab-size", vocab_size)):
        if value is not None and not is_new:
            remedy = (
                f"Remove {name}; do_lower_case in the tokenizer_config.json next to a vocabulary "
                "sets its case"
            )
            raise UserError("config.conflict", name, "applies only to a new vocabulary", remedy)
    if vocab_size is not None:
        from mlbert.data.prepare.vocabulary_training import check_vocab_size

        check_vocab_size(vocab_size)


def training_seconds(minutes: float | None, hours: float | None) -> float:
    """Return the training time in seconds, or the default.

    Raises UserError if it is out of range.
    """
    check_at_most_one({"--minutes": minutes, "--hours": hours})
    name, value = ("--hours", hours) if hours is not None else ("--minutes", minutes)
    wanted = USUAL_MINUTES if value is None else value * (60.0 if hours is not None else 1.0)
    if not LEAST_MINUTES <= wanted <= MOST_MINUTES:
        remedy = f"Give {LEAST_MINUTES:g} minutes to a year ({MOST_MINUTES:,.0f} minutes)"
        raise UserError("config.range", f"{name} {value:g}", "is not a valid training time", remedy)
    return 60.0 * wanted
