"""Documentation becomes English sentences, without code, tables and mark-up."""

from mlbert.data.prepare import prose
from mlbert.data.prepare.prose import prose_sentences

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
        "The text is cut wherever separator occurs; "
        "see re.split for a well-known way to use patterns.",
        "Options that matter most to users:",
        "keep empty parts in the result of the call",
        "drop all white space around each of them",
        "The largest number of parts that the result may have.",
    ]
    # A literal block ends where its indent ends.
    assert prose.paragraphs("See::\n\n    code\n    more\n\nText again.") == [
        "See::",
        "Text again.",
    ]
    for marked, expected in (
        ("Use **bold** and *soft* words, 2*3*4.", "Use bold and soft words, 2*3*4."),
        (
            "See `the manual <https://example.org>`_ or https://example.org/x now",
            "See the manual or now",
        ),
        ("len(x) -> int: Return the number of items in it.", "Return the number of items in it."),
    ):
        assert prose.plain(marked).split() == expected.split()
    for other in (
        "x = foo(a, b)[1:2] + {}",
        "Too short",
        "0x00 0x01 0x02 0x03 table of the values",
    ):
        assert not prose.is_prose(other)
