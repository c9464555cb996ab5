"""Reading long JSON objects item by item: the same values and errors as reading them at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.host import json_stream
from mlbert.host.json_files import parse_json
from mlbert.host.json_stream import Item, parse_long_object

NAMES = st.sampled_from(["shards", "version", "a", "ä", 'quo"te'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
LAYOUTS = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 3]),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    }
)


def read(text: str, block: int = json_stream._BLOCK) -> Any:
    """Return what the text has, with the items in their array again."""
    content = np.frombuffer(text.encode(), np.uint8)
    items = []

    def take(item: Item) -> None:
        assert parse_json(text.encode()[item.start : item.end]) == item.value
        items.append(item.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_BLOCK", block)
        found = parse_long_object(content, "shards", take)
    if isinstance(found, dict) and isinstance(found.get("shards"), list):
        assert found["shards"] == []
        found["shards"] = items
    return found


@given(st.dictionaries(NAMES, VALUES, max_size=5), LAYOUTS, st.integers(1, 40))
def test_equals_reading_at_once(
    document: dict[str, Any], layout: dict[str, Any], block: int
) -> None:
    text = json.dumps(document, **layout)
    assert read(text, block) == parse_json(text)


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_damaged_json_is_refused(document: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(document)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:place] + data.draw(st.sampled_from(["", "}", ",", "\x00", "x"])) + text[place + 1 :]
    )
    try:
        expected = parse_json(damaged)
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            read(damaged, 8)
    else:
        assert read(damaged, 8) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "{} {}",
        '{"shards": [1,]}',
        '{"shards": [1 2]}',
        '{"shards": [], "shards": []}',
        '{"version": NaN}',
        '{"shards": [{"a": 1, "a": 2}]}',
        '{"shards": [' + "[" * 5000 + "]" * 5000 + "]}",
        '{"shards": ["' + "a" * 5000,
        "{1: 2}",
    ],
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read(text, 16)


def test_a_value_is_not_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_MOST_BYTES", 1000)
    assert read(json.dumps({"shards": ["a" * 900] * 5}), 64) == {"shards": ["a" * 900] * 5}
    with pytest.raises(ValueError, match="a value of more than"):
        read(json.dumps({"shards": ["a" * 5000]}), 64)
