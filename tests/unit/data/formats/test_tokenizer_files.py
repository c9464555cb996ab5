"""Tokenizers in every form that transformers and tokenizers write:
the same ids as theirs, or one clear line.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import (
    BertWordPieceTokenizer,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mlbert.data.formats.tokenizer import Tokenizer as OwnTokenizer
from mlbert.data.formats.tokenizer import load_tokenizer, lower_cases
from mlbert.data.formats.tokenizer_files import find_vocabulary
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, load_vocabulary
from user_errors import user_error

WORDS = [
    *SPECIAL_TOKENS,
    "the",
    "The",
    "cafe",
    "café",
    "Cafe",
    "Café",
    "ECOLE",
    "ecole",
    "école",
    "École",
    "naive",
    "naïve",
    "i",
    "I",
    "i̇",
    "İ",
    "σας",
    "ΣΑΣ",
    "σασ",
    "東",
    "京",
    "東京",
    "##京",
    "x",
    "##x",
    "y",
    "##y",
    "🤗",
    "##🤗",
    ".",
    ",",
    "[",
    "]",
    "mask",
    "##s",
    "<",
    ">",
    "url",
    "-",
    "_",
    "@",
]
# Accents (composed and decomposed), capitals, CJK, kana, emoji,
# control characters and unusual spaces.
TEXTS = [
    "The café, the Cafe\u0301. ÉCOLE École naïve NAÏVE İ I i",
    "東京xy 東 京 カフェ x東京y",
    "x🤗y 🤗 the🤗",
    "the\u0000x\u200dy\u00adx\ufffd the\u2028The\u3000the\u00a0x\ty\r\nx",
    "σας ΣΑ. [mask] <url> x_y@x-y",
    "",
]
# Texts with the special and added tokens below.
SPECIAL_TEXTS = [
    *TEXTS,
    "the [MASK] x<url>y [SEP]the <mask>. <s>  <url> the",
    f"the {'x' * 150} the",
]
RULES = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": True, "strip_accents": True},
    {"do_lower_case": False, "strip_accents": True},
    {"do_lower_case": False, "strip_accents": False},
    {"do_lower_case": True, "strip_accents": None},
    {"tokenize_chinese_chars": False},
    {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
]
ADDED = {"content": "<url>", "lstrip": False, "rstrip": False, "single_word": False}
NO_ACCENTS = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
ROBERTA = {"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
SEGMENTS = {"type": "BertProcessing", "sep": ["[CLS]", 2], "cls": ["[SEP]", 3]}


def write_config(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a BERT with a vocab.txt."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (made / "config.json").write_text('{"model_type": "bert"}')
    return made


def write_fast(folder: Path, **rules: Any) -> None:
    """Write a tokenizer.json with these rules, and remove the vocab.txt."""
    fast = BertWordPieceTokenizer(str(folder / "vocab.txt"), **rules)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()


def change_fast(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def assert_same_ids(folder: Path, peer_folder: Path | None = None) -> OwnTokenizer:
    peer = transformers.AutoTokenizer.from_pretrained(peer_folder or folder)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        inner = peer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == inner, text
        assert peer(text)["input_ids"] == [ours.cls_id, *inner, ours.sep_id]
    tokens, starts = ours.encode_all(TEXTS)
    assert tokens.tolist() == [number for text in TEXTS for number in ours.encode(text)]
    assert len(starts) == len(TEXTS) + 1
    return ours


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("form", ["vocab.txt", "with class", "saved", "fast", "generic"])
def test_the_ids_are_those_of_transformers(tmp_path, folder, rules, form):
    if form == "vocab.txt":
        write_config(folder, **rules)
    elif form == "with class":
        write_config(folder, tokenizer_class="BertTokenizer", **rules)
    elif form == "saved":  # as transformers writes it
        write_config(folder, tokenizer_class="BertTokenizer", **rules)
        peer = transformers.AutoTokenizer.from_pretrained(folder)
        folder = tmp_path / "saved"
        peer.save_pretrained(folder)
        assert not (folder / "vocab.txt").exists()
    else:
        names = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
        write_fast(folder, **{names.get(name, name): value for name, value in rules.items()})
        if form == "fast":
            write_config(folder, **rules)
        else:  # tokenizer.json decides, whatever else is said
            write_config(folder, tokenizer_class="PreTrainedTokenizerFast", do_lower_case=True)
    found = assert_same_ids(folder)
    # What is written for a new folder leads to the same ids, here and in transformers.
    again = tmp_path / "again"
    again.mkdir()
    (again / "vocab.txt").write_text("\n".join(found.entries) + "\n", encoding="utf-8")
    write_config(again, tokenizer_class="BertTokenizer", **found.config)
    assert assert_same_ids(again).identity == found.identity


def test_a_tokenizer_json_alone(folder):
    """Without a model's folder around it, it decides alone."""
    write_fast(folder, lowercase=False, strip_accents=True)
    (folder / "config.json").unlink()
    assert assert_same_ids(folder).identity == load_tokenizer(folder / "tokenizer.json").identity
    shutil.copy(folder / "tokenizer.json", folder / "other-name.json")
    assert (
        load_tokenizer(folder / "other-name.json").vocabulary == load_tokenizer(folder).vocabulary
    )


