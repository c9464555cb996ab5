"""Prepare a complete data folder from documents: text, vocabulary,
training and evaluation sets, and baselines.

Every step writes its files under a temporary name first, and ``prepared.json`` is written last.
After an interruption, a rerun produces the same files. On a folder that is finished with the same
options, it does nothing.

The baselines (`mlbert.data.prepare.baselines`) are measured on stored samples like the benchmark's,
where a tenth of the tokens to predict stay visible, which a model can copy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlbert.data.formats.checksums import FileSum
from mlbert.data.formats.manifest import (
    Manifest,
    file_sha256,
    make_folder,
    read_manifest,
    write_json,
)
from mlbert.data.formats.open import check_vocabulary
from mlbert.data.formats.prepared import ShardSet, ShardWriter, info_of
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.data.formats.tokenizer_files import TOKENIZER_CONFIG, VOCAB_FILE
from mlbert.data.formats.wordpiece import (
    load_vocabulary,
)
from mlbert.data.prepare import corpus as corpora
from mlbert.data.prepare.baselines import baselines
from mlbert.data.prepare.code_identity import tool_name
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import is_whole, read_summary, whole_shards
from mlbert.data.prepare.generator import FlatDocuments, Generator, flat, make_generator
from mlbert.data.prepare.instance_set import InstanceJob, make_instances
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.shuffle import pick_evenly
from mlbert.data.prepare.text_parts import inspect_parts
from mlbert.data.prepare.vocabulary_training import check_vocab_size, count_words, train_vocabulary
from mlbert.host.errors import UserError
from mlbert.host.files import remove_leftovers, write_atomically
from mlbert.host.json_files import add_checksum, read_json

FINISHED = "prepared.json"  # written last: options and results
BASELINES = "baselines.json"  # accuracies of guessing without a model
_BEGUN = ".begun"  # marks a folder from the first file until it is finished
_MADE = ("text", "train", "eval", VOCAB_FILE, TOKENIZER_CONFIG, BASELINES)  # before FINISHED
# Largest values of options; the smallest is 1.
_MOST = {"eval_sequences": 10_000_000, "num_parts": 99_999, "max_document_sentences": 1_000_000}


@dataclass(frozen=True)
class TextOptions:
    """Options of a preparation from text."""

    instances: InstanceOptions
    vocab_size: int = 4096  # entries to train
    lower_case: bool = True
    eval_share: float = 0.05  # fraction of the documents held out
    eval_sequences: int = 2000  # at most; fewer if the text is too short
    split_seed: int = 0  # selects the held-out documents
    num_parts: int = 2  # training text parts, one shard each
    max_document_sentences: int = 32  # longer documents are cut into pieces

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            reason = f"{self.eval_share} is not between 0 and 1"
            raise UserError("config.range", "--eval-share", reason, "Use for example 0.05")
        check_vocab_size(self.vocab_size)
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise UserError(
                    "config.range",
                    name,
                    f"{getattr(self, name)} is out of range",
                    f"Use 1 to {most}",
                )


def _finished(out: Path, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a folder that was finished with the same options.

    Raises UserError for other options, so that nothing is overwritten.
    """
    if (summary := read_summary(out / FINISHED)) is None:
        return None
    if (found := summary["options"]) != json.loads(json.dumps(options)):
        different = sorted(key for key in {*found, *options} if found.get(key) != options.get(key))
        reason = f"was prepared with other options ({', '.join(different)})"
        raise UserError(
            "prepare.other-options", out, reason, "Choose another --out, or remove the folder"
        )
    return summary


def _begin(out: Path) -> None:
    """Create and mark the folder.

    Raises UserError if this would replace something that it did not make.
    """
    made = [out / name for name in _MADE if (out / name).exists()]
    if made and not (out / _BEGUN).exists() and not (out / FINISHED).exists():
        reason = "was not made by this command"
        raise UserError("file.in-the-way", made[0], reason, "Choose another --out")
    make_folder(out / "text")
    write_atomically(out / _BEGUN, "")


