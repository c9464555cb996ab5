"""Documents as models: the one line for what is wrong, and any damage is such a line."""

import json
import sys
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from mlbert.host.errors import UserError
from mlbert.host.schema import Count, Document, FileName, Sha256, parse_model, read_model
from programs import run_quietly
from user_errors import user_error


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


WRONG = {
    "missing": '{"share": 0.5}',
    "float for int": '{"size": 1.0}',
    "too small": '{"size": 0}',
    "text for number": '{"size": 1, "share": "0.5"}',
    "choice": '{"size": 1, "kind": "x"}',
    "text for list": '{"size": 1, "words": "a"}',
    "number among text": '{"size": 1, "words": ["a", 2]}',
    "half a character in a key": '{"size": 1, "\\ud800": 1}',
    "unknown key": '{"size": 1, "colour": 1}',
    "misspelt key": '{"sise": 1}',
    "empty list": '{"size": 1, "parts": []}',
    "no object": '{"size": 1, "parts": [3]}',
    "missing within": '{"size": 1, "parts": [{"file": "a", "bytes": 1}, {"file": "a"}]}',
    "wrong within": '{"size": 1, "parts": [{"file": "a", "bytes": 1}, {"file": "a", "bytes": -1}]}',
    "file elsewhere": '{"size": 1, "parts": [{"file": "../a", "bytes": 1}]}',
    "checksum": '{"size": 1, "sums": {"a": "0A"}}',
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_wrong_entry_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with user_error("file.json", tmp_path / "a.json"):
        read_model(Card, tmp_path / "a.json", "Give another")


def test_a_document_comes_back(tmp_path):
    values = {"size": 1, "share": 0.25, "words": ["a"], "parts": [{"file": "a.h5", "bytes": 0, "more": [1]}]}
    (tmp_path / "a.json").write_text(json.dumps(values))
    found = read_model(Card, tmp_path / "a.json", "Give another")
    assert found == Card(size=1, share=0.25, words=["a"], parts=[Part(file="a.h5", bytes=0)])


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "/a", "a\0", "a" * 256])
def test_a_file_name_leads_nowhere_else(name):
    with user_error("file.json", "subject", wording=False):
        parse_model(Part, {"file": name, "bytes": 1}, "subject", "Give another")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*Card.model_fields, "more"]), JUNK)
    | st.builds(lambda part: {"size": 1, "parts": [part]}, st.dictionaries(st.sampled_from(["file", "bytes"]), JUNK))
)
@settings(max_examples=150)
def test_anything_else_is_one_line(values):
    line = "subject: "
    try:
        parse_model(Card, values, "subject", "Give another")
    except UserError as error:
        line = str(error)
    assert line.startswith("subject: ")
    assert len(line.splitlines()) == 1
    assert len(line) < 500


def test_reading_json_does_not_import_pydantic():
    modules = "mlbert.host.native, mlbert.host.provenance, mlbert.host.json_files"
    code = f"import sys, {modules}; sys.exit('pydantic' in sys.modules)"
    assert run_quietly(sys.executable, "-c", code).returncode == 0
