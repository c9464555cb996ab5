"""Convert text parts to a set of instances: a prepared set,
or TFRecord files like those of the benchmark's generator.

One process reads, generates and writes each part, so its memory depends only on that part. Finished
parts of an interrupted run are kept; the manifest is written last.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlbert.data.formats.manifest import MANIFEST, SetDescription, vocabulary_sha256
from mlbert.data.formats.prepared import ShardEntry, ShardSet, ShardWriter
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.shard_file import map_file
from mlbert.data.formats.tfrecord import ExampleReader, find_files
from mlbert.data.formats.tfrecord_plain import LIST
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.data.formats.tokenizer_files import TOKENIZER_CONFIG
from mlbert.data.formats.vocabulary_checks import WARN_UNKNOWN, keeps_case, unknown_share
from mlbert.data.formats.wordpiece import UNKNOWN, load_vocabulary
from mlbert.data.prepare.code_identity import tool_name
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import finished_list, finished_manifest, keep_apart
from mlbert.data.prepare.generator import Generator, flat, make_generator
from mlbert.data.prepare.instances import InstanceOptions, digest
from mlbert.data.prepare.step_tasks import INPUTS, StepTasks, stamps
from mlbert.data.prepare.text_parts import TextPart, inspect_part, inspect_parts
from mlbert.data.prepare.tfrecords import TfrecordFolder
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.progress import Progress


class SetFormat(StrEnum):
    """Output format: our shards, or the benchmark's files."""

    hdf5 = "hdf5"
    tfrecord = "tfrecord"


@dataclass(frozen=True)
class InstanceJob:
    """Text parts to convert to one set, with one shard or file per part."""

    parts: tuple[Path, ...]
    vocab_file: Path
    out: Path
    options: InstanceOptions
    lower_case: bool = True  # the uncased form
    set_format: SetFormat = SetFormat.hdf5
    skip_bad: bool = False  # skip bad parts instead of stopping with the first error


@dataclass(frozen=True)
class _Outcome:
    """The result of one part; ``entry`` is its entry in the manifest."""

    entry: ShardEntry | dict[str, Any] | None
    kept: bool = False
    problem: UserError | None = None
    single_document: bool = False
    unknown: float = 0.0  # fraction of [UNK]


@dataclass(frozen=True)
class _Work:
    """The job as sent to the worker processes."""

    job: InstanceJob
    parts: tuple[TextPart, ...]
    vocabulary_sha256: str

    def fingerprint(self, index: int) -> str:
        """Return a hash of input, vocabulary and options of one part."""
        named = [
            self.parts[index].sha256,
            self.vocabulary_sha256,
            asdict(self.job.options),
            self.job.lower_case,
        ]
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    def options(self) -> dict[str, Any]:
        """Return the options, JSON-able."""
        job = self.job
        return {"format": str(job.set_format), "lower_case": job.lower_case, **asdict(job.options)}

    def tfrecords(self) -> TfrecordFolder:
        options = self.job.options
        return TfrecordFolder(
            self.job.out, len(self.parts), options.max_seq_length, options.max_predictions_per_seq
        )

    def make_part(self, index: int) -> _Outcome:
        """Make one part's shard or file unless an earlier run has done so."""
        return (
            self._make_tfrecord(index)
            if self.job.set_format == SetFormat.tfrecord
            else self._make_shard(index)
        )

    def _make_shard(self, index: int) -> _Outcome:
        writer = ShardWriter(self.job.out, len(self.parts), self.fingerprint(index))
        # The shard of a bad part is empty. Read such a part again to report what is wrong with it.
        if (
            not self.parts[index].problem
            and writer.is_written(index)
            and len(map_file(writer.path(index)).rows)
        ):
            return _Outcome(writer.entry(index), kept=True)
        rows, outcome = self._rows(index)
        writer.write_shard(index, rows)
        return replace(outcome, entry=writer.entry(index))

    def _make_tfrecord(self, index: int) -> _Outcome:
        folder = self.tfrecords()
        fingerprint = self.fingerprint(index)
        if known := folder.written(index, fingerprint):
            return _Outcome(known, kept=True)
        rows, outcome = self._rows(index)
        if outcome.problem:
            folder.leave_out(index)
            return outcome
        return replace(outcome, entry=folder.write(index, rows, fingerprint))

    def _rows(self, index: int) -> tuple[Ragged, _Outcome]:
        part = self.parts[index]
        generator = _generator(self.job.vocab_file, self.vocabulary_sha256, self.job.lower_case)
        try:
            if part.problem:
                raise part.problem
            documents = generator.read(part.path)
            unknown_id = generator.tokenizer.vocabulary[UNKNOWN]
            name = self.job.vocab_file.name
            unknown = unknown_share(flat(documents).tokens, unknown_id, part.path, name)
        except UserError as error:
            if not self.job.skip_bad:
                raise
            return Ragged.from_rows([]), _Outcome(None, problem=error)
        outcome = _Outcome(None, single_document=len(documents) == 1, unknown=unknown)
        return generator.rows(documents, self.job.options), outcome


