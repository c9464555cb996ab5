"""The compiled generator equals its reference: documents on hard text,
instances for every option.
"""

import gzip
import io
import itertools
import random
import shutil
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats import wordpiece
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer
from mlbert.data.prepare.generator import FlatDocuments, NativeGenerator, PlainGenerator
from mlbert.data.prepare.instances import InstanceOptions, decoded_lines, parse_documents
from stored_sets import assert_same_rows
from user_errors import user_error

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="no gcc on PATH: only the plain generator here"
)

PIECES = [
    *"abcdexyz0179.,-!?#[]'éσς東京ñ",
    "run",
    "mask",
    "##ning",
    "##n",
    "##ing",
    "ab",
    "##bc",
    "#",
    "##",
    "x" * 9,
]
ENTRIES = [
    *SPECIAL_TOKENS,
    *dict.fromkeys([*PIECES, *(f"##{letter}" for letter in "abcdexyz019.σçé")]),
]
VOCABULARY = {entry: number for number, entry in enumerate(ENTRIES)}
# What decides about words, lines and documents: white space that strip,
# split and clean-up see differently.
HARD = (
    " "
    "\t\n\r\n\n\x00\x07\x0b\x0c\x1c\x1d\x1e\x1f\x7f\x85\xa0\xad\u1680\u180e\u200b\u2028\u2029\u3000\ufeff\ufffd"
)
LETTERS = "abcdexyz0179.,-!?#[]'ABZéÉσΣςİıßﬁ東京ñ\u0301\u0378\ue000\U0001f600\U00020000"


TOKENIZERS = (
    [WordPieceTokenizer(VOCABULARY, is_lower) for is_lower in (False, True)]
    if shutil.which("gcc")
    else []
)
# cased, uncased.
GENERATORS = [(NativeGenerator(tokenizer), PlainGenerator(tokenizer)) for tokenizer in TOKENIZERS]
PLANES = [
    (0, 0x3000, 1),
    (0x3000, 0x1_0000, 13),
    *((code, code + 0x1_0000, 41) for code in range(0x1_0000, 0x11_0000, 0x1_0000)),
]
# Lines.
CHOSEN = [
    "",
    "\n",
    "a",
    "a ",
    "a\n",
    "\na",
    " ",
    "a\n\nb",
    "a\n\x0b\nb",
    "a\n\x07\nb",
    "a\n\u3000\u2028\nb",
]


def to_lists(documents: FlatDocuments) -> list[list[list[int]]]:
    """Return the documents as `PlainGenerator` holds them."""
    tokens = documents.tokens.tolist()
    flat = [tokens[begin:end] for begin, end in itertools.pairwise(documents.sentences.tolist())]
    return [flat[begin:end] for begin, end in itertools.pairwise(documents.documents.tolist())]


def both(
    text: str, lower_case: bool, block_bytes: int = wordpiece.BLOCK_BYTES
) -> tuple[list, list]:
    ours, plain = GENERATORS[lower_case]
    data = text.encode()
    part = Path("part")
    lines = list(decoded_lines(part, io.BytesIO(data)))
    with mock.patch.object(wordpiece, "BLOCK_BYTES", block_bytes):
        found = to_lists(ours.parse(data, part))
    return found, parse_documents(lines, plain.tokenizer)


@settings(max_examples=200)
@given(
    st.text(st.sampled_from(HARD + LETTERS), max_size=80) | st.text(max_size=200),
    st.booleans(),
    st.integers(1, 40) | st.just(wordpiece.BLOCK_BYTES),
)
def test_documents_of_hard_and_of_any_text(text, lower_case, block_bytes):
    ours, plain = both(text, lower_case, block_bytes)
    assert ours == plain


@pytest.mark.parametrize("lower_case", [True, False])
@pytest.mark.parametrize(
    ("first", "end", "step"), [*PLANES, pytest.param(0x3000, 0x1_0000, 1, marks=pytest.mark.slow)]
)
def test_every_character(first, end, step, lower_case):
    """Alone in a line, at the edge of a word, inside one."""
    chars = [chr(code) for code in range(first, end, step) if not 0xD800 <= code < 0xE000]
    ours, plain = both("".join(f"{char}\na{char} x{char}y\n" for char in chars), lower_case)
    assert ours == plain


