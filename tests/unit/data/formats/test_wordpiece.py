"""The tokenizer is the benchmark's, on odd text too."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer, basic_split, clean_words, load_vocabulary
from user_errors import user_error

LETTERS = [*string.ascii_lowercase, *(f"##{char}" for char in string.ascii_lowercase)]
WORDS = ["mask", "run", "##ning", "##nin", "[", "]", "'", "don", "σ", "##ς", "##σ", "東", "京"]
VOCABULARY = {entry: number for number, entry in enumerate([*SPECIAL_TOKENS, *LETTERS, *WORDS])}


def tokens_of(ids: list[int], vocabulary: dict[str, int]) -> list[str]:
    entries = {number: entry for entry, number in vocabulary.items()}
    return [entries[number] for number in ids]


def tokens(text: str, lower_case: bool = True) -> list[str]:
    return tokens_of(WordPieceTokenizer(VOCABULARY, lower_case).encode(text), VOCABULARY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \t\r\n\u00a0\u3000", []),
        ("running", ["run", "##ning"]),
        ("RUNNING", ["run", "##ning"]),
        ("[MASK]", ["[", "mask", "]"]),
        ("don't", ["don", "'", "t"]),
        ("é", ["e"]),
        ("e\u0301", ["e"]),
        ("a\u0000b\ufffdc\u200bd\u00ade", ["a", "##b", "##c", "##d", "##e"]),
        ("a\ue000", ["[UNK]"]),
        ("a\u0378", ["[UNK]"]),
        ("a\u2028b", ["a", "b"]),
        ("東京x", ["東", "京", "x"]),
        ("Σς", ["σ", "##ς"]),
        ("ΣΣ", ["σ", "##ς"]),
        ("z" * 200, ["z"] + ["##z"] * 199),
        ("z" * 201, ["[UNK]"]),
        ("run&ning", ["run", "[UNK]", "n", "##i", "##n", "##g"]),
    ],
)
def test_hard_text(text, expected):
    assert tokens(text) == expected


def test_cased_keeps_case_and_accents():
    assert tokens("Run", lower_case=False) == ["[UNK]"]
    assert tokens("run é", lower_case=False) == ["run", "[UNK]"]


@given(st.text(max_size=60), st.text(max_size=60))
def test_words_are_tokenised_one_by_one(a, b):
    tokenizer = WordPieceTokenizer(VOCABULARY)
    assert tokenizer.encode(f"{a} {b}") == tokenizer.encode(a) + tokenizer.encode(b)


@given(st.text(max_size=80))
def test_cleaning_never_leaves_controls_or_white_space(text):
    for word in clean_words(text):
        assert word
        assert not any(char.isspace() or char in "\x00\ufffd" for char in word)


def test_every_string_of_the_sample_set(shared_data):
    vocabulary = load_vocabulary(shared_data / "vocab.txt")
    uncased, cased = WordPieceTokenizer(vocabulary), WordPieceTokenizer(vocabulary, lower_case=False)
    cases = json.loads((shared_data / "golden" / "tokenizer_strings.json").read_text())["cases"]
    assert len(cases) > 100
    for case in cases:
        text = case["text"]
        assert uncased.encode(text) == case["uncased_ids"], text
        assert tokens_of(uncased.encode(text), vocabulary) == case["uncased"], text
        assert tokens_of(cased.encode(text), vocabulary) == case["cased_flag_false"], text
        assert [part for word in clean_words(text) for part in basic_split(word)] == case["basic_uncased"], text


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "line 8 "),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", "[MASK]"),
        (b"", "[PAD]"),
        (b"[PAD]\n\xff\n", "byte 6"),
        ("\n".join([*SPECIAL_TOKENS, *map(str, range(65_532))]).encode(), "65536"),
    ],
)
def test_bad_vocabulary(tmp_path, content, named):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with user_error("vocabulary.format", path) as caught:
        load_vocabulary(path)
    assert named in str(caught.value)


def test_missing_vocabulary(tmp_path):
    with user_error("file.unreadable", tmp_path / "vocab.txt"):
        load_vocabulary(tmp_path / "vocab.txt")
