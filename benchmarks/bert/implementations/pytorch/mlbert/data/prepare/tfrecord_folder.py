"""A folder of TFRecord files made from text parts, one file for each part, in the order of the parts.

``instances.json`` is written last and says what the folder holds. Until then a note beside each finished file
(``.part-00000-of-00500.tfrecord.json``) says what it was made from, so that an interrupted run goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlbert.data.formats.checksums import CHECKSUMS, file_xxh3, write_checksums
from mlbert.data.formats.manifest import make_folder, write_json
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tfrecord import write_examples
from mlbert.data.formats.tfrecord_list import LIST, RecordList, read_list
from mlbert.host.files import read_plain, write_atomically
from mlbert.host.json_files import parse_json

_FILE_NAME = re.compile(r"\.?part-\d{5}-of-(\d{5})\.tfrecord(\.json)?")


def tfrecord_name(index: int, count: int) -> str:
    """File name of part ``index`` of ``count``."""
    return f"part-{index:05d}-of-{count:05d}.tfrecord"


class TfrecordFolder:
    """Writes one folder of ``num_parts`` files; several processes may each write files of their own."""

    def __init__(self, folder: Path, num_parts: int, max_seq_length: int, max_predictions: int) -> None:
        self.folder = folder
        self.num_parts = num_parts
        self.max_seq_length = max_seq_length
        self.max_predictions = max_predictions
        make_folder(folder)

    def path(self, index: int) -> Path:
        """Final path of part ``index``."""
        return self.folder / tfrecord_name(index, self.num_parts)

    def _note(self, index: int) -> Path:
        return self.folder / f".{tfrecord_name(index, self.num_parts)}.json"

    def clear_leftovers(self) -> None:
        """Remove what an earlier run left: ``instances.json``, temporary files, files of another number of parts."""
        for path in self.folder.iterdir():
            match = _FILE_NAME.fullmatch(path.name)
            of_another_count = match is not None and int(match.group(1)) != self.num_parts
            if path.name in (LIST, CHECKSUMS) or of_another_count or path.name.endswith(".tmp"):
                path.unlink()

    def written(self, index: int, fingerprint: str) -> dict[str, Any] | None:
        """What is known of part ``index`` of the same fingerprint from an earlier, interrupted run."""
        try:
            note = parse_json(read_plain(self._note(index)))
            same = note.pop("fingerprint") == fingerprint and note["xxh3"] == file_xxh3(self.path(index))
        except (ValueError, KeyError, AttributeError, TypeError):  # UserError too
            return None
        return note if same else None

    def write(self, index: int, rows: Ragged, fingerprint: str) -> dict[str, Any]:
        """Write part ``index`` as a whole; returns what ``instances.json`` says of it. Raises UserError: the disk is
        full or the folder not writable; nothing under the final name then."""
        path = self.path(index)
        self._note(index).unlink(missing_ok=True)  # before the file changes: a note is never about another file
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
        """Part ``index`` is bad: nothing of an earlier run must stay in its place."""
        self._note(index).unlink(missing_ok=True)
        self.path(index).unlink(missing_ok=True)

    def finish(
        self, files: Iterable[dict[str, Any]], vocabulary: Mapping[str, Any], provenance: Mapping[str, Any]
    ) -> RecordList:
        """Write ``instances.json`` and the files' checksums, and remove the notes; returns what it says."""
        listed = [dict(file) for file in files]
        checksums = {file["file"]: file.pop("xxh3") for file in listed}
        totals = {key: sum(file[key] for file in listed) for key in ("num_sequences", "num_tokens", "num_masked")}
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
