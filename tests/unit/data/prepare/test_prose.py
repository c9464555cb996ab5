"""Prose is kept, code and mark-up are not."""

from __future__ import annotations

import pytest

from mlbert.data.prepare.corpus import is_prose, paragraphs, plain, prose_sentences

DOCUMENTATION = """Split a string into parts.

The *text* is cut wherever ``separator`` occurs; see :func:`re.split` for a
well- known way to use patterns. Example::

    >>> split("a b")
    ['a', 'b']

Options that matter most to users:

* keep empty parts in the result of the call
- drop all white space around each of them

:param limit: The largest number of parts that the result may have.

+-----+-----+
| a   | b   |
+-----+-----+
>>> split("")
"""


def test_documentation_becomes_sentences():
    assert prose_sentences(DOCUMENTATION) == [
        "Split a string into parts.",
        "The text is cut wherever separator occurs; see re.split for a well-known way to use patterns.",
        "Options that matter most to users:",
        "keep empty parts in the result of the call",
        "drop all white space around each of them",
        "The largest number of parts that the result may have.",
    ]


def test_a_literal_block_ends_where_its_indent_ends():
    assert paragraphs("See::\n\n    code\n    more\n\nText again.") == ["See::", "Text again."]


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("Use **bold** and *soft* words, 2*3*4.", "Use bold and soft words, 2*3*4."),
        ("See `the manual <https://example.org>`_ or https://example.org/x now", "See the manual  or  now"),
        ("len(x) -> int: Return the number of items in it.", "Return the number of items in it."),
    ],
)
def test_markup_signs_go(marked, expected):
    assert plain(marked).split() == expected.split()


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Return the number of items.", True),
        ("x = foo(a, b)[1:2] + {}", False),
        ("Too short", False),
        ("0x00 0x01 0x02 0x03 table of the values", False),
    ],
)
def test_is_prose(sentence, expected):
    assert is_prose(sentence) is expected
