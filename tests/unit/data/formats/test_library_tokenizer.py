"""Tokenizers of every kind give the ids of transformers, in stores of 16 and 32 bits."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from mlbert.data.formats.dynamic_masking import Masking
from mlbert.data.formats.mds import MdsWriter
from mlbert.data.formats.ragged import NARROW, WIDE, ids_dtype, offsets_of
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.tasks import TaskRows
from mlbert.data.formats.token_shards import TokenShards, open_texts, vocabulary_sha256
from mlbert.data.formats.tokenizer import (
    Tokenizer,
    check_for_masking,
    load_tokenizer,
    write_tokenizer,
)
from mlbert.data.loading.tasks import encode
from mlbert.data.prepare.corpus_sequences import choose_sentences, encode_texts
from tokenizer_kinds import ENGLISH, TEXTS, kinds, save
from user_errors import user_error

LARGE = 70_000  # entries
KINDS = kinds()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, as transformers saves it."""
    return {kind: write(tmp_path_factory.mktemp(kind) / "saved") for kind, write in KINDS.items()}


@pytest.fixture(params=[*KINDS])
def folder(folders: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with more than 65,536 entries, one for each number as a word."""
    entries = {token: i for i, token in enumerate(["<s>", "</s>", "<pad>", "<unk>", "<mask>"])}
    entries |= {str(number): len(entries) + number for number in range(LARGE - len(entries))}
    library = Library(models.WordLevel(entries, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    names |= {"mask_token": "<mask>", "unk_token": "<unk>"}
    folder = tmp_path_factory.mktemp("large")
    return load_tokenizer(save(library, folder, names, "PreTrainedTokenizerFast", None))


def copied(folder: Path, root: Path) -> Path:
    return Path(shutil.copytree(folder, root / "model"))


def test_the_ids_are_those_of_transformers(folder: Path, tmp_path: Path):
    ours = load_tokenizer(folder)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    assert not ours.is_plain
    for text in TEXTS:
        inner = peer(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == inner, text
        assert peer(text)["input_ids"] == [ours.cls_id, *inner, ours.sep_id], text
    tokens, starts = ours.encode_all(TEXTS)
    assert tokens.dtype == NARROW
    assert tokens.tolist() == [number for text in TEXTS for number in ours.encode(text)]
    assert len(starts) == len(TEXTS) + 1
    assert ours.mask_id == peer.mask_token_id
    assert ours.pad_id == peer.pad_token_id
    assert ours.unknown_id == peer.unk_token_id
    assert ours.vocab_size == 1 + max(peer.get_vocab().values())
    assert ours.decode(ours.encode(TEXTS[0])) == peer.decode(peer.encode(TEXTS[0])[1:-1])
    assert {*peer.all_special_ids} <= {*ours.special_ids}
    assert ours.vocabulary["<url>"] not in ours.special_ids
    # Copies, and the files that a run keeps, are the same tokenizer.
    write_tokenizer(ours, tmp_path)
    kept = load_tokenizer(tmp_path)
    sent = pickle.loads(pickle.dumps(ours))
    for other in (kept, sent, ours.clone()):
        assert other.identity == ours.identity
        assert other.special == ours.special
        assert other.encode(TEXTS[1]) == ours.encode(TEXTS[1])
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [found(text)["input_ids"] for text in TEXTS] == [
        peer(text)["input_ids"] for text in TEXTS
    ]


def test_pairs_are_those_of_transformers(folder: Path):
    texts = ([TEXTS[0], TEXTS[3]], [TEXTS[1], "a"])
    given = TaskRows(Path("rows.csv"), texts, None, (), "sha256:0")
    ours = load_tokenizer(folder)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = encode(given, ours, 4096)
    for row in range(2):
        expected = peer(texts[0][row], texts[1][row], return_token_type_ids=True)
        start, end = rows.offsets[row : row + 2]
        assert rows.tokens[start:end].tolist() == expected["input_ids"]
        segments = np.arange(end - start) >= rows.first_lengths[row]
        assert segments.astype(int).tolist() == expected["token_type_ids"]


def test_identities_tell_tokenizers_apart(folders, tmp_path):
    found = {load_tokenizer(folder).identity for folder in folders.values()}
    assert len(found) == len(KINDS)
    copy = tmp_path / "copy"
    shutil.copytree(folders["modernbert"], copy)
    before = load_tokenizer(copy).identity
    content = json.loads((copy / "tokenizer.json").read_text())
    content["truncation"] = None
    (copy / "tokenizer.json").write_text(json.dumps(content, indent=1))
    assert load_tokenizer(copy).identity == before
    content["normalizer"] = None
    (copy / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(copy).identity != before


def test_lines_of_a_text_have_its_tokens(folder: Path):
    ours = load_tokenizer(folder)
    texts = [*TEXTS, "one line\ntwo\n\nthree  \n", "\n\n"]
    tokens, starts, counts = ours.encode_lines(texts)
    assert tokens.tolist() == [number for text in texts for number in ours.encode(text)]
    assert counts.tolist() == [len(text.splitlines()) for text in texts]
    assert len(starts) == counts.sum() + 1
    assert starts[-1] == len(tokens)
    assert (np.diff(starts) >= 0).all()
    joined, found = encode_texts(ours, None, texts)
    assert found["kept"] == len(tokens)
    assert (joined == ours.sep_id).sum() >= sum(bool(ours.encode(text)) for text in texts)


@pytest.mark.parametrize("kind", ["modernbert", "gemma"])
def test_masked_words_are_one_token(folders, kind):
    ours = load_tokenizer(folders[kind])
    chosen = choose_sentences([f"{ENGLISH} " * 3], ours)
    assert chosen
    for masked, word in chosen:
        before, after = masked.split(ours.mask_token)
        assert ENGLISH in (f"{before}{word}{after}", f"{before} {word}{after}")
        whole = ours.encode(ENGLISH)
        ids = ours.encode_around_mask(before, after)
        place = ids.index(ours.mask_id)
        assert [*ids[:place], *ids[place + 1 :]] == [*whole[:place], *whole[place + 1 :]]
        assert ours.show(whole[place]) == word


def test_an_entry_of_space_only_is_shown_in_quotes(folders):
    ours = load_tokenizer(folders["modernbert"])
    number = ours.entries.index("Ċ")  # how byte pairs write a line break
    assert ours.show(number) == r"'\n'"


def test_random_tokens_are_not_special(folders):
    ours = load_tokenizer(folders["modernbert"])
    masking = Masking.of(ours, seed=1)
    tokens = np.asarray([ours.cls_id, *ours.encode(TEXTS[0] * 200), ours.sep_id], ours.dtype)
    rows = masking(tokens, offsets_of([len(tokens)]), 0, np.zeros(1, np.int64), 0.9)
    chosen = rows.tokens[rows.masked_positions]
    others = chosen[(chosen != ours.mask_id) & (chosen != rows.masked_labels)]
    assert len(others) > 100
    assert not np.isin(others, ours.special_ids).any()
    assert len(np.unique(others)) > 50
    assert not np.isin(rows.masked_labels, ours.special_ids).any()


def test_large_vocabularies_have_wide_ids(large, tmp_path):
    assert (ids_dtype(1 << 16), ids_dtype((1 << 16) + 1)) == (NARROW, WIDE)
    assert large.dtype == WIDE
    texts = [f"{number} {LARGE - 100 + number % 50}" for number in range(300)]
    with MdsWriter(tmp_path / "set", {"text": "str"}, size_limit=2000) as writer:
        for text in texts:
            writer.write({"text": text})
    expected = [large.encode(text) for text in texts]
    for _ in range(2):  # made, and read from its file
        shards = TokenShards(open_texts(streams_of("", None, tmp_path / "set"), large), large)
        found = []
        for number in range(len(shards.first) - 1):
            shard = shards.shard(number)
            assert shard.tokens.dtype == WIDE
            found += [shard.text(place).tolist() for place in range(len(shard.offsets) - 1)]
        assert found == expected
    rows = Masking.of(large, seed=3)(
        *large.encode_all([" ".join(texts)]), 0, np.zeros(1, np.int64), 0.5
    )
    assert rows.tokens.dtype == rows.masked_labels.dtype == WIDE
    assert rows.tokens.max() > 1 << 16
    assert rows.masked_labels.max() > 1 << 16


def test_token_sets_record_the_tokenizer(folders, tmp_path):
    ours = load_tokenizer(folders["roberta"])
    with MdsWriter(
        tmp_path / "set", {"tokens": "bytes"}, vocabulary_sha256=vocabulary_sha256(ours)
    ) as writer:
        writer.write({"tokens": np.asarray(ours.encode("a fox"), "<i8").tobytes()})
    streams = streams_of("", None, tmp_path / "set")
    shard = TokenShards(open_texts(streams, ours), ours).shard(0)
    assert shard.text(0).tolist() == ours.encode("a fox")
    with user_error("vocabulary.mismatch", tmp_path / "set", wording=False):
        open_texts(streams, load_tokenizer(folders["gemma"]))


@pytest.mark.parametrize("token", ["mask_token", "pad_token"])
def test_a_missing_token_is_one_line(folders, tmp_path, token):
    copy = tmp_path / "model"
    shutil.copytree(folders["modernbert"], copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    name = config.pop(token)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    text = (copy / "tokenizer.json").read_text().replace(name, "[OTHER]")
    (copy / "tokenizer.json").write_text(text)
    ours = load_tokenizer(copy)
    with user_error("vocabulary.unsupported", copy / "tokenizer.json"):
        check_for_masking(ours)


def test_a_large_vocabulary_of_bert(tmp_path):
    """As of the multilingual BERT: a vocab.txt for which 16 bits are too few."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(LARGE)), "##x", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    ours = load_tokenizer(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = f"7 {LARGE - 1}x É é [MASK] 東"
    assert peer(text)["input_ids"] == [ours.cls_id, *ours.encode(text), ours.sep_id]
    assert (ours.kind, ours.dtype, ours.lower_case) == ("WordPiece", WIDE, False)
    assert ours.vocabulary[str(LARGE - 1)] in ours.encode(text)
    copy = tmp_path / "copy"
    copy.mkdir()
    write_tokenizer(ours, copy)  # without the config.json that names the model
    assert load_tokenizer(copy).identity == ours.identity


def test_older_forms_are_named(tmp_path):
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"")
    with user_error("vocabulary.format", tmp_path / "sentencepiece.bpe.model"):
        load_tokenizer(tmp_path)


