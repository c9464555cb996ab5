"""Tokenizers by name; many texts at once equal one after the other, compiled and plain."""

import itertools
import json
import shutil
import string
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.formats import tokenizer as module
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import (
    UNCASED_FILE,
    UNCASED_NAMES,
    Tokenizer,
    hub_problem,
    load_tokenizer,
)
from mlbert.data.formats.vocabulary_checks import another_vocabulary, keeps_case, unknown_share
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    WordPieceTokenizer,
    basic_split,
    clean_words,
    load_vocabulary,
)
from mlbert.data.prepare.instances import InstanceOptions, create_instances
from mlbert.host import native
from user_errors import user_error

UNCASED = load_tokenizer("bert-base-uncased")
HARD = ["", "\n", "a\n\nb\rc\r\nd", "\t", "!", "\x0b", "x" * 300]
LETTERS = [*string.ascii_lowercase, *(f"##{char}" for char in string.ascii_lowercase)]
WORDS = ["mask", "run", "##ning", "##nin", "[", "]", "'", "don", "σ", "##ς", "##σ", "東", "京"]
VOCABULARY = {entry: number for number, entry in enumerate([*SPECIAL_TOKENS, *LETTERS, *WORDS])}
SYLLABLES = [f"{start}{end}" for start in "bcdfgklmnprst" for end in ("a", "e", "i")]


def of_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    tokens, offsets = tokenizer.encode_all(texts)
    assert offsets[-1] == len(tokens)
    return [tokens[first:end].tolist() for first, end in itertools.pairwise(offsets)]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH: only the plain form here")
@given(st.lists(st.text(max_size=40) | st.sampled_from(HARD), max_size=8))
def test_many_texts_at_once_equal_one_after_the_other(texts):
    assert UNCASED._native is not None
    assert of_all(UNCASED, texts) == [UNCASED.encode(text) for text in texts]


def test_without_a_compiler():
    texts = ["one two", "", "naïve 東京\nunaffable"]
    expected = of_all(UNCASED, texts)
    with mock.patch.object(native, "load", side_effect=native.NativeUnavailable("no compiler")):
        plain = UNCASED.clone()
        assert plain._native is None
        assert of_all(plain, texts) == expected


@pytest.mark.parametrize("name", [*UNCASED_NAMES, "google-bert/bert-base-uncased"])
def test_names_that_are_known_here(name):
    tokenizer = load_tokenizer(name)
    assert tokenizer.sha256 == "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    assert (len(tokenizer.vocabulary), tokenizer.special_ids) == (30_522, (0, 100, 101, 102, 103))
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (101, 102, 103)


def test_a_file_and_its_folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "the", "The"]) + "\n")
    by_file = load_tokenizer(tmp_path / "vocab.txt")
    by_folder = load_tokenizer(str(tmp_path))
    assert by_file.vocabulary == by_folder.vocabulary
    assert by_folder.encode("The the") == [5, 5]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = load_tokenizer(tmp_path)
    assert cased.encode("The the") == [6, 5]
    assert cased.identity != by_file.identity


def test_missing_files_are_not_looked_for_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("no/such/vocab.txt", "vocab.txt", "/nowhere", "a/b/c"):
        with user_error("file.missing", name):
            load_tokenizer(name)


def test_damaged_configuration(tmp_path):
    shutil.copy(UNCASED_FILE, tmp_path / "vocab.txt")
    valid_json = b'{"do_lower_case": "false"}'
    for content in (b"[]", b"{", b"\xff", b"[" * 20_000, valid_json):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with user_error(
            "config.value" if content == valid_json else "file.json",
            tmp_path / "tokenizer_config.json",
        ):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("HF_HUB_OFFLINE", True, "switched off"),
        ("ENDPOINT", "http://127.0.0.1:9", "does not answer"),
    ],
)
def test_a_hub_that_cannot_be_used(monkeypatch, attribute, value, words):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, attribute, value)
    assert words in hub_problem()
    with user_error("network.unreachable", "tokenizer 'gpt2'"):
        load_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
    with user_error("network.unreachable", "tokenizer 'gpt2'"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("cased", [True, False, None])
def test_a_name_from_the_hub(monkeypatch, tmp_path, cased):
    """Local files stand in for the hub's: there is no hub here."""
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "the", "The"]) + "\n")
    if cased is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))

    def download(name: str, file: str) -> str:
        assert name == "somebody/bert"
        if not (tmp_path / file).exists():
            raise errors.EntryNotFoundError("404")
        return str(tmp_path / file)

    monkeypatch.setattr(module, "hub_problem", lambda: None)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert load_tokenizer("somebody/bert").encode("The") == [6 if cased else 5]
    (tmp_path / "vocab.txt").unlink()
    with user_error("network.unreachable", "tokenizer 'somebody/bert'"):
        load_tokenizer("somebody/bert")


