"""Tokenizers by name; many texts at once equal one after the other, compiled and plain."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbert.data.formats import tokenizer as module
from mlbert.data.formats import wordpiece
from mlbert.data.formats.tokenizer import UNCASED_FILE, UNCASED_NAMES, Tokenizer, hub_problem, load_tokenizer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.host import native
from user_errors import user_error

UNCASED = load_tokenizer("bert-base-uncased")
HARD = ["", "\n", "a\n\nb\rc\r\nd", "\t", "!", "\x0b", "x" * 300]


def of_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    tokens, offsets = tokenizer.encode_all(texts)
    assert offsets[-1] == len(tokens)
    return [tokens[first:end].tolist() for first, end in itertools.pairwise(offsets)]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on PATH: only the plain form here")
@given(st.lists(st.text(max_size=40) | st.sampled_from(HARD), max_size=8))
def test_many_texts_at_once_equal_one_after_the_other(texts):
    assert UNCASED._native is not None
    assert of_all(UNCASED, texts) == [UNCASED.encode(text) for text in texts]


def test_without_a_compiler(monkeypatch):
    def unavailable(*_: object, **__: object) -> None:
        raise native.NativeUnavailable("no compiler")

    texts = ["one two", "", "naïve 東京\nunaffable"]
    expected = of_all(UNCASED, texts)
    monkeypatch.setattr(wordpiece.native, "load", unavailable)
    plain = UNCASED.clone()
    assert plain._native is None
    assert of_all(plain, texts) == expected


def test_decode():
    assert UNCASED.decode(UNCASED.encode("Unaffable, she said")) == "unaffable , she said"


@pytest.mark.parametrize("name", [*UNCASED_NAMES, "google-bert/bert-base-uncased"])
def test_names_that_are_known_here(name):
    tokenizer = load_tokenizer(name)
    assert tokenizer.sha256 == "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    assert len(tokenizer.vocabulary) == 30_522
    assert tokenizer.special_ids == (0, 100, 101, 102, 103)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (101, 102, 103)


def test_a_file_and_its_folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "the", "The"]) + "\n")
    by_file, by_folder = load_tokenizer(tmp_path / "vocab.txt"), load_tokenizer(str(tmp_path))
    assert by_file.vocabulary == by_folder.vocabulary
    assert by_folder.encode("The the") == [5, 5]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = load_tokenizer(tmp_path)
    assert cased.encode("The the") == [6, 5]
    assert cased.identity != by_file.identity


@pytest.mark.parametrize("name", ["no/such/vocab.txt", "vocab.txt", "/nowhere", "a/b/c"])
def test_missing_files_are_not_looked_for_elsewhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with user_error("file.missing", name):
        load_tokenizer(name)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[]", "file.json"),
        (b"{", "file.json"),
        (b"\xff", "file.json"),
        (b'{"do_lower_case": "false"}', "config.value"),
        (b"[" * 20_000, "file.json"),
    ],
)
def test_damaged_configuration(tmp_path, content, code):
    shutil.copy(UNCASED_FILE, tmp_path / "vocab.txt")
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with user_error(code, tmp_path / "tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_an_unknown_name_without_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with user_error("network.unreachable", "tokenizer 'gpt2'"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [("HF_HUB_OFFLINE", True, "switched off"), ("ENDPOINT", "http://127.0.0.1:9", "does not answer")],
)
def test_a_hub_that_cannot_be_used(monkeypatch, attribute, value, words):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, attribute, value)
    assert words in hub_problem()
    with user_error("network.unreachable", "tokenizer 'gpt2'"):
        load_tokenizer("gpt2")


def test_the_vocabulary_is_the_one_that_downloads_are_checked_against(tree_root):
    from mlbert.data.formats.manifest import file_md5
    from mlbert.data.prepare.download import __file__ as place

    files = json.loads(Path(place).with_name("benchmark_files.json").read_text())["files"]
    pinned = next(entry for entry in files if entry["name"] == "vocab.txt")
    assert file_md5(module.UNCASED_FILE) == pinned["md5"]


@pytest.mark.parametrize("cased", [True, False, None])
def test_a_name_from_the_hub(monkeypatch, tmp_path, cased):
    """The hub's files are stood in for by local ones: there is no hub here."""
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