CHOSEN += ["a\r\n\r\nb\r", "a\rb\r\r\nc", "\r", "a\n\r", "a" * 5000 + ".b", "\x07" * 300]
CHOSEN += [letter * count for letter in "azé" for count in (199, 200, 201)]
CHOSEN += [
    "runningmask",
    "run&ning",
    "[MASK]",
    "abc",
    "abq",
    "#",
    "##",
    "###a",
    "a\x00b\x1fc",
    "a\u0085b",
    ".",
]


@pytest.mark.parametrize("lower_case", [True, False])
def test_chosen_text(lower_case):
    for text in CHOSEN:
        ours, plain = both(text, lower_case)
        assert ours == plain, text


def test_known_chunks_are_forgotten_when_they_take_too_much(monkeypatch):
    rng = random.Random(0)
    text = "\n".join(
        " ".join("".join(rng.choices(LETTERS, k=6)) for _ in range(8)) for _ in range(300)
    )
    expected, plain = both(text, True)
    monkeypatch.setattr(wordpiece, "MAX_REMEMBERED_BYTES", 0)
    assert both(text, True, block_bytes=500)[0] == expected == plain


def random_documents(seed: int, most_documents: int = 12) -> list[list[list[int]]]:
    """Return documents of 1 to 30 sentences of 1 to 60 tokens, often of lengths at a limit."""
    rng = random.Random(seed)
    return [
        [
            [
                rng.randrange(len(SPECIAL_TOKENS), len(VOCABULARY))
                for _ in range(rng.choice((1, 2, 7, 20, 60)))
            ]
            for _ in range(rng.choice((1, 2, 3, 30)))
        ]
        for _ in range(rng.randint(1, most_documents))
    ]


@settings(max_examples=60)
@given(
    seed=st.integers(1 - 2**63, 2**63 - 1),
    max_seq_length=st.one_of(st.integers(5, 40), st.sampled_from([64, 65, 128, 512])),
    max_predictions=st.integers(1, 90),
    masked_lm_prob=st.one_of(
        st.sampled_from([0.15, 0.3, 0.5, 0.025, 0.999]), st.floats(0.001, 0.999)
    ),
    short_seq_prob=st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1)),
    dupe_factor=st.integers(1, 3),
)
def test_instances_for_every_option(seed, max_seq_length, max_predictions, **rest):
    lengths = {
        "max_seq_length": max_seq_length,
        "max_predictions_per_seq": min(max_predictions, max_seq_length),
    }
    options = InstanceOptions(random_seed=seed, **lengths, **rest)
    ours, plain = GENERATORS[True]
    documents = random_documents(seed % 1000)
    flat = FlatDocuments.from_lists(documents)
    assert to_lists(flat) == documents
    assert_same_rows(ours.rows(flat, options), plain.rows(documents, options))


def test_bad_parts_give_the_same_error(tmp_path):
    part = tmp_path / "part"
    empty = (b"", b"\n \n\x0b\n", b"\x07 \x00\n")
    no_text = (
        b"fine\ngood \xff\xfe\n",
        b"a\xed\xa0\x80\n",
        b"a\n\xe6\x9d b\n",
        gzip.compress(b"text", mtime=0),
    )
    for content in empty + no_text:
        part.write_bytes(content)
        said = []
        for either in GENERATORS[True]:
            with user_error("data.empty" if content in empty else "data.encoding", part) as caught:
                either.read(part)
            said.append(str(caught.value))
        assert said[0] == said[1]
    ours, plain = both("abc y\n", lower_case=True)
    assert ours == plain, "it continues after a bad part"
    for path in (tmp_path, tmp_path / "absent"):
        with user_error("file.unreadable", path):
            GENERATORS[True][0].read(path)
