"""Convert TFRecord files to a prepared set, one shard per file, and back;
write folders of TFRecord files.

Both conversions resume an interrupted run: files are written atomically,
and those made from the same input are kept.

`TfrecordFolder` writes ``instances.json``, the list of the folder's files, last. Until then a note
next to each finished file (``.part-00000-of-00500.tfrecord.json``) records what it was made from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlbert.data.formats.checksums import (
    CHECKSUMS,
    check_listed,
    file_xxh3,
    remove_unfinished,
    write_checksums,
)
from mlbert.data.formats.index_cache import state_of
from mlbert.data.formats.manifest import (
    Manifest,
    make_folder,
    read_manifest,
    vocabulary_sha256,
    write_json,
)
from mlbert.data.formats.prepared import ShardEntry, ShardWriter, verified_shard
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import (
    ExampleReader,
    Widths,
    find_files,
    read_widths,
    slowness,
    write_examples,
)
from mlbert.data.formats.tfrecord_plain import LIST, RecordList, read_list, unlisted_note
from mlbert.data.formats.vocabulary_checks import another_vocabulary
from mlbert.data.formats.wordpiece import load_vocabulary
from mlbert.data.prepare.code_identity import tool_name
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.finished_output import (
    WORK_FOLDER,
    finished_list,
    finished_manifest,
    keep_apart,
)
from mlbert.data.prepare.import_store import RowsRead, make_shard, remove_records
from mlbert.data.prepare.step_tasks import INPUTS, StepTasks, stamps
from mlbert.host.errors import UserError
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import parse_json

_FILE_NAME = re.compile(r"\.?part-\d{5}-of-(?P<count>\d{5})\.tfrecord(\.json)?")
_SKIP = "Restore the file, or skip bad records with --skip-bad"


def tfrecord_name(index: int, count: int) -> str:
    """Return the file name of part ``index`` of ``count``."""
    return f"part-{index:05d}-of-{count:05d}.tfrecord"


class TfrecordFolder:
    """Writes a folder of ``num_parts`` files; several processes may write different files."""

    def __init__(
        self, folder: Path, num_parts: int, max_seq_length: int, max_predictions: int
    ) -> None:
        self.folder = folder
        self.num_parts = num_parts
        self.max_seq_length = max_seq_length
        self.max_predictions = max_predictions
        make_folder(folder)

    def path(self, index: int) -> Path:
        """Return the final path of part ``index``."""
        return self.folder / tfrecord_name(index, self.num_parts)

    def _note(self, index: int) -> Path:
        return self.folder / f".{tfrecord_name(index, self.num_parts)}.json"

    def refuse_foreign(self) -> None:
        """Raise UserError if the folder holds TFRecords, but no list, checksums or unfinished step
        of ours. Call it before the step is begun.
        """
        if any((self.folder / name).exists() for name in (LIST, CHECKSUMS, WORK_FOLDER)):
            return
        for path in sorted(self.folder.iterdir()):
            if _FILE_NAME.fullmatch(path.name):
                reason = "was not made by this command"
                raise UserError("file.in-the-way", path, reason, "Choose another --out")

    def clear_leftovers(self) -> None:
        """Remove leftovers of an earlier run: ``instances.json``, temporary files,
        and files of another number of parts.
        """
        remove_unfinished(self.folder, LIST, _FILE_NAME, self.num_parts)

    def written(self, index: int, fingerprint: str) -> dict[str, Any] | None:
        """Return the entry of part ``index`` if an interrupted run wrote it with the same
        fingerprint, else None.
        """
        try:
            note = parse_json(read_plain(self._note(index)))
            same = note.pop("fingerprint") == fingerprint and note["xxh3"] == file_xxh3(
                self.path(index)
            )
        except (ValueError, KeyError, AttributeError, TypeError):  # UserError too
            return None
        return note if same else None

    def write(self, index: int, rows: Ragged, fingerprint: str) -> dict[str, Any]:
        """Write part ``index`` atomically; return its entry in ``instances.json``.

        Raises UserError: the disk is full or the folder is not writable;
        then nothing has the final name.
        """
        path = self.path(index)
        # first, so that a note never describes another file.
        self._note(index).unlink(missing_ok=True)
        write_examples(path, rows, self.max_seq_length, self.max_predictions)
        values = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "num_sequences": len(rows),
            "num_tokens": len(rows.tokens),
            "num_masked": len(rows.masked_labels),
            "xxh3": file_xxh3(path),
        }
        write_atomically(self._note(index), json.dumps({"fingerprint": fingerprint, **values}))
        return values

    def leave_out(self, index: int) -> None:
        """Remove part ``index``, which is bad, so
        that no file of an earlier run stays in its place.
        """
        self._note(index).unlink(missing_ok=True)
        self.path(index).unlink(missing_ok=True)

    def finish(
        self,
        files: Iterable[dict[str, Any]],
        vocabulary: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> RecordList:
        """Write ``instances.json`` and the files' checksums, and remove the notes;
        return the list.
        """
        listed = [dict(file) for file in files]
        checksums = {file["file"]: file.pop("xxh3") for file in listed}
        totals = {
            key: sum(file[key] for file in listed)
            for key in ("num_sequences", "num_tokens", "num_masked")
        }
        document = {
            "format": "tfrecord",
            "vocabulary": dict(vocabulary),
            "max_seq_length": self.max_seq_length,
            "max_predictions": self.max_predictions,
            **totals,
            "files": listed,
            "provenance": dict(provenance),
        }
        write_checksums(self.folder, checksums)
        write_json(self.folder / LIST, document)
        for index in range(self.num_parts):
            self._note(index).unlink(missing_ok=True)
        made = read_list(self.folder)
        assert made is not None, "it was written"
        return made


def input_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the TFRecord files of the given files and folders, in order.

    Raises UserError: one is missing or given twice, or a folder has no TFRecords.
    """
    files = [file for path in inputs for file in find_files(path)]
    seen: set[Path] = set()
    for file in files:
        if not file.is_file():
            raise UserError(
                "file.missing",
                file,
                "there is no such file",
                "Give TFRecord files or a folder of them",
            )
        if file.resolve() in seen:
            raise UserError("config.duplicate", file, "is given twice", "Give each file once")
        seen.add(file.resolve())
    return files


