"""Words that are added to tokenizers of every kind: one token each; other text as before."""

import json
from pathlib import Path

import pytest

from mlbert.data.formats.added_words import add_words, read_words, write_added_words
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.prepare.tokenizer_folder import write_library
from mlbert.data.prepare.tokenizer_training import KINDS, train_tokenizer
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from user_errors import user_error

TEXT = "The hepatic veins carry blood, said the doctor twice. (It was late!) 12 of them in 2024."
WORDS = ["hepatitis", "COVID-19", "Zählwert", "β-blocker"]
OTHER = [
    TEXT,
    "hepatitises, antihepatitis and COVID-193 are other words",
    "veins\n\nblood  [late]\ttwice",
    "",
]


def saved(kind: str, folder: Path) -> Tokenizer:
    """Return a tokenizer of a kind; "plain" is that of a vocab.txt."""
    folder.mkdir()
    if kind == "plain":
        entries = train_vocabulary(count_words([TEXT] * 30), 300)
        (folder / "vocab.txt").write_text("\n".join(entries))
        return load_tokenizer(folder)
    trained = train_tokenizer(kind, [TEXT] * 30, 448)
    write_library(trained.library, folder, {"model_max_length": 77})
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
def test_one_token_each_and_nothing_else_changes(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    old = saved(kind, tmp_path / "old")
    added = add_words(old, WORDS)
    out = tmp_path / "new"
    out.mkdir()
    write_added_words(added, old, out, max_length=99)
    new = AutoTokenizer.from_pretrained(out)
    own = load_tokenizer(out)
    assert len(new) == added.size
    assert added.size % 64 == 0
    for text in OTHER:
        ids = new(text, add_special_tokens=False)["input_ids"]
        assert ids == old.encode(text), text
        assert own.encode(text) == ids
    numbers = [new.convert_tokens_to_ids(word) for word in WORDS]
    assert [*added.pieces] == numbers
    for word, number in zip(WORDS, numbers, strict=True):
        assert added.pieces[number] == old.encode(f" {word}")
        for text in (f"the {word}, twice", f"the blood ({word})", word, f"{word} is late"):
            found = new(text, add_special_tokens=False)["input_ids"]
            assert found.count(number) == 1, text
            assert len(found) <= len(old.encode(text)), text
    before = old.encode("the")
    assert new("the hepatitis the", add_special_tokens=False)["input_ids"][: len(before) + 1] == [
        *before,
        numbers[0],
    ]
    assert new("x")["input_ids"][0] == new.cls_token_id == old.cls_id
    assert new.mask_token_id == old.mask_id
    assert new.model_max_length == (99 if kind == "plain" else 77)
    if kind != "plain":
        assert min(numbers) < old.vocab_size, "unused entries are taken first"
        assert added.size == old.vocab_size
    if kind == "wordpiece" and old.lower_case:
        assert new.tokenize("HEPATITIS") == ["hepatitis"]


def test_again_and_beyond_the_unused_entries(tmp_path: Path) -> None:
    old = saved("bpe", tmp_path / "old")
    many = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(300)]
    first = tmp_path / "first"
    first.mkdir()
    write_added_words(add_words(old, many[:5], rows=450), old, first)
    once = load_tokenizer(first)
    assert once.vocab_size == 512, "rows of the model, to a multiple of 64"
    added = add_words(once, many)
    assert len(added.known) == 5
    assert added.size % 64 == 0
    assert added.size >= min(added.pieces) + 295
    numbers = sorted(added.pieces)
    assert numbers == list(range(numbers[0], numbers[0] + 295))
    entries = added.library.get_vocab()
    assert len(entries) == added.size
    assert len(set(entries.values())) == added.size


def test_a_word_that_is_a_piece_of_others(tmp_path: Path) -> None:
    old = saved("bpe", tmp_path / "old")
    piece = next(
        entry
        for entry, number in old.vocabulary.items()
        if len(entry) > 2
        and entry.isascii()
        and entry.isalpha()
        and len(old.encode(f" {entry}")) > 1
    )
    added = add_words(old, ["first", piece, "second"])
    assert added.shared == [piece]
    assert len(added.pieces) == 2
    for text in OTHER:
        if piece not in text.split():
            assert added.library.encode(text, add_special_tokens=False).ids == old.encode(text)
    assert added.size == old.vocab_size


def test_unused_entries_that_are_added_tokens(tmp_path: Path) -> None:
    """As in ModernBERT's tokenizer.json."""
    old = saved("bpe", tmp_path / "old")
    file = tmp_path / "old/tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    unused = {entry: number for entry, number in vocab.items() if entry.startswith("[unused")}
    content["model"]["vocab"] = {e: n for e, n in vocab.items() if e not in unused}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    content["added_tokens"] += [
        {"id": number, "content": entry, "special": False, **flags}
        for entry, number in unused.items()
    ]
    file.write_text(json.dumps(content))
    same = load_tokenizer(tmp_path / "old")
    assert same.vocabulary == old.vocabulary
    added = add_words(same, WORDS)
    assert added.size == old.vocab_size
    assert min(added.pieces) == min(unused.values())
    left = {entry for entry in added.library.get_vocab() if entry.startswith("[unused")}
    assert left == set(sorted(unused, key=unused.__getitem__)[len(WORDS) :])


def test_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("\ufeffone\n\n two \none\r\nthree\n", encoding="utf-8")
    assert read_words(file) == ["one", "two", "three"]
    for content, code in (
        (b"one word\n", "data.row"),
        (b"x" * 101, "data.row"),
        (b"\n \n", "data.empty"),
        (b"caf\xe9\n", "data.encoding"),
    ):
        file.write_bytes(content)
        with user_error(code, "words.txt"):
            read_words(file)
    with user_error("file.unreadable", "none.txt"):
        read_words(tmp_path / "none.txt")
