"""Train a tokenizer on text, measure it on held-out text, and write it as `transformers` does.

tokenizer.json, tokenizer_config.json   for ``AutoTokenizer.from_pretrained``
tokenizer_report.json                   the text, and the measures for each source
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from mlbert.data.formats.library_tokenizer import BERT_NAMES
from mlbert.data.formats.manifest import make_folder, write_json
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.formats.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_JSON
from mlbert.data.prepare.corpus_files import CorpusSource
from mlbert.data.prepare.executor import Executor, sigterm_raises
from mlbert.data.prepare.tokenizer_report import TokenizerMeasures, measure
from mlbert.data.prepare.tokenizer_text import TextCounts, read_text
from mlbert.data.prepare.tokenizer_training import check_case, check_size, train_tokenizer
from mlbert.host.errors import UserError
from mlbert.host.files import writing

REPORT = "tokenizer_report.json"
OWN_NAME = "new"  # in the report
_SPACE = "Free space or name another place"


@dataclass(frozen=True)
class TokenizerRequest:
    """What to train.

    Attributes:
        paths: files and folders as the user gave them, which name the sources.
        sources: the files in them.
        kind: one of `mlbert.data.prepare.tokenizer_training.KINDS`.
        size: number of entries.
        length: ``model_max_length``, tokens.
        sample: characters to train on, about.
        lower_case: remove case and accents; None decides by the text.
        encoding, skip_bad: of the files that are not UTF-8; leave out files that cannot be read.
        compared: other tokenizers to measure, by name.
    """

    paths: Sequence[Path]
    sources: Sequence[CorpusSource]
    kind: str
    size: int
    length: int
    sample: int
    lower_case: bool | None
    encoding: str | None
    skip_bad: bool
    compared: Mapping[str, Tokenizer]


@dataclass(frozen=True)
class SourceReport:
    """Measures on the held-out text of one source, by the name of the tokenizer."""

    characters: int
    documents: int
    held_out_characters: int
    held_out_documents: int
    measures: dict[str, TokenizerMeasures]


@dataclass(frozen=True)
class TokenizerReport:
    """The content of tokenizer_report.json.

    Attributes:
        kind: of tokenizer.
        entries: of the vocabulary, with unused ones.
        unused: entries that no text has.
        decision: what was decided by the text, in words.
        skipped: files that were left out because they cannot be read.
        characters: of all text.
        trained_characters, trained_documents: the sample, without held-out documents.
        sources: by name.
    """

    kind: str
    entries: int
    unused: int
    decision: str
    skipped: list[str]
    characters: int
    trained_characters: int
    trained_documents: int
    sources: dict[str, SourceReport]


def make_tokenizer(
    request: TokenizerRequest, out: Path, executor: Executor = Executor()
) -> TokenizerReport:
    """Train a tokenizer and write it to a new folder.

    Raises UserError: the folder exists, the size is out of range, text cannot be read, or there is
    too little of it.
    """
    check_size(request.kind, request.size)
    check_case(request.kind, request.lower_case)
    with new_folder(out) as folder:
        text = read_text(
            request.paths,
            request.sources,
            request.sample,
            request.encoding,
            request.skip_bad,
            executor.progress,
        )
        counts = TextCounts()
        trained = train_tokenizer(
            request.kind,
            text.texts(counts, executor.progress),
            request.size,
            request.lower_case,
            executor,
        )
        write_library(trained.library, folder, {"model_max_length": request.length})
        measured = {OWN_NAME: load_tokenizer(folder)}
        for name, tokenizer in request.compared.items():
            measured[f"./{name}" if name == OWN_NAME else name] = tokenizer
        sources = {}
        for name, source in text.groups.items():
            held_out = source.held_out.texts
            measures = {
                other: measure(tokenizer, held_out) for other, tokenizer in measured.items()
            }
            sources[name] = SourceReport(
                characters=source.characters,
                documents=source.documents,
                held_out_characters=source.held_out.characters,
                held_out_documents=len(held_out),
                measures=measures if held_out else {},
            )
        entries = trained.library.get_vocab_size()
        report = TokenizerReport(
            kind=request.kind,
            entries=entries,
            unused=entries - trained.num_learnt,
            decision=trained.decision,
            skipped=[str(path) for path in text.skipped],
            characters=text.characters,
            trained_characters=counts.characters,
            trained_documents=counts.documents,
            sources=sources,
        )
        write_json(folder / REPORT, asdict(report))
    return report


def write_library(library: tokenizers.Tokenizer, folder: Path, values: Mapping[str, Any]) -> None:
    """Write tokenizer.json and a tokenizer_config.json with BERT's special tokens and ``values``.

    Raises OSError.
    """
    (folder / TOKENIZER_JSON).write_text(library.to_str(pretty=True) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **BERT_NAMES,
        **values,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` on exit; if the block raises, remove it.

    Raises UserError: the target exists, unless it is an empty folder, or cannot be written.
    """
    if target.is_symlink() or target.exists():
        is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
        if not is_empty or not target.name:  # the current folder cannot be replaced
            raise UserError("file.exists", target, "already exists", "Name a new one")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    make_folder(partial)
    try:
        with sigterm_raises(), writing(target, _SPACE):
            yield partial
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
