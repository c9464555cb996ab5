"""``mlbert prepare tokens``: text of any size to sets of token ids, for training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, ShareArguments, say, with_options
from mlbert.cli.prepare.tokenizer import MODERNBERT_LENGTH, Texts
from mlbert.cli.text_options import Column, Encoding, HeldOut, SkipBad
from mlbert.data.formats.manifest import MAX_TOKENS
from mlbert.data.formats.tokenizer import check_for_masking, load_tokenizer
from mlbert.data.prepare.corpus_files import (
    CorpusSource,
    check_encoding,
    find_sources,
    format_counts,
)
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.languages import check_languages, language_words
from mlbert.data.prepare.readable_sources import readable_sources
from mlbert.data.prepare.text_measures import script_words
from mlbert.data.prepare.token_plan import SetPlan, plan_tokens
from mlbert.data.prepare.token_set import (
    TRAIN,
    VAL,
    PreparedTokens,
    SourceSummary,
    TokenRequest,
    prepare_tokens,
)
from mlbert.data.prepare.tokenizer_text import source_names
from mlbert.host.console import console, new_table, safe, short_duration, write_page
from mlbert.host.errors import UserError
from mlbert.host.packages import import_sibling
from mlbert.host.texts import counted, parse_number
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE

LEAST_LENGTH = 16  # tokens
REPORT = "report.html"
_LANGUAGES = "languages"  # a column of the page
_REPORT_PAGES = "mlaudit.report.page"
_PROCESS_BYTES = 4 << 20  # of text that are worth starting a process
_SMALL_VOCABULARY = 0.005  # unknown share of the tokens from which the page warns
_FEW_BYTES = 2.5  # of text per token, below which a tokenizer does not know the language
_MUCH = 0.1  # share of documents or lines that the page warns of
app = typer.Typer()


@app.command("tokens")
@with_options()
def tokens_command(
    texts: Texts,
    out: Out,
    run: ShareArguments,
    tokenizer: Annotated[
        Path,
        typer.Option(metavar="DIR", help="A tokenizer.json, a vocab.txt, or its folder."),
    ],
    length: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=LEAST_LENGTH,
            max=MAX_TOKENS,
            help="Maximum tokens per sample; longer documents are split.",
        ),
    ] = MODERNBERT_LENGTH,
    proportions: Annotated[
        str | None,
        typer.Option(
            metavar="P,P,...",
            help="Share of each TEXT in the training data; default: all of each.",
        ),
    ] = None,
    held_out: HeldOut = None,
    column: Column = None,
    encoding: Encoding = None,
    skip_bad: SkipBad = False,
    languages: Annotated[
        bool,
        typer.Option(
            "--languages",
            help="Detect the language of every tenth document (needs the extra languages).",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only process a sample, and estimate time, disk and memory."
        ),
    ] = False,
) -> None:
    """Tokenize text of any size for training: drop duplicates, and split long documents.

    \b
    Examples:
      mlbert prepare tokens texts/ --tokenizer tokenizer/ --out data
      mlbert prepare tokens texts/ --tokenizer tokenizer/ --out data --dry-run
    """
    check_encoding(encoding)
    if languages:
        check_languages()
    others: Counter[str] = Counter()
    sources = find_sources(texts, out, others, column)
    loaded = load_tokenizer(tokenizer)
    check_for_masking(loaded)
    executor = _executor(run, sources)
    readable = readable_sources(sources, encoding, skip_bad, executor.progress)
    evaluated = [] if held_out is None else find_sources([held_out], out, column=column)
    request = TokenRequest(
        sources=_by_name(texts, readable),
        tokenizer=loaded,
        length=length,
        eval_rate=EVAL_MASK_RATE,
        proportions=_proportions(texts, proportions),
        held_out=readable_sources(evaluated, encoding, skip_bad, executor.progress),
        names_languages=languages,
    )
    _check_sources(request)
    say(f"files: {counted(len(readable), 'file')}, {request.num_bytes / 1e6:,.1f} MB")
    if others:
        say(f"not read: {format_counts(others)}")
    if dry_run:
        _print_plan(plan_tokens(request, executor), request)
        return
    prepared = prepare_tokens(request, out, executor)
    if prepared is not None:
        write_page(out / REPORT, _page(prepared, request, out))
        _print(prepared, out)
    _print_settings(request, out)


def _executor(run: ShareArguments, sources: list[CorpusSource]) -> Executor:
    """Return an executor with as many processes as the work can keep busy."""
    executor = run.executor()
    useful = sum(source.num_bytes for source in sources) // _PROCESS_BYTES
    return replace(executor, workers=max(1, min(executor.workers, useful)))


def _by_name(paths: list[Path], sources: list[CorpusSource]) -> Mapping[str, list[CorpusSource]]:
    names = source_names(paths, [source.path for source in sources])
    found: dict[str, list[CorpusSource]] = {}
    for source in sources:
        found.setdefault(names[source.path], []).append(source)
    return found


def _proportions(texts: list[Path], given: str | None) -> dict[str, float]:
    """Return the proportion of each source. Raises UserError if they are not valid."""
    if given is None:
        return {}
    try:
        shares = [parse_number(word, float) for word in given.split(",")]
    except ValueError:
        shares = []
    if len(shares) != len(texts) or len(texts) < 2 or min(shares) <= 0:
        reason = (
            f"{given} does not give a positive number for each of {counted(len(texts), 'TEXT')}"
        )
        remedy = "Give for example --proportions 0.7,0.3 for two of them"
        raise UserError("config.value", "--proportions", reason, remedy)
    return {str(text): share / sum(shares) for text, share in zip(texts, shares, strict=True)}


def _check_sources(request: TokenRequest) -> None:
    """Raise UserError unless each proportion belongs to exactly one source."""
    missing = {*request.proportions} - {*request.sources}
    if missing:
        reason = "has no text of its own"
        remedy = "Give each TEXT of --proportions once, and at most 20"
        raise UserError("config.value", sorted(missing)[0], reason, remedy)


def _print_plan(plan: SetPlan, request: TokenRequest) -> None:
    say(
        f"tried {plan.tried_bytes / 1e6:,.1f} MB: {plan.rate / 1e6:,.2f} MB/s with "
        f"{counted(plan.workers, 'worker')}, {plan.bytes_per_token:.2f} bytes of text per token"
    )
    say(
        f"all {request.num_bytes / 1e9:,.3f} GB: about {short_duration(plan.seconds)}, "
        f"{plan.tokens:,.0f} tokens, {plan.disk / 1e9:,.3f} GB of disk "
        f"(while it runs {plan.peak_disk / 1e9:,.3f} GB), {plan.memory / 1e9:,.2f} GB of memory"
    )
    if plan.is_compressed:
        say("note: some files are compressed, so their size on disk says little")


def _print(prepared: PreparedTokens, out: Path) -> None:
    facts = prepared.facts
    table = new_table(
        "text",
        ["source", "letters"],
        ["documents", "to train on", "tokens", "unknown", "bytes per token"],
    )
    for name, source in prepared.sources.items():
        counts = source.counts
        table.add_row(
            safe(name),
            script_words(counts.scripts),
            f"{counts.documents:,}",
            f"{source.kept:,}",
            f"{source.tokens:,}",
            f"{counts.unknown_share:.2%}",
            f"{counts.bytes_per_token:.2f}",
        )
    console.print(table)
    for name, source in prepared.sources.items():
        if source.counts.languages:
            say(f"{name}: languages of the documents: {language_words(source.counts.languages)}")
    for line in _warnings(prepared):
        say(f"warning: {line}")
    say(
        f"{out}: {facts.train_tokens:,} tokens to train on, {facts.held_out_tokens:,} held out; "
        f"report: {out / REPORT}"
    )


def _warnings(prepared: PreparedTokens) -> list[str]:
    found = []
    for name, source in prepared.sources.items():
        counts = source.counts
        if source.dropped_share > _MUCH:
            dropped = f"{source.dropped_share:.0%} of the documents"
            found.append(f"{name}: {dropped} repeat others or held-out text")
        if counts.repeated_share > _MUCH:
            repeated = f"{counts.repeated_share:.0%} of the lines"
            found.append(f"{name}: {repeated} repeat a line of their document")
        if counts.unknown_share > _SMALL_VOCABULARY:
            unknown = f"{counts.unknown_share:.2%} of the tokens are unknown"
            found.append(f"{name}: {unknown}: use a tokenizer of its language")
        if counts.bytes_per_token < _FEW_BYTES:
            found.append(
                f"{name}: only {counts.bytes_per_token:.1f} bytes of text per token: the "
                "vocabulary is too small, or was made for a different language"
            )
        if counts.markup_share > _MUCH:
            found.append(f"{name}: {counts.markup_share:.0%} of the characters are markup")
    return found


def _print_settings(request: TokenRequest, out: Path) -> None:
    """Print the settings of a system's config that read the set."""
    place = out.resolve()
    folders = request.set_folders
    if request.proportions:
        streams = [
            {"local": str(place / folders[name]), "proportion": share}
            for name, share in request.proportions.items()
        ]
        say(f"export DATA_STREAMS='{json.dumps({'streams': streams})}'")
    first = next(iter(folders.values())) if request.proportions else TRAIN
    say(f"export DATADIR_PHASE2={place / first} EVALDIR={place / VAL} TOKENIZER={place}")


