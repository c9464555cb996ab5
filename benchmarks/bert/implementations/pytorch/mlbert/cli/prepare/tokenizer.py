"""``mlbert prepare tokenizer`` and ``words``: a tokenizer of your own text, and words to add to
another one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from mlbert.cli.prepare.options import Out, PoolArguments, say, with_options
from mlbert.cli.text_options import KINDS_OF_TEXT, Column, Encoding, SkipBad
from mlbert.data.formats.manifest import MAX_TOKENS, make_folder
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare.corpus_files import check_encoding, find_sources, format_counts
from mlbert.data.prepare.tokenizer_folder import (
    REPORT,
    TokenizerReport,
    TokenizerRequest,
    make_tokenizer,
)
from mlbert.data.prepare.tokenizer_text import read_text
from mlbert.data.prepare.tokenizer_training import KINDS, check_kind
from mlbert.data.prepare.word_choice import choose_words, write_words
from mlbert.host.console import console, new_table, safe
from mlbert.host.errors import UserError
from mlbert.host.texts import counted

MODERNBERT_SIZE = 50_368  # entries
MODERNBERT_LENGTH = 8192  # tokens
USUAL_SAMPLE = 100_000_000  # characters
LEAST_SAMPLE = 20_000  # characters
USUAL_WORDS = 500
MOST_WORDS = 50_000
_SHOWN = 10  # words

Texts = Annotated[
    list[Path],
    typer.Argument(
        metavar="TEXT",
        help=f"{KINDS_OF_TEXT}.",
    ),
]
Sample = Annotated[
    int, typer.Option(min=LEAST_SAMPLE, metavar="N", help="Characters of the text to use, about.")
]
app = typer.Typer()


@app.command("tokenizer")
@with_options()
def tokenizer_command(
    texts: Texts,
    out: Out,
    run: PoolArguments,
    kind: Annotated[
        str,
        typer.Option(
            metavar="|".join(KINDS),
            help="Byte pairs (ModernBERT), BERT's WordPiece, or SentencePiece's.",
        ),
    ] = "bpe",
    size: Annotated[
        int, typer.Option(metavar="N", help="Size, a multiple of 64; unused entries fill the rest.")
    ] = MODERNBERT_SIZE,
    length: Annotated[
        int, typer.Option(min=2, max=MAX_TOKENS, help="model_max_length, tokens.")
    ] = MODERNBERT_LENGTH,
    sample: Sample = USUAL_SAMPLE,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Another tokenizer to measure; repeatable."),
    ] = None,
    cased: Annotated[
        bool | None,
        typer.Option(
            "--cased/--lower-case",
            help="Keep or remove case and accents (WordPiece only); default: chosen from the text.",
        ),
    ] = None,
    column: Column = None,
    encoding: Encoding = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train a tokenizer on your own text, and measure it on text that is held out.

    \b
    Examples:
      mlbert prepare tokenizer texts/ --out my-tokenizer
      mlbert prepare tokenizer texts/ --kind wordpiece --size 30528 --out words
    """
    check_kind(kind)
    check_encoding(encoding)
    others: Counter[str] = Counter()
    sources = find_sources(texts, out, others, column)
    request = TokenizerRequest(
        paths=texts,
        sources=sources,
        kind=kind,
        size=size,
        length=length,
        sample=sample,
        lower_case=None if cased is None else not cased,
        encoding=encoding,
        skip_bad=skip_bad,
        compared={str(path): load_tokenizer(path) for path in compare or ()},
    )
    report = make_tokenizer(request, out, run.executor())
    if others:
        say(f"not read: {format_counts(others)}")
    _print(report, out)


@app.command("words")
@with_options()
def words_command(
    texts: Texts,
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="Tokenizer, or a model's folder.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="New file, one word per line.")
    ],
    run: PoolArguments,
    number: Annotated[
        int, typer.Option(min=1, max=MOST_WORDS, metavar="N", help="Words to choose.")
    ] = USUAL_WORDS,
    sample: Sample = USUAL_SAMPLE,
    column: Column = None,
    encoding: Encoding = None,
    skip_bad: SkipBad = False,
) -> None:
    """Choose the words of your text that save the most tokens, for `mlbert convert add-words`.

    \b
    Examples:
      mlbert prepare words texts/ --tokenizer model/ --out words.txt
    """
    check_encoding(encoding)
    if out.exists():
        raise UserError("file.exists", out, "already exists", "Name a new one")
    make_folder(out.parent)
    known = load_tokenizer(tokenizer)
    executor = run.executor()
    sources = find_sources(texts, out, column=column)
    text = read_text(texts, sources, sample, encoding, skip_bad, executor.progress)
    chosen = choose_words(known, text, number, executor)
    write_words(chosen, out)
    for one in chosen[:_SHOWN]:
        say(f"{one.word}: {one.num_pieces} tokens, {one.count:,} times")
    say(f"{out}: {counted(len(chosen), 'word')}; read it before you add them")


def _print(report: TokenizerReport, out: Path) -> None:
    say(
        f"trained on {report.trained_characters:,} characters in "
        f"{report.trained_documents:,} documents, of {report.characters:,}"
    )
    if report.skipped:
        say(f"skipped: {', '.join(report.skipped)}")
    if report.decision:
        say(report.decision)
    table = new_table(
        "held-out text",
        ["source", "tokenizer"],
        ["characters", "unknown", "bytes per token", "tokens per word"],
    )
    for name, source in report.sources.items():
        for tokenizer, measures in source.measures.items():
            table.add_row(
                safe(name),
                safe(tokenizer),
                f"{source.held_out_characters:,}",
                f"{measures.unknown_share:.2%}",
                f"{measures.bytes_per_token:.2f}",
                f"{measures.tokens_per_word:.2f}",
            )
    console.print(table)
    say(f"{out}: {report.kind}, {report.entries:,} entries, {report.unused:,} of them unused")
    say(f"all figures: {out / REPORT}")
