"""Models with a tokenizer that is not WordPiece, from end to end: fill-mask, pretrain, finetune."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Library

from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.models.fill_mask import open_model
from programs import RunMlbert, run_script
from tokenizer_kinds import ENGLISH, TEXTS, gemma, modernbert, roberta, with_entries

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "global_attn_every_n_layers": 2,
    "local_attention": 16,
}
WORDS = ENGLISH.rstrip(".").split()
LARGE = 256_000  # entries, as mmBERT's
MANY_SENTENCES = 1600


def save_model(folder: Path, vocab_size: int | None = None) -> Path:
    """Save a ModernBERT with random weights next to the tokenizer in a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = vocab_size or 64 * -(-len(tokenizer) // 64)
    ids = {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
    ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    ids |= {"pad_token_id": tokenizer.pad_token_id if rows > len(tokenizer) else 0}
    config = transformers.ModernBertConfig(
        vocab_size=rows, max_position_embeddings=128, **ids, **SHAPE
    )
    torch.manual_seed(0)
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    return folder


def guesses_of_transformers(folder: Path, text: str, top: int) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        scores = model(**inputs).logits[0, place, : len(tokenizer)]
    return [tokenizer.decode([number]).strip() for number in scores.topk(top).indices.tolist()]


def assert_same_guesses(run_mlbert: RunMlbert, source: Path, text: str) -> None:
    """Compare `fill-mask` with transformers; a guess that is a part of a character is not shown
    alike.
    """
    code, out, err = run_mlbert("fill-mask", source, text, "--top", "3")
    assert code == 0, err
    expected = guesses_of_transformers(source, text, 3)
    found = [line.split("  ", 1)[1] for line in out.splitlines()]
    for one, other in zip(found, expected, strict=True):
        assert one == other or "\ufffd" in other or not other


def assert_same_model(ours: Path, text: str) -> None:
    """Compare our logits of a folder with those of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ours)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(ours).eval()
    model, _, own = open_model(ours)
    model.train(False)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    row = [own.cls_id, *own.encode(text), own.sep_id]
    assert inputs["input_ids"][0].tolist() == row
    places = range(len(row))
    rows = Ragged.from_rows([(row, len(row), False, places, row)], own.dtype)
    batch = HostBatch.of_sequences(rows, np.zeros(1, np.int64), len(row)).to("cpu")
    with torch.no_grad():
        expected = theirs(**inputs).logits[0]
        found = model(batch, None).masked[:, : expected.shape[1]]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Many different sentences, some with the names of special tokens and line ends."""
    draw = torch.Generator().manual_seed(0)
    orders = torch.rand((MANY_SENTENCES, len(WORDS)), generator=draw).argsort(1)[:, :9].tolist()
    lines = [" ".join(WORDS[place] for place in order) for order in orders]
    path = tmp_path / "text.txt"
    body = "".join(f"{line}. {TEXTS[n % 5][:20]}\n\n" for n, line in enumerate(lines))
    path.write_text(body, encoding="utf-8")
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [f"{'fox' if n % 2 else 'quick'} é {n},{'a' if n % 2 else 'b'}" for n in range(40)]
    path.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("write", [modernbert, gemma])
def test_fill_mask(tmp_path, run_mlbert: RunMlbert, write):
    source = save_model(write(tmp_path / "peer"))
    mask = load_tokenizer(source).mask_token
    for text in (f"The quick {mask} is here.", f"{mask} fox", f"a fox{mask}"):
        assert_same_guesses(run_mlbert, source, text)
    code, out, err = run_mlbert("fill-mask", source, "The quick [MASK] is here.")
    assert (code, len(out.splitlines())) == (0, 5), err


def test_a_roberta_fills_its_mask(tmp_path, run_mlbert: RunMlbert):
    source = roberta(tmp_path / "peer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=66,
        type_vocab_size=1,
    )
    torch.manual_seed(0)
    transformers.RobertaForMaskedLM(config).save_pretrained(source)
    text = "The quick <mask> is here."
    assert_same_guesses(run_mlbert, source, text)


def test_sets_of_texts_and_tokens(tmp_path, tree_root, text, capsys):
    """MosaicBERT's converter and reader with a byte-level tokenizer."""
    source = modernbert(tmp_path / "tokenizer")
    programs = tree_root / "benchmarks/mosaic_bert/common"
    out = tmp_path / "set"
    words = ["--dataset", "text", "--path", text, "--out_root", out, "--splits", "val"]
    words += ["--concat_tokens", 32, "--tokenizer", source]
    assert run_script(programs / "convert_dataset.py", *words) == 0, capsys.readouterr().err
    index = json.loads((out / "val/index.json").read_text())
    assert index["vocabulary_sha256"] == load_tokenizer(source).sha256
    words = ["--tokenizer", source, "--local_path", out, "--split", "val"]
    assert run_script(programs / "text_data.py", *words) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "#### batch" in shown
    assert "the fox" in shown
    other = gemma(tmp_path / "other")
    words = ["--tokenizer", other, "--local_path", out, "--split", "val"]
    assert run_script(programs / "text_data.py", *words) == 2
    assert "has tokens from a different vocabulary" in capsys.readouterr().err


def test_a_text_needs_the_mask_of_the_tokenizer(tmp_path, assert_fails):
    source = save_model(gemma(tmp_path / "peer"))
    assert_fails(["fill-mask", source, "no mask"], "config.value", "text 'no mask'")
    assert_fails(["fill-mask", source, "<mask> <mask>"], "config.value", "text '<mask> <mask>'")


def test_pretraining_starts_from_a_byte_level_model(tmp_path, text, rows, run_mlbert: RunMlbert):
    source = save_model(modernbert(tmp_path / "peer"))
    words = [text, "--from", source, "--out", tmp_path / "longer", "--minutes", "0.05"]
    code, out, err = run_mlbert("pretrain", *words)
    assert code == 0, out + err
    assert "0.00% of these unknown" in out
    assert "[MASK]" in out
    model = tmp_path / "longer/model"
    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        assert (model / name).read_bytes() == (source / name).read_bytes()
    values = json.loads((model / "config.json").read_text())
    peer = transformers.AutoTokenizer.from_pretrained(source)
    assert values["pad_token_id"] == peer.pad_token_id
    assert values["vocab_size"] == 64 * -(-len(peer) // 64)
    exported = transformers.AutoTokenizer.from_pretrained(model)
    for one in TEXTS:
        assert exported(one)["input_ids"] == peer(one)["input_ids"]
    assert_same_model(model, TEXTS[0])


@pytest.mark.slow
@pytest.mark.parametrize("write", [modernbert, roberta])
def test_pretraining_with_a_tokenizer_and_finetuning(
    tmp_path, text, rows, run_mlbert: RunMlbert, write
):
    tokenizer = write(tmp_path / "tokenizer")
    words = [text, "--tokenizer", tokenizer, "--size", "tiny", "--out", tmp_path / "new"]
    code, out, err = run_mlbert("pretrain", *words, "--minutes", "0.05")
    assert code == 0, out + err
    assert "tokenizer: BPE" in out
    model = tmp_path / "new/model"
    assert_same_model(model, TEXTS[0])
    mask = load_tokenizer(tokenizer).mask_token
    code, out, err = run_mlbert("fill-mask", model, f"The quick brown {mask} is here.")
    assert (code, len(out.splitlines())) == (0, 5), err
    words = ["--from", model, "--train", rows, "--out", tmp_path / "tuned", "--minutes", "0.05"]
    code, out, err = run_mlbert("finetune", *words)
    assert code == 0, out + err
    tuned = tmp_path / "tuned/run_0"
    words = ["--predict", rows, "--model", tuned, "--out", tmp_path / "p.csv"]
    code, out, err = run_mlbert("finetune", *words)
    assert code == 0, out + err
    peer = transformers.AutoTokenizer.from_pretrained(tokenizer)
    found = transformers.AutoTokenizer.from_pretrained(tuned / "huggingface")
    assert [found(one)["input_ids"] for one in TEXTS] == [peer(one)["input_ids"] for one in TEXTS]


@pytest.mark.slow
def test_a_vocabulary_as_large_as_mmberts(tmp_path, text, rows, run_mlbert: RunMlbert):
    """Most entries are never used, and all words have ids above 65,536."""
    source = gemma(tmp_path / "peer")
    file = source / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    added = {token["content"] for token in content["added_tokens"]} - vocab.keys()
    merged = [entry for entry in vocab if entry not in ("<pad>", "<eos>", "<bos>", "<unk>")]
    special = [entry for entry in vocab if entry not in merged]
    filler = [f"filler {number}" for number in range(LARGE - len(vocab) - len(added))]
    order = [*special, *filler, *merged]
    content["model"]["vocab"] = {entry: number for number, entry in enumerate(order)}
    first_added = len(order)
    for token in content["added_tokens"]:
        number = content["model"]["vocab"].get(token["content"], first_added)
        first_added += number == first_added
        token["id"] = number
    file.write_text(json.dumps(content))
    file.write_text(Library.from_str(with_entries(json.dumps(content), []).to_str()).to_str())
    save_model(source, LARGE)
    ours = load_tokenizer(source)
    assert ours.vocab_size == LARGE
    assert min(ours.encode("The fox")) > 1 << 16
    peer = transformers.AutoTokenizer.from_pretrained(source)
    for one in TEXTS:
        assert peer(one)["input_ids"] == [ours.cls_id, *ours.encode(one), ours.sep_id]
    words = [text, "--from", source, "--out", tmp_path / "longer", "--minutes", "0.1"]
    code, out, err = run_mlbert("pretrain", *words)
    assert code == 0, out + err
    model = tmp_path / "longer/model"
    assert_same_model(model, TEXTS[0])
    words = ["--from", model, "--train", rows, "--out", tmp_path / "tuned", "--minutes", "0.1"]
    code, out, err = run_mlbert("finetune", *words)
    assert code == 0, out + err


def test_a_model_with_fewer_rows_than_the_tokenizer_is_refused(tmp_path, text, assert_fails):
    source = save_model(modernbert(tmp_path / "peer"), 64)
    for words in (
        ["fill-mask", source, "a [MASK]"],
        ["pretrain", text, "--from", source, "--out", tmp_path / "out", "--dry-run"],
    ):
        assert_fails(words, "vocabulary.mismatch", source / "tokenizer.json")