@functools.lru_cache(maxsize=1)
def _generator(vocab_file: Path, vocabulary_sha256: str, lower_case: bool) -> Generator:
    """Return the generator, one per process: it caches words from part to part."""
    del vocabulary_sha256  # part of the cache key: the file may change under the same name
    return make_generator(load_vocabulary(vocab_file), lower_case)


def make_instances(
    job: InstanceJob,
    parts: list[TextPart],
    provenance: dict[str, Any],
    executor: Executor = Executor(),
) -> SetDescription:
    """Make a set of the parts from `inspect_parts`, keeping finished ones of an interrupted run.

    ``provenance`` (JSON-serializable) goes into the manifest, with the skipped parts. Raises
    UserError: a part or the vocabulary is bad, or the output folder cannot be written.
    """
    vocabulary = load_vocabulary(job.vocab_file)
    progress = executor.progress
    work = _Work(job, tuple(parts), vocabulary_sha256(job.vocab_file))
    plan = {**work.options(), "skip_bad": job.skip_bad, "vocabulary": work.vocabulary_sha256}
    plan[INPUTS] = stamps([part.path for part in parts])
    to_tfrecords = job.set_format == SetFormat.tfrecord
    if to_tfrecords:
        work.tfrecords().refuse_foreign()
    tasks = StepTasks(job.out, plan, executor)
    writer = ShardWriter(job.out, len(parts), "")
    if executor.share.merges:
        (work.tfrecords() if to_tfrecords else writer).clear_leftovers()
    if _generator(job.vocab_file, work.vocabulary_sha256, job.lower_case).name == "plain":
        progress(
            f"the compiled generator cannot run ({native.status()}): "
            "this takes about fifty times as long"
        )
    _check_case(job)
    if job.lower_case and keeps_case(vocabulary):
        progress(f"warning: {job.vocab_file} has words with capitals, but --cased is not given")
    outcomes = tasks.run(
        "instances", work.make_part, range(len(parts)), [part.num_bytes for part in parts]
    )
    named = {"sha256": work.vocabulary_sha256, "size": len(vocabulary)}
    provenance = {**provenance, "parts": [part.path.name for part in parts]}
    provenance["skipped"] = _report(parts, outcomes, progress)
    if to_tfrecords:
        files = (outcome.entry for outcome in outcomes if isinstance(outcome.entry, dict))
        made: SetDescription = work.tfrecords().finish(files, named, provenance)
    else:
        made = writer.finish(
            vocabulary=named,
            max_seq_length=job.options.max_seq_length,
            max_predictions=job.options.max_predictions_per_seq,
            provenance=provenance,
            entries=[
                outcome.entry for outcome in outcomes if isinstance(outcome.entry, ShardEntry)
            ],
        )
    tasks.finish()
    return made


def _check_case(job: InstanceJob) -> None:
    """Raise UserError if the tokenizer_config.json next to the vocabulary disagrees with the job.

    The set's manifest records the case.
    """
    config = job.vocab_file.with_name(TOKENIZER_CONFIG)
    if config.exists() and lower_cases(job.vocab_file) != job.lower_case:
        given = "is not" if job.lower_case else "is"
        reason = f"has do_lower_case: {str(not job.lower_case).lower()}, but --cased {given} given"
        raise UserError("config.conflict", config, reason)


