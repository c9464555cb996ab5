"""From documents to a finished data folder: text, vocabulary, training and evaluation sets, baselines.

Every step writes what it makes under a temporary name first; ``prepared.json`` comes last. Started again after an
interruption, the pipeline makes the same files; started again on a finished folder with the same options, it does
nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from mlbert.core.errors import UserError
from mlbert.data.manifest import MANIFEST, Manifest, file_sha256, read_manifest, write_atomically
from mlbert.data.ragged import Ragged
from mlbert.data.shards import ShardSet, ShardWriter, map_shard
from mlbert.prepare import corpus as corpora
from mlbert.prepare.baselines import baselines
from mlbert.prepare.instances import InstanceOptions, create_instances, digest, read_documents
from mlbert.prepare.vocab import check_vocab_size, count_words, train_vocabulary
from mlbert.prepare.wordpiece import WordPieceTokenizer, load_vocabulary

FINISHED = "prepared.json"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TextOptions:
    """Options of a preparation from text.

    Attributes:
        vocab_size: entries of the vocabulary to train.
        lower_case: the uncased form.
        eval_share: part of the documents held out.
        eval_sequences: evaluation sequences wanted; fewer when the text does not give so many.
        split_seed: choice of the held-out documents.
        num_parts: training text parts, one shard each.
        max_document_sentences: longer documents are cut into pieces.
        instances: options of the generator.
    """

    instances: InstanceOptions
    vocab_size: int = 4096
    lower_case: bool = True
    eval_share: float = 0.05
    eval_sequences: int = 2000
    split_seed: int = 0
    num_parts: int = 2
    max_document_sentences: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            raise UserError("--eval-share", f"{self.eval_share} is not between 0 and 1", "Use for example 0.05")
        check_vocab_size(self.vocab_size)
        for name in ("eval_sequences", "num_parts", "max_document_sentences"):
            if getattr(self, name) < 1:
                raise UserError(name, f"{getattr(self, name)} is out of range", "Use 1 or more")


def tool_version() -> str:
    """Version of this package, as stored in manifests."""
    try:
        return version("mlbert")
    except PackageNotFoundError:
        return "unknown"


def is_finished(out: Path, options: dict[str, Any]) -> bool:
    """Whether ``out`` was finished with the same options.

    Raises:
        UserError: it was finished with other options: nothing is overwritten.
    """
    path = out / FINISHED
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_bytes())["options"]
    except (ValueError, KeyError, OSError):
        raise UserError(path, "is damaged", "Remove the folder and prepare again") from None
    if found != json.loads(json.dumps(options)):
        different = sorted(key for key in {*found, *options} if found.get(key) != options.get(key))
        reason = f"was prepared with other options ({', '.join(different)})"
        raise UserError(out, reason, "Choose another --out, or remove the folder")
    return True


def prepare_text(
    documents: Iterable[list[str]],
    out: Path,
    options: TextOptions,
    source: dict[str, Any],
    *,
    workers: int = 1,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Make a data folder from documents of sentences.

    Args:
        documents: read once, only when the folder is not finished yet.
        out: made when missing: vocab.txt, text/, train/, eval/, baselines.json, prepared.json.
        options: what to make.
        source: what the documents are, stored and compared on a rerun.
        workers: processes for the training parts; the result does not depend on it.
        progress: called with one line for each step.

    Returns:
        What ``prepared.json`` holds.
    """
    wanted = {"source": source, **asdict(options)}
    if is_finished(out, wanted):
        progress(f"{out} is finished with these options: nothing to do")
        return json.loads((out / FINISHED).read_bytes())
    started = time.monotonic()
    try:
        (out / "text").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(out, f"cannot be made ({error.strerror})", "Choose another output folder") from None

    corpus = corpora.split(
        documents, options.eval_share, options.split_seed, max_sentences=options.max_document_sentences
    )
    counts = corpus.summary()
    progress("text: " + ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in counts.items()))
    parts = _write_parts(out / "text", corpus, options.num_parts)
    vocab_file = _make_vocabulary(corpus, out, options, progress)
    provenance = {"tool": f"mlbert {tool_version()}", "options": wanted}
    job = InstanceJob(tuple(parts), vocab_file, out / "train", options.instances, options.lower_case)
    train = make_instances(job, provenance, workers=workers)
    progress(f"train: {train.num_sequences:,} sequences, {train.num_tokens:,} tokens")
    evaluation = _make_evaluation(out, vocab_file, options, provenance)
    progress(f"eval: {evaluation.num_sequences:,} sequences, {evaluation.num_masked:,} masked tokens")
    guesses = _write_baselines(out, parts, vocab_file, options.lower_case)
    summary = {
        "options": wanted,
        "text": counts,
        "baselines": guesses,
        "train_sequences": train.num_sequences,
        "eval_sequences": evaluation.num_sequences,
        "vocab_size": train.vocab_size,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_atomically(out / FINISHED, (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _make_vocabulary(corpus: corpora.Corpus, out: Path, options: TextOptions, progress: Progress) -> Path:
    words = count_words((text for document in corpus.train for text in document), options.lower_case)
    entries = train_vocabulary(words, options.vocab_size)
    path = out / "vocab.txt"
    write_atomically(path, ("\n".join(entries) + "\n").encode("utf-8"))
    progress(f"vocabulary: {len(entries):,} entries")
    return path


def _write_parts(folder: Path, corpus: corpora.Corpus, num_parts: int) -> list[Path]:
    if len(corpus.train) < num_parts:
        reason = f"{len(corpus.train)} training documents cannot fill {num_parts} parts"
        raise UserError("--parts", reason, "Use fewer parts or more text")
    for leftover in folder.glob("train-?????-of-?????.txt"):
        leftover.unlink()  # of an interrupted run, perhaps with another number of parts
    parts = []
    for part in range(num_parts):
        path = folder / f"train-{part:05d}-of-{num_parts:05d}.txt"
        corpora.write_text(path, corpus.train[part::num_parts])
        parts.append(path)
    corpora.write_text(folder / "eval.txt", corpus.evaluation)
    return parts


@dataclass(frozen=True)
class InstanceJob:
    """Text parts to turn into one prepared set, one shard for each part."""

    parts: tuple[Path, ...]
    vocab_file: Path
    out: Path
    options: InstanceOptions
    lower_case: bool = True

    def fingerprint(self, index: int) -> str:
        """Names input, vocabulary and options of one shard."""
        named = [
            _input_sha256(self.parts[index]),
            _input_sha256(self.vocab_file),
            asdict(self.options),
            self.lower_case,
        ]
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    def make_shard(self, index: int) -> str:
        """Make one shard unless an earlier run did; returns a line for the progress report."""
        writer = ShardWriter(self.out, len(self.parts), self.fingerprint(index))
        name = self.parts[index].name
        if writer.is_written(index):
            return f"{name}: kept from an earlier run"
        tokenizer = WordPieceTokenizer(load_vocabulary(self.vocab_file), self.lower_case)
        documents = read_documents(self.parts[index], tokenizer)
        rows = Ragged.from_rows(create_instances(documents, tokenizer, self.options))
        writer.write_shard(index, rows)
        return f"{name}: {len(rows):,} instances"


def _input_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", "Check the path and its permissions") from None


def make_instances(
    job: InstanceJob, provenance: dict[str, Any], *, workers: int = 1, progress: Progress = lambda text: None
) -> Manifest:
    """Make a prepared set; finished shards of an interrupted run are kept.

    Raises:
        UserError: a part or the vocabulary is bad, or the output folder cannot be written.
    """
    vocabulary = load_vocabulary(job.vocab_file)
    writer = ShardWriter(job.out, len(job.parts), "")
    writer.clear_leftovers()
    indices = range(len(job.parts))
    if workers > 1 and len(job.parts) > 1:
        try:
            with ProcessPoolExecutor(min(workers, len(job.parts))) as pool:
                for line in pool.map(job.make_shard, indices):
                    progress(line)
        except BrokenProcessPool:
            reason = "a worker process was killed, perhaps for want of memory"
            raise UserError(job.out, reason, "Use fewer --workers; finished parts are kept") from None
    else:
        for index in indices:
            progress(job.make_shard(index))
    return writer.finish(
        vocabulary={"sha256": file_sha256(job.vocab_file), "size": len(vocabulary)},
        max_seq_length=job.options.max_seq_length,
        max_predictions=job.options.max_predictions_per_seq,
        provenance=provenance,
    )


def prepare_instances(job: InstanceJob, *, workers: int = 1, progress: Progress = lambda text: None) -> Manifest:
    """`make_instances` as a step of its own: does nothing when ``job.out`` is finished with the same input and options.

    Raises:
        UserError: also when ``job.out`` was finished with other ones: nothing is overwritten.
    """
    inputs = [job.fingerprint(index) for index in range(len(job.parts))]
    options = {"inputs": inputs, "lower_case": job.lower_case, **asdict(job.options)}
    if (job.out / MANIFEST).exists():
        found = read_manifest(job.out)
        if found.provenance.get("options") != options:
            raise UserError(job.out, "was prepared with other input or options", "Choose another --out, or remove it")
        progress(f"{job.out} is finished with these options: nothing to do")
        return found
    provenance = {"tool": f"mlbert {tool_version()}", "options": options}
    return make_instances(job, provenance, workers=workers, progress=progress)


def _make_evaluation(out: Path, vocab_file: Path, options: TextOptions, provenance: dict[str, Any]) -> Manifest:
    """Static masking once, then ``eval_sequences`` examples evenly picked, as the benchmark picks its 10,000."""
    vocabulary = load_vocabulary(vocab_file)
    tokenizer = WordPieceTokenizer(vocabulary, options.lower_case)
    documents = read_documents(out / "text" / "eval.txt", tokenizer)
    rows = Ragged.from_rows(create_instances(documents, tokenizer, replace(options.instances, dupe_factor=10)))
    wanted = min(options.eval_sequences, len(rows))
    writer = ShardWriter(out / "eval", 1, "")
    writer.clear_leftovers()
    writer.write_shard(0, rows.take(pick_evenly(len(rows), wanted)))
    return writer.finish(
        vocabulary={"sha256": file_sha256(vocab_file), "size": len(vocabulary)},
        max_seq_length=options.instances.max_seq_length,
        max_predictions=options.instances.max_predictions_per_seq,
        provenance=provenance,
    )


def pick_evenly(available: int, wanted: int) -> np.ndarray:
    """int64 [wanted]: the benchmark's rule, example int(i * available / wanted)."""
    return np.asarray([int(i * available / wanted) for i in range(wanted)], np.int64)


def _write_baselines(out: Path, parts: list[Path], vocab_file: Path, lower_case: bool) -> dict[str, Any]:
    vocabulary = load_vocabulary(vocab_file)
    tokenizer = WordPieceTokenizer(vocabulary, lower_case)
    documents = [document for part in parts for document in read_documents(part, tokenizer)]
    (rows,) = ShardSet.open(out / "eval")
    result = baselines(documents, rows, len(vocabulary))
    entries = {number: entry for entry, number in vocabulary.items()}
    result["most_frequent_token"] = entries[int(result.pop("most_frequent_id"))]
    write_atomically(out / "baselines.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def set_digests(path: Path) -> list[tuple[str, int, str]]:
    """(shard, instances, digest) of each shard of a prepared set, or of one shard file.

    The digest is the sha256 over the padded features in the benchmark's form, see `mlbert.prepare.instances.digest`.
    A single shard file takes the limits from the manifest beside it.
    """
    folder = path if path.is_dir() else path.parent
    rows = ShardSet.open(folder)
    manifest = rows.manifest
    names = [str(shard["file"]) for shard in manifest.shards]
    chosen = names if path.is_dir() else [path.name]
    if not set(chosen) <= set(names):
        raise UserError(path, f"is no shard of {folder / MANIFEST}")
    result = []
    for name in chosen:
        shard = map_shard(folder / name)
        result.append((name, len(shard), digest(shard, manifest.max_seq_length, manifest.max_predictions)))
    return result