def test_one_vocabulary_has_one_digest(folder, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    write_fast(folder)
    assert load_tokenizer(folder).identity == load_tokenizer(tmp_path / "vocab.txt").identity


def test_identities_differ_with_the_rules(folder):
    found = set()
    for rules in RULES:
        write_config(folder, **rules)
        found.add(load_tokenizer(folder).identity)
    assert len(found) == 6


ADDED |= {"normalized": False, "special": False}


def assert_ids_of_library(folder: Path) -> OwnTokenizer:
    """Compare a tokenizer that is not BERT's plain WordPiece with transformers."""
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert not ours.is_plain
    for text in SPECIAL_TEXTS:
        inner = peer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == inner, text
        assert peer(text)["input_ids"] == [ours.cls_id, *inner, ours.sep_id]
    assert ours.vocab_size == 1 + max(peer.get_vocab().values())
    assert ours.mask_id == peer.mask_token_id
    assert ours.pad_id == peer.pad_token_id
    assert ours.unknown_id == peer.unk_token_id
    assert {*peer.all_special_ids} <= {*ours.special_ids}
    return ours


@pytest.mark.parametrize(
    "values",
    [
        {"added_tokens_decoder": {str(len(WORDS)): ADDED}},
        {"additional_special_tokens": ["<url>"]},
        {"extra_special_tokens": {"url_token": "<url>"}},
        {"extra_special_tokens": ["<url>"]},
        {"bos_token": "the"},
        {"mask_token": {**ADDED, "__type": "AddedToken", "content": "<mask>"}},
        {"unk_token": "the"},
        {"additional_special_tokens": ["<url>"], "do_lower_case": False, "strip_accents": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["vocab.txt", "tokenizer.json", "saved"])
def test_other_tokens_in_the_configuration(tmp_path, folder, values, form):
    if form == "tokenizer.json":
        write_fast(folder)
    write_config(folder, **values)
    if form == "saved":
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
        folder = tmp_path / "saved"
    assert_ids_of_library(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"added_tokens_decoder": {"7": {**ADDED, "content": "[MASK]"}}},
        {"added_tokens_decoder": {"40": ADDED}},
        {"tokenizer_class": "BertJapaneseTokenizer"},
        {"tokenizer_class": "RobertaTokenizerFast"},
        {"auto_map": {"AutoTokenizer": ["custom.Tokenizer", None]}},
        {"never_split": ["the"]},
        {"do_basic_tokenize": False},
        {"clean_text": False},
        {"wordpieces_prefix": "@@"},
        {"truncation_side": "left"},
        {"split_special_tokens": True},
        {"add_eos_token": True},
    ],
    ids=str,
)
def test_properties_of_the_configuration_that_change_ids_are_refused(folder, values):
    write_config(folder, **values)
    is_other_id = "added_tokens_decoder" in values
    code = "vocabulary.mismatch" if is_other_id else "vocabulary.unsupported"
    with user_error(code, folder / "tokenizer_config.json") as caught:
        load_tokenizer(folder)
    names = (*values, "[MASK]", "<url>")
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<url>": len(WORDS)}),
        ("added_tokens.json", {f"<{n}>": len(WORDS) + n for n in (60, *range(60))}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<url>"]}),
        ("special_tokens_map.json", {"cls_token": "<s>"}),
    ],
    ids=str,
)
def test_other_tokens_in_other_files(folder, name, content):
    (folder / name).write_text(json.dumps(content))
    assert_ids_of_library(folder)


def test_added_tokens_have_ids(folder):
    (folder / "added_tokens.json").write_text('{"<url>": "46"}')
    with user_error("config.value", folder / "added_tokens.json"):
        load_tokenizer(folder)


