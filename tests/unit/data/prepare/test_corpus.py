"""Training and evaluation text share no document, sentence or near-repeat."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.prepare import corpus
from mlbert.data.prepare.corpus import (
    cut,
    drop_repeats,
    is_held_out,
    prose_sentences,
    split,
    split_sentences,
)
from user_errors import user_error

word = st.sampled_from(
    ["the", "a", "boat", "river", "stone", "lamp", "runs", "near", "far", "old", "new"]
)
sentence = st.lists(word, min_size=3, max_size=9).map(" ".join)
documents = st.lists(st.lists(sentence, min_size=1, max_size=6), max_size=40)
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


def many(count: int) -> list[list[str]]:
    return [
        [f"Document {n} says word{n} number{i} of its{n * i} own{i}." for i in range(4)]
        for n in range(count)
    ]


@given(documents)
@settings(max_examples=30)
def test_no_sentence_twice_and_none_lost(texts):
    kept, dropped = drop_repeats(texts)
    flat = [sentence for document in kept for sentence in document]
    assert len(flat) == len(set(flat))
    assert set(flat) == {sentence for document in texts for sentence in document}
    assert len(flat) + dropped == sum(map(len, texts))
    in_other_form = [["The lamp is lit.", "the LAMP is lit!"], ["(The lamp is lit)"]]
    assert drop_repeats(in_other_form) == ([["The lamp is lit."]], 2)


def test_holding_out_depends_on_text_and_seed_only():
    texts = many(2000)
    held = [is_held_out(text, 0.05, 0) for text in texts]
    assert 60 <= sum(held) <= 140
    assert held == [is_held_out(text, 0.05, 0) for text in texts]
    assert held != [is_held_out(text, 0.05, 1) for text in texts]
    assert split(reversed(texts), 0.05, 0, max_sentences=32).summary()["eval_documents"] == sum(
        held
    )


def test_near_repeats_leave_the_training_side_and_no_side_is_empty():
    texts = many(100)
    (victim, *_) = split(texts, 0.2, 0, max_sentences=32).evaluation
    copy = ["But " + sentence[0].lower() + sentence[1:] for sentence in victim]
    train_with_copy = next(
        [*copy, f"extra {n}"] for n in range(1000) if not is_held_out([*copy, f"extra {n}"], 0.2, 0)
    )
    corpus = split([*texts, train_with_copy], 0.2, 0, max_sentences=32)
    assert corpus.dropped["near_repeats_of_eval"] >= 4
    assert not {sentence for document in corpus.train for sentence in document} & set(copy)
    for few, share in ((many(3), 1e-9), ([], 0.5)):
        with user_error("data.too-small", "input text"):
            split(few, share, 0, max_sentences=32)


@given(st.lists(sentence, min_size=1, max_size=80), st.integers(1, 40))
def test_cut_pieces_are_short_even_and_whole(document, most):
    pieces = cut(document, most)
    assert [sentence for piece in pieces for sentence in piece] == document
    sizes = {len(piece) for piece in pieces}
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


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
    assert corpus.paragraphs("See::\n\n    code\n    more\n\nText again.") == [
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
        assert corpus.plain(marked).split() == expected.split()
    for other in (
        "x = foo(a, b)[1:2] + {}",
        "Too short",
        "0x00 0x01 0x02 0x03 table of the values",
    ):
        assert not corpus.is_prose(other)


def test_a_file_is_a_document(tmp_path):
    (tmp_path / "b.txt").write_text(
        "Second file. With two sentences.\n\nAnd a paragraph\nover two lines."
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes("\ufeffFirst file.\r\nStill the same.".encode())
    (tmp_path / "notes.md").write_text("not read")
    assert list(corpus.documents(tmp_path)) == [
        ["First file.", "Still the same."],
        ["Second file.", "With two sentences.", "And a paragraph over two lines."],
    ]


def test_one_sentence_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("One. still one\ntwo\n\n\nthree\n")
    found = list(corpus.documents(tmp_path, one_per_line=True))
    assert found == [["One. still one", "two"], ["three"]]
    before = corpus.source_name(tmp_path, False)
    corpus.write_text(tmp_path / "a.txt", found)
    assert (tmp_path / "a.txt").read_text() == "One. still one\ntwo\n\nthree\n"
    assert corpus.source_name(tmp_path, False) != before, "it follows the content"


def test_bad_folders(tmp_path):
    for name, content, code, subject in (
        ("a.md", b"text", "data.missing", "."),
        ("a.txt", b"", "data.empty", "."),
        ("b.txt", b" \n\n", "data.empty", "."),
        ("a.txt", b"good\nline\n\xff bad", "data.encoding", "a.txt"),
    ):
        (tmp_path / name).write_bytes(content)
        with user_error(code, tmp_path / subject) as caught:
            list(corpus.documents(tmp_path))
    assert "line 3 " in str(caught.value)
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        with user_error("file.missing", tmp_path / name):
            list(corpus.documents(tmp_path / name))