def test_a_pair_without_its_second_text_is_one_line(folders, tmp_path):
    file = copied(folders["modernbert"], tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"]["pair"] = content["post_processor"]["single"]
    file.write_text(json.dumps(content))
    with user_error("vocabulary.unsupported", file):
        load_tokenizer(file.parent)


def test_a_frame_outside_of_the_vocabulary_is_one_line(folders, tmp_path):
    file = copied(folders["modernbert"], tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [99_999]
    file.write_text(json.dumps(content))
    with user_error("vocabulary.mismatch", file):
        load_tokenizer(file.parent)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json"])
def test_a_token_that_is_no_text_is_one_line(folders, tmp_path, name):
    folder = copied(folders["modernbert"], tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"extra_token": "\ud800"}))
    if name == "added_tokens.json":
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / name).write_text(json.dumps({"\ud800": 600}))
    with user_error("config.value", folder / name):
        load_tokenizer(folder)


def test_a_class_of_bert_without_a_name_for_cls(tmp_path):
    """Null is as no name; a null for the case is not as no case."""
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(entries) + "\n")
    config = {"tokenizer_class": "BertTokenizer", "cls_token": None, "extra_token": "<extra>"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert (ours.is_plain, ours.cls_id, ours.sep_id) == (False, 2, 3)
    file.write_text(json.dumps(config | {"do_lower_case": None}))
    with user_error("config.value", file, wording=False):
        load_tokenizer(tmp_path)


def test_thousands_of_added_words_keep_their_ids(folders, tmp_path):
    """As `mlbert convert add-words` and then transformers write them."""
    peer = transformers.AutoTokenizer.from_pretrained(folders["modernbert"])
    peer.add_tokens([f"added{number}" for number in range(3000)])
    peer.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    text = "a added7 fox added2999"
    assert ours.encode(text) == peer(text, add_special_tokens=False)["input_ids"]
    assert len(ours.vocabulary) == len(peer)