def _report(
    parts: list[TextPart], outcomes: list[_Outcome], progress: Progress
) -> list[dict[str, str]]:
    """Report what deserves attention; return the skipped parts."""
    kept = sum(outcome.kept for outcome in outcomes)
    if kept:
        progress(f"{kept} of {len(parts)} parts kept from an earlier run")
    for part, outcome in zip(parts, outcomes, strict=True):
        if outcome.single_document:
            progress(
                f"warning: {part.path} is one document (no blank line): "
                "random second sentences come from it too"
            )
        if outcome.unknown > WARN_UNKNOWN:
            progress(
                f"warning: {part.path}: {outcome.unknown:.0%} of its words are not "
                "in the vocabulary"
            )
    bad = [
        (part.path, outcome.problem)
        for part, outcome in zip(parts, outcomes, strict=True)
        if outcome.problem
    ]
    if len(bad) == len(parts):
        raise UserError(
            "data.damaged", "--input", f"none of {len(parts)} parts can be used; {bad[0][1]}"
        )
    if bad:
        progress(f"{len(bad)} of {len(parts)} parts skipped:")
    for _, problem in bad:
        progress(f"  {problem}")
    return [{"part": path.name, "reason": problem.problem} for path, problem in bad]


def prepare_instances(job: InstanceJob, executor: Executor = Executor()) -> SetDescription:
    """Run `make_instances` as a separate step: do nothing if ``job.out`` is finished with the same
    input and options. Raises UserError also if ``job.out`` was finished with others: nothing is
    overwritten.
    """
    keep_apart(job.out, job.parts)
    load_vocabulary(job.vocab_file)
    share = executor.share
    if not share.merges and not any((job.out / name).exists() for name in (MANIFEST, LIST)):
        # Reads its own parts only.
        own = [
            inspect_part(path) if share.has(n) else TextPart(path, 0, "")
            for n, path in enumerate(job.parts)
        ]
        return make_instances(job, own, {}, executor)
    parts = inspect_parts(job.parts, skip_bad=job.skip_bad, executor=executor)
    work = _Work(job, tuple(parts), vocabulary_sha256(job.vocab_file))
    options = {"inputs": [work.fingerprint(index) for index in range(len(parts))], **work.options()}
    if manifest := finished_manifest(job.out, options, executor.progress):
        return manifest
    if records := finished_list(job.out, options, executor.progress):
        return records
    return make_instances(job, parts, {"tool": tool_name(), "options": options}, executor)


def set_digests(path: Path) -> list[tuple[str, int, str]]:
    """Return (file, instances, digest) of each file of a set, or of one file: our shards or
    TFRecords. The digest is the SHA-256 of the padded features in the benchmark's format, see
    `mlbert.data.prepare.instances.digest`. A single shard uses the limits of the manifest next to
    it.
    """
    digests = (
        _shard_digests if (path / MANIFEST).exists() or path.suffix == ".h5" else _tfrecord_digests
    )
    return list(digests(path))


def _tfrecord_digests(path: Path) -> Iterator[tuple[str, int, str]]:
    for file in find_files(path):
        reader = ExampleReader(file)
        rows = Ragged.concatenate([part.rows for part in reader])
        assert reader.widths is not None
        yield file.name, len(rows), digest(rows, *reader.widths)


def _shard_digests(path: Path) -> Iterator[tuple[str, int, str]]:
    folder = path if path.is_dir() else path.parent
    manifest = ShardSet.open(folder).manifest
    names = [shard.file for shard in manifest.shards]
    if path != folder and path.name not in names:
        raise UserError("data.format", path, f"is not a shard of {folder / MANIFEST}")
    if path != folder:
        names = [path.name]
    for name in names:
        shard = map_file(folder / name).rows
        yield name, len(shard), digest(shard, manifest.max_seq_length, manifest.max_predictions)
