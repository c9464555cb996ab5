"""Models with added words, in transformers: the same numbers for text without them."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mlbert.data.formats.added_words import add_words
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare.tokenizer_folder import write_library
from mlbert.data.prepare.tokenizer_training import train_tokenizer
from mlbert.models.weights.extend_vocabulary import extend_vocabulary
from modernbert_peers import save_peer
from programs import RunMlbert, write_files

TEXT = "the hepatic veins carry blood, said the doctor twice"
WORDS = "hepatitis\ncirrhosis\nvenous\n"
ROWS = 448
BERT = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def save_source(folder: Path, kind: str) -> Path:
    """Save a model with random weights and a tokenizer; return the folder."""
    if kind == "bert":
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
        torch.nn.init.normal_(model.cls.predictions.bias)
        model.save_pretrained(folder)
    else:
        save_peer(folder, vocab_size=ROWS, tie_word_embeddings=kind == "modernbert")
    tokenizer = train_tokenizer("wordpiece" if kind == "bert" else "bpe", [TEXT] * 30, ROWS)
    write_library(tokenizer.library, folder, {"model_max_length": 64})
    return folder


def logits(folder: Path, text: str) -> tuple[list[int], torch.Tensor]:
    """Return ids and logits of transformers."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        found = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return tokens["input_ids"][0].tolist(), found.logits[0]


@pytest.mark.parametrize("kind", ["bert", "modernbert", "untied"])
def test_text_without_the_words_is_unchanged(
    kind: str, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    source = save_source(tmp_path / "old", kind)
    write_files(tmp_path, {"words.txt": WORDS})
    target = tmp_path / "new"
    status, out, err = run_mlbert(
        "convert", "add-words", source, target, "--words", tmp_path / "words.txt"
    )
    assert status == 0, err
    assert "3 words added, each one token" in out
    ids, old = logits(source, f"{TEXT} [MASK]")
    new_ids, new = logits(target, f"{TEXT} [MASK]")
    assert new_ids == ids
    added = add_words(load_tokenizer(source), WORDS.split(), ROWS)
    assert new.shape[1] == added.size == ROWS, "unused entries are enough"
    kept = [number for number in range(ROWS) if number not in added.pieces]
    torch.testing.assert_close(new[:, kept], old[:, kept], rtol=1e-5, atol=1e-5)
    for number, pieces in added.pieces.items():
        mean = old[:, pieces].mean(1)
        torch.testing.assert_close(new[:, number], mean, rtol=1e-4, atol=1e-4)
    with_word, _ = logits(target, "the hepatitis [MASK]")
    assert len(with_word) == len(logits(target, "the [MASK]")[0]) + 1
    name = next(name for name in load_file(source / "model.safetensors") if "embeddings" in name)
    assert json.loads((target / "config.json").read_text())["vocab_size"] == ROWS, name
    status, out, err = run_mlbert("fill-mask", target, "the hepatitis [MASK]")
    assert status == 0, err


def test_rows_that_are_added() -> None:
    state = {
        "bert.embeddings.word_embeddings.weight": torch.arange(8.0).reshape(4, 2),
        "cls.predictions.bias": torch.tensor([3.0, -2.0, 0.0, 1.0]),
        "bert.other": torch.ones(4),
    }
    new = extend_vocabulary(state, {3: [0, 2], 4: [1]}, 6)
    rows = new["bert.embeddings.word_embeddings.weight"]
    assert rows.tolist() == [[0, 1], [2, 3], [4, 5], [2, 3], [2, 3], [0, 0]]
    assert new["cls.predictions.bias"].tolist() == [3, -2, 0, 1.5, -2, -2]
    assert torch.equal(new["bert.other"], state["bert.other"])


def test_what_is_refused(tmp_path: Path, assert_fails) -> None:
    source = save_source(tmp_path / "old", "modernbert")
    write_files(tmp_path, {"words.txt": "two words\n"})
    words = ["convert", "add-words", source, tmp_path / "new", "--words"]
    assert_fails([*words, tmp_path / "words.txt"], "data.row", "words.txt")
    (source / "tokenizer.json").unlink()
    (tmp_path / "words.txt").write_text("word\n")
    assert_fails([*words, tmp_path / "words.txt"], "file.missing", "vocab.txt")
    assert not (tmp_path / "new").exists()