def prepare_text(
    documents: Iterable[list[str]],
    out: Path,
    options: TextOptions,
    source: dict[str, Any],
    executor: Executor = Executor(),
) -> dict[str, Any]:
    """Make a data folder (vocab.txt, tokenizer_config.json, text/, train/, eval/, baselines.json,
    prepared.json) and return the content of ``prepared.json``. ``documents`` (lists of sentences)
    are read only if the folder is not finished yet. ``source`` identifies them: it is stored, and
    compared on a rerun.
    """
    wanted = {"source": source, **asdict(options)}
    progress = executor.progress
    found = _finished(out, wanted)
    if found and is_whole(out, lambda: _check_sets(out, found), progress):
        return found
    started = time.monotonic()
    _begin(out)
    for folder in (out, out / "text"):
        remove_leftovers(folder)
    with progress.step("reading the text"):
        corpus = corpora.split(
            documents,
            options.eval_share,
            options.split_seed,
            max_sentences=options.max_document_sentences,
        )
    counts = corpus.summary()
    progress(
        f"text: {counts['train_words']:,} words in {counts['train_documents']:,} documents "
        f"to train on, {counts['eval_words']:,} words held out"
    )
    parts = _write_parts(out / "text", corpus, options.num_parts)
    with progress.step("training the vocabulary"):
        vocab_file = _make_vocabulary(corpus, out, options)
    vocabulary = load_vocabulary(vocab_file)
    progress(f"vocabulary: {len(vocabulary):,} entries")
    provenance = {"tool": tool_name(), "options": wanted}
    job = InstanceJob(
        tuple(parts), vocab_file, out / "train", options.instances, options.lower_case
    )
    quiet = Executor(executor.workers)
    with progress.step("making the training samples"):
        train = make_instances(job, inspect_parts(parts, executor=quiet), provenance, quiet)
    progress(f"train: {train.num_sequences:,} sequences, {train.num_tokens:,} tokens")
    generator = make_generator(vocabulary, options.lower_case)
    with progress.step("making the evaluation samples"):
        evaluation = _make_evaluation(out, generator, options, provenance)
    progress(
        f"eval: {evaluation.num_sequences:,} sequences, {evaluation.num_masked:,} masked tokens"
    )
    with progress.step("measuring how often simple guesses are right"):
        guesses = _write_baselines(out, [flat(generator.read(part)) for part in parts], vocabulary)
    summary = {
        "options": wanted,
        "text": counts,
        "baselines": guesses,
        "train_sequences": train.num_sequences,
        "eval_sequences": evaluation.num_sequences,
        "vocab_size": train.vocab_size,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(out / FINISHED, add_checksum(summary))
    (out / _BEGUN).unlink()
    return summary


def _check_sets(out: Path, summary: dict[str, Any]) -> list[FileSum]:
    """Return the checksums of both sets.

    Raises UserError: another file of the finished folder is damaged.
    """
    if lower_cases(out / VOCAB_FILE) != summary["options"]["lower_case"]:
        raise UserError(
            "data.damaged", out / TOKENIZER_CONFIG, "has a different do_lower_case than the sets"
        )
    if read_json(out / BASELINES, "") != summary["baselines"]:
        raise UserError("data.damaged", out / BASELINES, f"differs from {FINISHED}")
    manifests = [read_manifest(out / name) for name in ("train", "eval")]
    for manifest in manifests:
        check_vocabulary(info_of(manifest), out / VOCAB_FILE)
    return whole_shards(*manifests)


def _make_vocabulary(corpus: corpora.Corpus, out: Path, options: TextOptions) -> Path:
    words = count_words(
        (text for document in corpus.train for text in document), options.lower_case
    )
    entries = train_vocabulary(words, options.vocab_size)
    path = out / VOCAB_FILE
    write_atomically(path, "\n".join(entries) + "\n")
    write_json(
        out / TOKENIZER_CONFIG,
        {"tokenizer_class": "BertTokenizer", "do_lower_case": options.lower_case},
    )
    return path


def _write_parts(folder: Path, corpus: corpora.Corpus, num_parts: int) -> list[Path]:
    if len(corpus.train) < num_parts:
        reason = f"{len(corpus.train)} training documents cannot fill {num_parts} parts"
        raise UserError("data.too-small", "--parts", reason, "Use fewer parts or more text")
    for earlier in folder.glob("train-?????-of-?????.txt"):
        earlier.unlink()  # of an interrupted run, perhaps with another number of parts
    parts = []
    for part in range(num_parts):
        path = folder / f"train-{part:05d}-of-{num_parts:05d}.txt"
        corpora.write_text(path, corpus.train[part::num_parts])
        parts.append(path)
    corpora.write_text(folder / "eval.txt", corpus.evaluation)
    return parts


def _make_evaluation(
    out: Path, generator: Generator, options: TextOptions, provenance: dict[str, Any]
) -> Manifest:
    """Mask once, then pick ``eval_sequences`` examples evenly,
    like the benchmark picks its 10,000.
    """
    documents = generator.read(out / "text" / "eval.txt")
    rows = generator.rows(documents, replace(options.instances, dupe_factor=10))
    wanted = min(options.eval_sequences, len(rows))
    writer = ShardWriter(out / "eval", 1, "")
    writer.clear_leftovers()
    writer.write_shard(0, rows.take(pick_evenly(len(rows), wanted)))
    return writer.finish(
        vocabulary={
            "sha256": file_sha256(out / VOCAB_FILE),
            "size": len(generator.tokenizer.vocabulary),
        },
        max_seq_length=options.instances.max_seq_length,
        max_predictions=options.instances.max_predictions_per_seq,
        provenance=provenance,
    )


def _write_baselines(
    out: Path, train: list[FlatDocuments], vocabulary: dict[str, int]
) -> dict[str, Any]:
    (rows,) = ShardSet.open(out / "eval")
    result = baselines(train, rows, len(vocabulary))
    entries = {number: entry for entry, number in vocabulary.items()}
    result["most_frequent_token"] = entries[int(result.pop("most_frequent_id"))]
    write_json(out / BASELINES, result)
    return result