def tokens(
    text: str, lower_case: bool = True, vocabulary: dict[str, int] = VOCABULARY
) -> list[str]:
    entries = list(vocabulary)
    return [entries[number] for number in WordPieceTokenizer(vocabulary, lower_case).encode(text)]


def test_hard_text():
    for text, expected in (
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
    ):
        assert tokens(text) == expected, text
    assert tokens("Run run é", lower_case=False) == ["[UNK]", "run", "[UNK]"]


@given(st.text(max_size=60), st.text(max_size=60))
def test_words_are_tokenized_one_by_one(a, b):
    assert tokens(f"{a} {b}") == tokens(a) + tokens(b)
    for word in clean_words(a):
        assert word
        assert not any(char.isspace() or char in "\x00\ufffd" for char in word)


def test_every_string_of_the_sample_set(shared_data):
    vocabulary = load_vocabulary(shared_data / "vocab.txt")
    cases = json.loads((shared_data / "golden" / "tokenizer_strings.json").read_text())["cases"]
    assert len(cases) > 100
    for case in cases:
        text = case["text"]
        assert WordPieceTokenizer(vocabulary).encode(text) == case["uncased_ids"], text
        assert tokens(text, vocabulary=vocabulary) == case["uncased"], text
        assert tokens(text, lower_case=False, vocabulary=vocabulary) == case["cased_flag_false"], (
            text
        )
        assert [part for word in clean_words(text) for part in basic_split(word)] == case[
            "basic_uncased"
        ], text


def test_bad_vocabulary(tmp_path):
    path = tmp_path / "vocab.txt"
    with user_error("file.unreadable", path):
        load_vocabulary(path)
    for content, named in (
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", "line 8 "),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", "[MASK]"),
        (b"", "[PAD]"),
        (b"[PAD]\n\xff\n", "byte 6"),
        ("\n".join([*SPECIAL_TOKENS, *map(str, range(65_532))]).encode(), "65536"),
    ):
        path.write_bytes(content)
        with user_error("vocabulary.format", path) as caught:
            load_vocabulary(path)
        assert named in str(caught.value)


def vocabulary(seed: int) -> dict[str, int]:
    pieces = [*SYLLABLES[::2], *(f"##{word}" for word in SYLLABLES), ",", ".", "(", ")"]
    order = np.random.default_rng(seed).permutation(len(pieces))
    return {
        entry: number
        for number, entry in enumerate([*SPECIAL_TOKENS, *(pieces[place] for place in order)])
    }


@pytest.fixture(scope="module")
def rows() -> Ragged:
    rng = np.random.default_rng(0)
    tokenizer = WordPieceTokenizer(vocabulary(0))

    def sentence() -> list[int]:
        words = ["".join(rng.choice(SYLLABLES[::2], rng.integers(1, 4))) for _ in range(9)]
        return tokenizer.encode(f"{' '.join(words[:5])}, {' '.join(words[5:])}.")

    documents = [[sentence() for _ in range(8)] for _ in range(12)]
    options = InstanceOptions(max_seq_length=64, max_predictions_per_seq=9, dupe_factor=2)
    return Ragged.from_rows(create_instances(documents, tokenizer, options))


def test_only_its_own_vocabulary_explains_the_ids(rows):
    assert another_vocabulary(rows, vocabulary(0)) is None
    for seed in range(1, 6):
        assert "after punctuation would continue a word" in (
            another_vocabulary(rows, vocabulary(seed)) or ""
        )
    moved = {entry: (number + 5) % len(vocabulary(0)) for entry, number in vocabulary(0).items()}
    assert "do not begin with this one's [CLS]" in (another_vocabulary(rows, moved) or "")
    for count in (0, 2):  # prove nothing
        assert another_vocabulary(rows.slice(0, count), vocabulary(1)) is None


def test_a_text_of_unknown_words():
    words = vocabulary(0)
    tokens = np.full(1000, words["[UNK]"], np.uint16)
    with user_error("vocabulary.other-language", "part"):
        unknown_share(tokens, words["[UNK]"], "part", "vocab.txt")
    tokens[:900] = 7
    assert unknown_share(tokens, words["[UNK]"], "part", "vocab.txt") == 0.1
    assert unknown_share(tokens, None, "part", "tokenizer.json") == 0
    assert not keeps_case(words)
    assert keeps_case(
        {
            entry: number
            for number, entry in enumerate([*(word.title() for word in SYLLABLES), *words])
        }
    )
