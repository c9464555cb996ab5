"""Sentence splitting by our own rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.prepare.corpus import split_sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("Use e.g. Python, i.e. The language.", ["Use e.g. Python, i.e. The language."]),
        ("Dr. Watson met J. Smith. They spoke.", ["Dr. Watson met J. Smith.", "They spoke."]),
        ("Version 3.11 is out. It is fast.", ["Version 3.11 is out.", "It is fast."]),
        ("1. First point. 2. Second point.", ["1. First point.", "2. Second point."]),
        ("Lines\n  are   joined. \n Yes.", ["Lines are joined.", "Yes."]),
        ("It ends... Then (it) begins. (Really.)", ["It ends...", "Then (it) begins.", "(Really.)"]),
        ("stays together. when lower case follows", ["stays together. when lower case follows"]),
    ],
)
def test_rules(text, expected):
    assert split_sentences(text) == expected


@given(st.text(alphabet="aB.!? \n\"')1", max_size=80))
def test_no_word_is_lost(text):
    assert " ".join(split_sentences(text)).split() == text.split()