def test_a_class_in_config_json_is_refused(folder):
    content = {"model_type": "bert", "tokenizer_class": "BertJapaneseTokenizer"}
    (folder / "config.json").write_text(json.dumps(content))
    with user_error("vocabulary.unsupported", folder / "config.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("add", ["add_tokens", "add_special_tokens"])
def test_tokens_added_by_transformers(folder, tmp_path, add):
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    if add == "add_tokens":
        peer.add_tokens(["<url>"])
    else:
        peer.add_special_tokens({"additional_special_tokens": ["<url>"]})
    peer.save_pretrained(tmp_path / "saved")
    found = assert_ids_of_library(tmp_path / "saved")
    assert found.entries[-1] == "<url>"


def set_in(*keys: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


ROBERTA |= {"trim_offsets": True, "add_prefix_space": False}


def add_token(content: dict[str, Any]) -> None:
    content["added_tokens"].append(ADDED | {"id": len(WORDS)})


@pytest.mark.parametrize(
    "change",
    [
        set_in("normalizer", value=NO_ACCENTS),
        set_in("normalizer", value=None),
        set_in("normalizer", "clean_text", value=False),
        set_in("pre_tokenizer", value={"type": "Whitespace"}),
        set_in("pre_tokenizer", value=None),
        set_in("post_processor", value=ROBERTA),
        set_in("post_processor", value=SEGMENTS),
        set_in("model", "unk_token", value="the"),
        set_in("model", "continuing_subword_prefix", value="@@"),
        set_in("model", "max_input_chars_per_word", value=3),
        set_in("model", "vocab", "the", value=4_000),
        set_in("model", "vocab", "a\nb", value=len(WORDS)),
        add_token,
    ],
)
def test_other_properties_of_a_tokenizer_json(folder, change):
    """The library runs every WordPiece that is not BERT's plain one."""
    write_fast(folder)
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    change_fast(folder, change)
    if json.loads((folder / "tokenizer.json").read_text())["model"]["unk_token"] == "the":
        names["unk_token"] = "the"
    write_config(folder, tokenizer_class="PreTrainedTokenizerFast", **names)
    plain = assert_ids_of_library(folder)
    # Without the files that name the special tokens, they are the same.
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").unlink()
    alone = load_tokenizer(folder / "tokenizer.json")
    assert (alone.mask_id, alone.pad_id) == (plain.mask_id, plain.pad_id)
    assert alone.encode("the x") == plain.encode("the x")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (set_in("post_processor", value=None), "vocabulary.unsupported"),
        (set_in("model", value=None), "vocabulary.format"),
        (set_in("model", "type", value="BPE"), "vocabulary.format"),
        (set_in("model", "type", value="Other"), "vocabulary.format"),
        (set_in("model", "vocab", "the", value="5"), "vocabulary.format"),
        (set_in("model", "vocab", "\ud800", value=len(WORDS)), "vocabulary.format"),
        (set_in("normalizer", "lowercase", value="no"), "config.value"),
        (set_in("added_tokens", value=["[MASK]"]), "vocabulary.format"),
        (
            set_in("added_tokens", value=[ADDED | {"content": "[SEP]", "id": 2}]),
            "vocabulary.mismatch",
        ),
    ],
)
def test_a_tokenizer_json_that_cannot_be_read(folder, change, code):
    write_fast(folder)
    write_config(folder, tokenizer_class="PreTrainedTokenizerFast")
    assert_same_ids(folder)
    change_fast(folder, change)
    with user_error(code, folder / "tokenizer.json", wording=code != "vocabulary.format"):
        load_tokenizer(folder)


def test_a_class_of_bert_around_another_model_is_refused(folder):
    """transformers ignores what its tokenizer.json says."""
    write_fast(folder)
    write_config(folder, tokenizer_class="BertTokenizer")
    change_fast(folder, set_in("model", "continuing_subword_prefix", value="@@"))
    with user_error("vocabulary.mismatch", folder / "tokenizer.json"):
        load_tokenizer(folder)


def test_files_that_contradict_each_other_are_refused(folder):
    """Without a class, transformers ignores the rules of tokenizer.json in a model's folder, and no
    one can know which were meant.
    """
    shutil.copy(folder / "vocab.txt", folder.parent / "vocab.txt")
    write_fast(folder, lowercase=False)
    for values in (None, {"do_lower_case": True}, {"strip_accents": True, "do_lower_case": False}):
        if values is not None:
            write_config(folder, **values)
        with user_error("vocabulary.mismatch", folder / "tokenizer.json"):
            load_tokenizer(folder)
    write_config(folder, do_lower_case=False)
    assert_same_ids(folder)
    shutil.move(folder.parent / "vocab.txt", folder / "vocab.txt")
    assert_same_ids(folder)
    entries = "\n".join([*WORDS[:5], *reversed(WORDS[5:])])
    (folder / "vocab.txt").write_text(entries, encoding="utf-8")
    with user_error("vocabulary.mismatch", folder / "vocab.txt"):
        load_tokenizer(folder)


def test_tokenizers_without_transformers(folder):
    """As the library tokenizers trains and saves them,
    with the template that its documentation shows for BERT.
    """
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    shutil.rmtree(folder)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    assert_same_ids(folder)


@pytest.mark.parametrize(
    "rules", [{"strip_accents": False}, {"tokenize_chinese_chars": False}], ids=str
)
def test_rules_of_samples_that_can_be_prepared(folder, rules):
    """Samples with next-sentence pairs are made with Google's rules only."""
    assert lower_cases(find_vocabulary(folder))
    write_config(folder, **rules)
    with user_error("vocabulary.unsupported", folder / "tokenizer_config.json"):
        lower_cases(find_vocabulary(folder))


def test_a_tokenizer_json_is_not_read_as_lines(folder):
    """Commands that import data need a vocab.txt; they say so."""
    write_fast(folder)
    with user_error("vocabulary.format", folder / "tokenizer.json"):
        load_vocabulary(folder / "tokenizer.json")
