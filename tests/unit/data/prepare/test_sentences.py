"""Sentences end where a reader ends them."""

from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.prepare.sentences import split_sentences


def test_sentences_are_split_by_rules():
    for sentences in (
        ["One.", "Two!", "Three?", "Four"],
        ['He said "Stop."', "Then he left."],
        ["Use e.g. Python, i.e. The language."],
        ["Dr. Watson met J. Smith.", "They spoke."],
        ["Version 3.11 is out.", "It is fast."],
        ["1. First point.", "2. Second point."],
        ["It ends...", "Then (it) begins.", "(Really.)"],
        ["stays together. when lower case follows"],
    ):
        assert (
            split_sentences(" ".join(sentences))
            == split_sentences(" \n ".join(sentences))
            == sentences
        )
        assert split_sentences(" ".join(sentences).replace(" ", "\n  ")) == sentences
    assert split_sentences("") == []


@given(st.text(alphabet="aB.!? \n\"')1", max_size=80))
def test_no_word_is_lost(text):
    assert " ".join(split_sentences(text)).split() == text.split()