@dataclass(frozen=True)
class TFRecordImportJob:
    """TFRecord files to convert to one prepared set."""

    files: tuple[Path, ...]
    out: Path
    vocab_file: Path
    widths: Widths
    vocab_size: int
    fingerprints: tuple[str, ...]
    skip_bad: bool

    def make_shard(self, index: int) -> tuple[ShardEntry, list[str]]:
        """Make one shard unless an earlier run has done so; also return what was skipped."""
        writer = ShardWriter(self.out, len(self.files), self.fingerprints[index])
        return make_shard(writer, index, self.skip_bad, lambda: self._read(index))

    def _read(self, index: int) -> RowsRead:
        reader = ExampleReader(
            self.files[index],
            widths=self.widths,
            vocab_size=self.vocab_size,
            skip_bad=self.skip_bad,
            remedy=_SKIP,
        )
        rows = Ragged.concatenate([part.rows for part in reader])
        skipped = [str(bad) for bad in reader.bad]
        return rows, None, skipped + self._against_list(index, reader.num_records, rows)

    def _against_list(self, index: int, records: int, rows: Ragged) -> list[str]:
        """Return how the file differs from the list next to it; without a list, check by its ids
        that it uses the vocabulary. Raises UserError, unless bad records are skipped.
        """
        path = self.files[index]
        if not self.skip_bad:
            check_listed(path, path.parent)
        listed = read_list(path)
        if listed is None or path.name not in listed.by_name:
            if problem := another_vocabulary(rows, load_vocabulary(self.vocab_file)):
                raise UserError(
                    "vocabulary.mismatch",
                    path,
                    problem,
                    "Give the vocabulary that it was made with",
                )
            return []
        # Unknown if bad records were skipped.
        tokens = len(rows.tokens) if records == len(rows) else None
        problem = listed.count_problem(path, records, tokens)
        if problem and not self.skip_bad:
            raise UserError("data.incomplete", path, problem, _SKIP)
        return [problem] if problem else []


def _check_lists(files: Sequence[Path], vocab_file: Path) -> bool | None:
    """Compare the vocabulary in the lists next to the files, and return their ``lower_case`` if all
    have the same. Raises UserError: it is not the given one.
    """
    sha256 = vocabulary_sha256(vocab_file)
    cases = set[bool | None]()
    for folder in dict.fromkeys(file.parent for file in files):
        listed = read_list(folder)
        if listed and listed.vocabulary_sha256 != sha256:
            reason = (
                f"is not the vocabulary that {folder} was prepared with (sha256 {sha256[:12]}...)"
            )
            remedy = f"Use the one with sha256 {listed.vocabulary_sha256[:12]}..."
            raise UserError("vocabulary.mismatch", vocab_file, reason, remedy)
        cases.add(listed.lower_case if listed else None)
    return cases.pop() if len(cases) == 1 else None