def _page(prepared: PreparedTokens, request: TokenRequest, out: Path) -> str:
    facts = prepared.facts
    header = [
        "source",
        "letters",
        *([_LANGUAGES] if request.names_languages else []),
        "documents",
        "dropped",
        "short documents",
        "cut documents",
        "repeated lines",
        "markup",
        "tokens",
        "unknown",
        "bytes per token",
    ]
    rows = [
        _page_row(name, source, request.names_languages)
        for name, source in prepared.sources.items()
    ]
    values = {
        "tokenizer": f"{request.tokenizer.name}, {request.tokenizer.vocab_size:,} entries",
        "most tokens of a sample": request.length,
        "samples": f"{facts.train_sequences:,}",
        "dropped as near repeats of held-out text": f"{facts.near_repeats:,} tokens",
        "held out": f"{facts.held_out_tokens:,} tokens, {facts.held_out_unknown:.2%} unknown",
    }
    # The page is mlaudit's, which this package does not import: it is looked up by name.
    page: str = import_sibling(_REPORT_PAGES).prepared_text_page(
        out.resolve().name,
        (f"{facts.train_tokens:,}", "tokens to train on"),
        [
            (f"{facts.documents:,}", "documents"),
            (f"{facts.characters:,}", "characters"),
            (f"{facts.held_out_tokens:,}", "tokens held out"),
        ],
        _warnings(prepared),
        header,
        rows,
        values,
    )
    return page


def _page_row(name: str, source: SourceSummary, names_languages: bool) -> list[str]:
    counts = source.counts
    return [
        name,
        script_words(counts.scripts),
        *([language_words(counts.languages)] if names_languages else []),
        f"{counts.documents:,}",
        f"{source.dropped_share:.1%}",
        f"{counts.short_share:.1%}",
        f"{source.cut_share:.1%}",
        f"{counts.repeated_share:.1%}",
        f"{counts.markup_share:.1%}",
        f"{source.tokens:,}",
        f"{counts.unknown_share:.2%}",
        f"{counts.bytes_per_token:.2f}",
    ]
