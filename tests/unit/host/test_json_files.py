"""JSON of unknown origin: what is read, and the one line for what is not."""

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_json, read_json
from user_errors import user_error

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
def test_anything_but_an_object_is_one_line(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with user_error("file.json", path):
        read_json(path, "Give another")


PLACES = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(path.name),  # a whole path may be too long
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "2 GB": lambda path: (path.touch(), os.truncate(path, 1 << 31)),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_anything_but_a_regular_file_is_one_line(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json: cannot be read"):
        read_json(tmp_path / "a.json", "Give another")


def test_names_that_no_file_can_have(tmp_path):
    (tmp_path / "file").write_text("{}")
    for name in ("x" * 300, "a\0b", "file/below"):
        with user_error("file.unreadable"):
            read_json(tmp_path / name, "Give another")


NUMBERS = st.integers(-(10**28), 10**28) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
@settings(max_examples=50)
def test_plain_json_comes_back(value):
    assert parse_json(json.dumps(value)) == value


@given(st.binary(max_size=60) | st.text('[]{}",:0123456789.eE+-ntfu \\', max_size=60))
def test_anything_else_is_a_value_error(content):
    line = ""
    try:
        parse_json(content)
    except ValueError as error:
        line = str(error)
    assert len(line) < 400