def tfrecords_to_hdf5(
    inputs: Sequence[Path],
    vocab_file: Path,
    out: Path,
    *,
    skip_bad: bool = False,
    executor: Executor = Executor(),
) -> Manifest:
    """Convert TFRecord files and folders of them to a prepared set; ``max_seq_length`` and
    ``max_predictions`` are those of the records. Ids outside the vocabulary are errors. With
    ``skip_bad``, bad records are skipped and listed in the manifest's provenance.

    Raises UserError: a bad file or record; records of different widths, or other records than
    listed; another vocabulary; ``out`` was finished with other input.
    """
    files = input_files(inputs)
    keep_apart(out, [*inputs, *files])
    lower_case = _check_lists(files, vocab_file)
    vocabulary: dict[str, Any] = {
        "sha256": vocabulary_sha256(vocab_file),
        "size": len(load_vocabulary(vocab_file)),
    }
    named = [[file.name, *state_of(file)] for file in files]
    options: dict[str, Any] = {
        "inputs": named,
        "vocabulary": vocabulary["sha256"],
        "skip_bad": skip_bad,
    }
    if found := finished_manifest(out, options, executor.progress):
        return found
    for reason in (slowness(), *map(unlisted_note, dict.fromkeys(file.parent for file in files))):
        if reason:
            executor.progress(reason)
    job = TFRecordImportJob(
        files=tuple(files),
        out=out,
        vocab_file=vocab_file,
        widths=_common_widths(files, vocabulary["size"], skip_bad),
        vocab_size=vocabulary["size"],
        fingerprints=tuple(json.dumps([*name, vocabulary["sha256"], skip_bad]) for name in named),
        skip_bad=skip_bad,
    )
    writer = ShardWriter(out, len(files), "")
    tasks = StepTasks(out, {**options, INPUTS: stamps(files)}, executor)
    if executor.share.merges:
        writer.clear_leftovers()
    results = tasks.run(
        "TFRecords to HDF5",
        job.make_shard,
        range(len(files)),
        [file.stat().st_size for file in files],
    )
    skipped = {str(file): lines for file, (_, lines) in zip(files, results, strict=True) if lines}
    manifest = writer.finish(
        vocabulary=vocabulary,
        max_seq_length=job.widths.max_seq_length,
        max_predictions=job.widths.max_predictions,
        provenance={
            "tool": tool_name(),
            "options": options,
            "skipped": skipped,
            "lower_case": lower_case,
        },
        entries=[entry for entry, _ in results],
    )
    remove_records(out)
    tasks.finish()
    return manifest


def _common_widths(files: Sequence[Path], vocab_size: int, skip_bad: bool) -> Widths:
    """Return the widths of the first record of every file,
    to find a mismatch before hours of work.
    """
    first = read_widths(files[0], vocab_size=vocab_size, skip_bad=skip_bad, remedy=_SKIP)
    for file in files[1:]:
        widths = read_widths(file, vocab_size=vocab_size, skip_bad=skip_bad, remedy=_SKIP)
        if widths != first:
            reason = (
                f"its records have {widths.max_seq_length} tokens "
                f"and {widths.max_predictions} predictions, "
            )
            reason += (
                f"but those of {files[0].name} have "
                f"{first.max_seq_length} and {first.max_predictions}"
            )
            raise UserError("data.mixed", file, reason, "Prepare them as separate sets")
    return first


def _export_shard(manifest: Manifest, folder: TfrecordFolder, index: int) -> dict[str, Any]:
    """Write a shard as a TFRecord file unless an earlier run has done so; return its list entry."""
    fingerprint = f"{manifest.sha256} {manifest.shards[index].file}"
    done = folder.written(index, fingerprint)
    return done or folder.write(index, verified_shard(manifest, index).rows, fingerprint)


def hdf5_to_tfrecords(folder: Path, out: Path, *, executor: Executor = Executor()) -> RecordList:
    """Write every shard of a prepared set as a TFRecord file, byte for byte like the benchmark's
    generator; a packed set is written as sequences in the order of its packs. Returns the finished
    folder's list: files and totals.

    Raises UserError: a bad set; ``out`` was finished with another one; the disk is full.
    """
    keep_apart(out, [folder])
    manifest = read_manifest(folder)
    options = {"source": manifest.sha256}
    if found := finished_list(out, options, executor.progress):
        return found
    if reason := slowness():
        executor.progress(reason)
    records = TfrecordFolder(
        out, len(manifest.shards), manifest.max_seq_length, manifest.max_predictions
    )
    records.refuse_foreign()
    tasks = StepTasks(out, options, executor)
    if executor.share.merges:
        records.clear_leftovers()
    sizes = [shard.bytes for shard in manifest.shards]
    export = partial(_export_shard, manifest, records)
    files = tasks.run("HDF5 to TFRecords", export, range(len(sizes)), sizes)
    vocabulary: dict[str, Any] = {"sha256": manifest.vocabulary_sha256, "size": manifest.vocab_size}
    provenance = {"tool": tool_name(), "options": options, "lower_case": manifest.lower_case}
    made = records.finish(files, vocabulary, provenance)
    tasks.finish()
    return made
