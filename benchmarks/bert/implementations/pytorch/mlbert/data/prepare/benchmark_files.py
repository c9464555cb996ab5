"""The list of the benchmark's published files: names, sizes, MD5 sums, addresses (``benchmark_files.json``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbert.host.errors import UserError
from mlbert.host.files import read_plain
from mlbert.host.json_files import parse_json

LIST = Path(__file__).with_name("benchmark_files.json")


@dataclass(frozen=True)
class Entry:
    """One file of the list."""

    name: str  # path below the output folder, and below a mirror
    size: int | None  # bytes; None where only the sum is published
    md5: str  # 32 hexadecimal digits
    group: str  # for ``--only``
    urls: tuple[str, ...]  # where it is published; tried in order
    unpack: str = ""  # folder for the files of an archive, or ""
    checksums: str = ""  # name of a list of sums for the archive's files, or ""
    members: dict[str, tuple[int, str]] = field(default_factory=dict)  # sums known beforehand, name -> (bytes, md5)
    default: bool = True  # fetched when nothing is named


def read_list(path: Path | None = None) -> list[Entry]:
    """The benchmark's list, or another of the same form. Raises UserError: the file cannot be read or has another
    form."""
    path = path or LIST
    content = read_plain(path, "Check --manifest")
    try:
        document = parse_json(content)
        default = document.get("default_groups")
        entries = [_entry(item, default) for item in document["files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "See mlbert/data/prepare/benchmark_files.json for the form"
        raise UserError("file.json", path, f"is no list of files ({error!r})", remedy) from None
    for entry in entries:
        if Path(entry.name).is_absolute() or ".." in Path(entry.name).parts:
            raise UserError(
                "data.damaged", path, f"names a file outside the folder: {entry.name}", "Use relative names"
            )
    return entries


def _entry(item: dict[str, Any], default: list[str] | None) -> Entry:
    return Entry(
        name=str(item["name"]),
        size=None if item.get("bytes") is None else int(item["bytes"]),
        md5=str(item["md5"]),
        group=str(item["group"]),
        urls=tuple(item.get("urls") or ()),
        unpack=str(item.get("unpack", "")),
        checksums=str(item.get("checksums", "")),
        members={name: (int(size), str(md5)) for name, (size, md5) in item.get("members", {}).items()},
        default=default is None or item["group"] in default,
    )


def select(entries: Sequence[Entry], wanted: Sequence[str]) -> list[Entry]:
    """The entries with these names, last parts of names, or groups; without any: those fetched by default.
    Raises UserError: a name is neither."""
    if not wanted:
        return [entry for entry in entries if entry.default]
    for name in wanted:
        if not any(name in _names(entry) for entry in entries):
            known = ", ".join(dict.fromkeys(entry.group for entry in entries))
            raise UserError(
                "config.choice", "--only", f"{name} is neither a file of the list nor a group", f"Groups: {known}"
            )
    return [entry for entry in entries if set(wanted) & _names(entry)]


def _names(entry: Entry) -> set[str]:
    return {entry.name, Path(entry.name).name, entry.group}
