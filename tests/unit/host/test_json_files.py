"""JSON of unknown origin and documents as models: what is read,
and the one line for what is not.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from mlbert.host.errors import UserError
from mlbert.host.json_files import parse_json, read_json
from mlbert.host.schema import Count, Document, FileName, Sha256, parse_model, read_model
from programs import run_quietly
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
PLACES = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(
        path.name
    ),  # a whole path may be too long
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "2 GB": lambda path: (path.touch(), os.truncate(path, 1 << 31)),
}
NUMBERS = st.integers(-(10**28), 10**28) | st.floats(allow_nan=False, allow_infinity=False)
WRONG = {
    "missing": '{"share": 0.5}',
    "float for int": '{"size": 1.0}',
    "text for number": '{"size": 1, "share": "0.5"}',
    "number among text": '{"size": 1, "words": ["a", 2]}',
    "half a character in a key": '{"size": 1, "\\ud800": 1}',
    "unknown key": '{"size": 1, "color": 1}',
    "misspelt key": '{"sise": 1}',
    "empty list": '{"size": 1, "parts": []}',
    "no object": '{"size": 1, "parts": [3]}',
    "missing within": '{"size": 1, "parts": [{"file": "a", "bytes": 1}, {"file": "a"}]}',
    "wrong within": '{"size": 1, "parts": [{"file": "a", "bytes": 1}, {"file": "a", "bytes": -1}]}',
    "file elsewhere": '{"size": 1, "parts": [{"file": "../a", "bytes": 1}]}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_anything_but_an_object_is_one_line(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with user_error("file.json", path):
        read_json(path, "Give a different file")


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_anything_but_a_regular_file_is_one_line(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json: cannot be read"):
        read_json(tmp_path / "a.json", "Give a different file")


def test_names_that_no_file_can_have(tmp_path):
    (tmp_path / "file").write_text("{}")
    for name in ("x" * 300, "a\0b", "file/below"):
        with user_error("file.unreadable"):
            read_json(tmp_path / name, "Give a different file")


def json_values(numbers: st.SearchStrategy, text: st.SearchStrategy[str]) -> st.SearchStrategy:
    leaves = st.none() | st.booleans() | numbers | text
    return st.recursive(
        leaves,
        lambda x: st.lists(x, max_size=3) | st.dictionaries(text, x, max_size=3),
        max_leaves=8,
    )


@given(json_values(NUMBERS, st.text()))
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


class Part(Document):
    file: FileName
    bytes: Count


class Card(Document, extra="forbid"):
    size: Annotated[int, Field(ge=1)]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    kind: Literal["new", "old"] = "new"
    words: list[str] | None = None
    parts: Annotated[list[Part], Field(min_length=1)] | None = None
    sums: dict[str, Sha256] | None = None


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_wrong_entry_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with user_error("file.json", tmp_path / "a.json"):
        read_model(Card, tmp_path / "a.json", "Give a different file")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "/a", "a\0", "a" * 256])
def test_a_file_name_leads_nowhere_else(name):
    with user_error("file.json", "subject", wording=False):
        parse_model(Part, {"file": name, "bytes": 1}, "subject", "Give a different file")


def junk() -> st.SearchStrategy:
    """Return any JSON."""
    return json_values(st.integers() | st.floats(allow_nan=False), st.text(st.characters()))


@given(
    st.dictionaries(st.sampled_from([*Card.model_fields, "more"]), junk())
    | st.builds(
        lambda part: {"size": 1, "parts": [part]},
        st.dictionaries(st.sampled_from(["file", "bytes"]), junk()),
    )
)
@settings(max_examples=150)
def test_any_other_document_is_one_line(values):
    line = "subject: "
    try:
        parse_model(Card, values, "subject", "Give a different file")
    except UserError as error:
        line = str(error)
    assert line.startswith("subject: ")
    assert len(line.splitlines()) == 1
    assert len(line) < 500


def test_reading_json_does_not_import_pydantic():
    modules = "mlbert.host.native, mlbert.host.provenance, mlbert.host.json_files"
    code = f"import sys, {modules}; sys.exit('pydantic' in sys.modules)"
    assert run_quietly(sys.executable, "-c", code).returncode == 0
