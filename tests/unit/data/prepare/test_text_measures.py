"""Measures of a document."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from mlbert.data.prepare.text_measures import letters_of


@given(st.text())
@example("Straße, STRASSE: 10 %")
@example("ｆｕｌｌ wide… ½ ² Ⅳ ß İ")
@example("2, 3")
@example("")
def test_letters_are_what_a_regular_expression_finds(text: str) -> None:
    reference = "".join(re.findall(r"[^\W\d_]+", text.casefold())) or text
    assert letters_of(text) == reference.encode()


@given(st.text(st.characters(max_codepoint=127)))
def test_letters_of_ascii(text: str) -> None:
    reference = "".join(re.findall("[a-z]+", text.lower())) or text
    assert letters_of(text) == reference.encode()
