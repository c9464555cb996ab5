"""JSON of unknown origin: what is read, and the one line for what is not."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.core.errors import UserError
from mlbert.core.json_files import parse_json, read_json, read_record
from mlbert.core.setting import Limits

CONTENTS = {
    "empty": b"",
    "NaN": b'{"a": NaN}',
    "infinite": b'{"a": 1e999}',
    "5000 digits": b'{"a": 1' + b"0" * 5000 + b"}",
    "twice": b'{"a": 1, "a": 1}',
    "cut": b'{"a": ',
    "list": b"[1]",
    "100,000 deep": b"[" * 100_000,
    "65 deep": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "Latin-1": b'{"\xe9": 1}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_what_is_no_plain_object_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"^[^ ]*a\.json: .* Give another\.$"):
        read_json(path, "Give another")


def make_socket(path: Path) -> None:
    os.chdir(path.parent)
    socket.socket(socket.AF_UNIX).bind(path.name)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 31)


PLACES = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": make_socket,
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "2 GB": make_large,
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_what_is_no_plain_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json: cannot be read"):
        read_json(tmp_path / "a.json", "Give another")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/below"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path / name, "Give another")


NUMBERS = st.integers(-(10**28), 10**28) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
@settings(max_examples=50)
def test_plain_json_comes_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@given(st.binary(max_size=60) | st.text('[]{}",:0123456789.eE+-ntfu \\', max_size=60))
def test_anything_else_is_a_value_error(content: bytes | str) -> None:
    line = ""
    try:
        parse_json(content)
    except ValueError as error:
        line = str(error)
    assert len(line) < 400


@dataclass
class Card:
    size: Annotated[int, Limits(at_least=1)]
    share: float
    words: list[str] | None = None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"share": 1}', "key 'size' is missing"),
        ('{"size": true, "share": 1}', "size is True, not a whole number"),
        ('{"size": 0, "share": 1}', "size is 0, it must be at least 1"),
        ('{"size": 1, "share": "1"}', "share is '1', not a number"),
        ('{"size": 1, "share": 1, "words": "a"}', "words is 'a', not a list of text or null"),
        ('{"size": 1, "share": 1, "words": ["a", 2]}', "words is ['a', 2], not a list of text or null"),
        ('{"size": 1, "share": 1, "colour": 1}', "unknown key 'colour'"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_record(Card, tmp_path / "a.json", "Give another")
    assert named in str(error.value)


def test_a_record_comes_back(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"size": 1, "share": 1, "words": ["a"]}')
    assert read_record(Card, tmp_path / "a.json", "Give another") == Card(1, 1, ["a"])
