"""A ModernBERT of transformers in the commands that take a model, and back in its own classes."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mlbert.models.fill_mask import open_model
from mlbert.models.weights.huggingface import read_config
from modernbert_peers import SMALL, save_peer
from programs import RunMlbert

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
WORDS = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "."]
VALUES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 4, "local_attention": 8}
CLASSIFIER = "ModernBertForSequenceClassification"
LINE = "a cold [MASK] ."


def save_source(folder: Path, architecture: str = "ModernBertForMaskedLM", **values: Any) -> Path:
    """Save a model with a WordPiece vocabulary; return the folder."""
    save_peer(folder, architecture, **(VALUES | values))
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def logits(folder: Path, line: str = LINE) -> torch.Tensor:
    """Return what transformers computes from a folder, without code of ours."""
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(line, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["ModernBertForMaskedLM", CLASSIFIER])
def test_both_ways_bit_for_bit(tmp_path, run_mlbert: RunMlbert, kind, sharded):
    source = save_source(tmp_path / "peer", kind, tie_word_embeddings=False)
    theirs = load_file(source / "model.safetensors")
    if sharded:
        model = getattr(transformers, kind).from_pretrained(source)
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="20KB")
        assert (source / "model.safetensors.index.json").is_file()
    for words in (
        ["convert", "hf-to-torch", source, tmp_path / "ours"],
        ["convert", "torch-to-hf", tmp_path / "ours", tmp_path / "back"],
        ["export", source, "--out", tmp_path / "exported"],
    ):
        code, out, err = run_mlbert(*words)
        assert code == 0, err
        assert " dropped (" not in out
    for name in ("back", "exported"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == theirs.keys()
        for tensor in theirs:
            assert torch.equal(found[tensor], theirs[tensor]), tensor
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert values["architectures"] == [kind]
        assert "auto_map" not in values
        torch.testing.assert_close(logits(tmp_path / name), logits(source), atol=1e-6, rtol=0)
        assert read_config(tmp_path / name / "config.json") == read_config(source / "config.json")


def test_guesses_are_those_of_transformers(tmp_path, run_mlbert: RunMlbert):
    source = save_source(tmp_path / "peer")
    code, out, err = run_mlbert("fill-mask", source, LINE, "--top", "3")
    assert code == 0, err
    scores = logits(source)[0, -3, : len(WORDS)]
    expected = [WORDS[number] for number in scores.topk(3).indices.tolist()]
    assert [line.split()[1] for line in out.splitlines()] == expected


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [f"{'warm' if n % 2 else 'cold'} {n},{'warm' if n % 2 else 'cold'}" for n in range(40)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(0, 26, (400, 8, 5), generator=draw).tolist()
    lines = [" ".join("".join(LETTERS[n] for n in word) for word in line) for line in letters]
    path.write_text("".join(f"{line}.\n\n" for line in lines))
    return path


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_fine_tuned_models_are_native(tmp_path, rows, run_mlbert: RunMlbert, pooling):
    source = save_source(tmp_path / "peer", classifier_pooling=pooling)
    words = ["--from", source, "--train", rows, "--out", tmp_path / "tuned", "--minutes", "0.05"]
    code, out, err = run_mlbert("finetune", *words)
    assert code == 0, out + err
    tuned = tmp_path / "tuned/run_0/huggingface"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tuned)
    assert type(model).__name__ == CLASSIFIER
    assert model.config.classifier_pooling == pooling
    assert model.config.id2label == {0: "cold", 1: "warm"}
    # Our predictions and transformers' are of the same model.
    predicted = []
    for folder in (tuned, tuned.parent, tuned.with_name("weights")):
        words = ["--predict", rows, "--model", folder, "--out", tmp_path / "p.csv"]
        code, out, err = run_mlbert("finetune", *words)
        assert code == 0, out + err
        predicted.append((tmp_path / "p.csv").read_bytes())
    assert len({*predicted}) == 1
    with (tmp_path / "p.csv").open(encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    tokens = transformers.AutoTokenizer.from_pretrained(tuned)(first["text"], return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        probabilities = model.eval()(**inputs).logits[0].softmax(0)
    assert model.config.id2label[int(probabilities.argmax())] == first["prediction"]
    assert abs(float(probabilities.max()) - float(first["probability"])) < 0.02


def test_pretraining_goes_on_in_the_same_shape(tmp_path, text, run_mlbert: RunMlbert):
    source = save_source(tmp_path / "peer")
    words = [text, "--from", source, "--out", tmp_path / "longer", "--minutes", "0.05"]
    code, out, err = run_mlbert("pretrain", *words)
    assert code == 0, out + err
    model = tmp_path / "longer/model"
    assert read_config(model / "config.json") == read_config(source / "config.json")
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(model)).__name__ == (
        "ModernBertForMaskedLM"
    )
    assert logits(model).isfinite().all()
    # The run's own checkpoint is a model too, in the same shape.
    opened, _, _ = open_model(tmp_path / "longer/model")
    assert opened.config == read_config(source / "config.json")


def test_another_tokenizer_is_kept(tmp_path, run_mlbert: RunMlbert):
    """Byte-level BPE, as ModernBERT's: conversions copy it, and the special tokens' ids."""
    source = tmp_path / "peer"
    special = ["<s>", "</s>", "<pad>"]
    save_peer(source, **(VALUES | {"vocab_size": 256 + 16, "pad_token_id": 258}))
    letters = pre_tokenizers.ByteLevel.alphabet()
    entries = {letter: number for number, letter in enumerate(sorted(letters))}
    bpe = Tokenizer(models.BPE(vocab=entries, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, cls_token=special[0], sep_token=special[1], pad_token=special[2]
    )
    tokenizer.save_pretrained(source)
    for words in (
        ["convert", "hf-to-torch", source, tmp_path / "ours"],
        ["convert", "torch-to-hf", tmp_path / "ours", tmp_path / "back"],
        ["export", source, "--out", tmp_path / "exported"],
    ):
        code, _, err = run_mlbert(*words)
        assert code == 0, err
    expected = tokenizer("Été 東京")["input_ids"]
    for name in ("back", "exported"):
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert found("Été 東京")["input_ids"] == expected
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert values["cls_token_id"] == tokenizer.cls_token_id
        assert values["pad_token_id"] == tokenizer.pad_token_id
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / name)


def test_a_file_that_names_code_is_refused(tmp_path, assert_fails):
    source = save_source(tmp_path / "peer")
    (source / "model.safetensors").unlink()
    torch.save({"model.final_norm.weight": shutil.rmtree}, source / "pytorch_model.bin")
    for words in (["fill-mask", source, LINE], ["convert", "hf-to-torch", source, tmp_path / "o"]):
        assert_fails(words, "checkpoint.unsafe", source / "pytorch_model.bin")


def test_pretraining_starts_from_a_smaller_model(tmp_path, text, run_mlbert: RunMlbert):
    source = save_source(tmp_path / "peer")
    larger = SMALL | VALUES | {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    transformers.ModernBertConfig(**larger).save_pretrained(tmp_path / "shape")
    shape = tmp_path / "shape/config.json"
    out = tmp_path / "large"
    words = [text, "--grow-from", source, "--shape", shape, "--out", out, "--minutes", "0.05"]
    code, _, err = run_mlbert("pretrain", *words, "--dry-run")
    assert code == 0, err
    assert not out.exists()
    code, shown, err = run_mlbert("pretrain", *words)
    assert code == 0, shown + err
    assert read_config(out / "model/config.json") == read_config(shape)
    weights = (out / "grown/model.safetensors").stat().st_mtime_ns
    words[-1] = "0.1"
    code, shown, err = run_mlbert("pretrain", *words)
    assert code == 0, shown + err
    assert "will be extended" in shown
    assert (out / "grown/model.safetensors").stat().st_mtime_ns == weights
    words = ["convert", "grow", source, tmp_path / "grown", "--config", shape]
    code, shown, err = run_mlbert(*words)
    assert code == 0, shown + err
    assert (
        load_file(tmp_path / "grown/model.safetensors").keys()
        == load_file(out / "grown/model.safetensors").keys()
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--grow-from", "peer"], "config.missing"),
        (["--shape", "config.json"], "config.missing"),
        (["--grow-from", "peer", "--shape", "x.json", "--from", "peer"], "config.conflict"),
        (["--grow-from", "peer", "--shape", "x.json", "--size", "tiny"], "config.conflict"),
    ],
)
def test_growing_needs_a_model_and_a_shape(tmp_path, assert_fails, words, code):
    subject = "--from and --grow-from" if "--from" in words else "--grow-from"
    if code == "config.missing":
        subject = "mlbert pretrain"
    assert_fails(["pretrain", tmp_path, "--out", tmp_path / "out", *words], code, subject)
