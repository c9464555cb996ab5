"""Weights written at the end of a run: Hugging Face reads what it has a shape for, ours come back in any shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import config_from_huggingface, model_config, padded_inputs
from mlbert.models.weights.load import load_weights
from same_weights import assert_same_parameters

SHAPE = BertConfig(99, 32, 2, 2, 64, max_position_embeddings=32)
FREE = dataclasses.replace(SHAPE, tie_word_embeddings=False)
MOSAIC = dataclasses.replace(SHAPE, position_embedding_type="alibi", gated_mlp=True)


def models() -> list[Any]:
    made = [
        BertForPreTraining(SHAPE),
        BertForMaskedLM(FREE),
        BertForSequenceClassification(SHAPE, 3),
        BertForSequenceClassification(SHAPE, 1),
    ]
    for model in made:
        model.initialize(1)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return made


@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_hugging_face_reads_its_copy(tmp_path: Path, model: Any) -> None:
    write_weights(model, tmp_path, {"steps": 3}, None)
    assert "| steps | 3 |" in (tmp_path / "huggingface/README.md").read_text()
    peer = getattr(transformers, type(model).__name__).from_pretrained(tmp_path / "huggingface").eval()
    batch = made_up_batches(3, seed=1, vocab_size=99, max_tokens=32)[0].to("cpu")
    inputs = padded_inputs(batch)
    with torch.no_grad():
        found = model(batch, None)[0][:, : SHAPE.vocab_size]
        expected = peer(**{k: inputs[k] for k in ("input_ids", "token_type_ids", "attention_mask")})[0]
    expected = expected if hasattr(model, "classifier") else expected[inputs["labels"] != -100]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert config_from_huggingface(model_config(model)) == model.config


@pytest.mark.parametrize("shape", [FREE, MOSAIC, dataclasses.replace(MOSAIC, norm_position="pre")])
def test_our_weights_come_back(tmp_path: Path, shape: BertConfig) -> None:
    model = BertForPreTraining(shape)
    model.initialize(1)
    write_weights(model, tmp_path, {}, None)
    again = BertForPreTraining(BertConfig.from_json(tmp_path / "weights/bert_config.json"))
    again.initialize(2)
    report = load_weights(again, tmp_path / "weights")
    assert report.missing == report.dropped == {}
    assert_same_parameters(again, model)


def test_a_shape_that_hugging_face_lacks_has_no_copy_and_is_reported(tmp_path: Path) -> None:
    model = BertForMaskedLM(MOSAIC)
    model.initialize(1)
    write_weights(model, tmp_path, {}, None)
    assert not (tmp_path / "huggingface").exists()
    assert "no copy: its BERT has no ALiBi and no gated" in (tmp_path / "weights/README.md").read_text()


@pytest.mark.parametrize("words", [None, {"do_lower_case": True}, {"do_lower_case": False}])
def test_the_tokenizer_keeps_the_case_that_the_text_was_read_in(tmp_path: Path, words: dict[str, bool] | None) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The"]))
    if words is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    model = BertForMaskedLM(SHAPE)
    model.initialize(1)
    write_weights(model, tmp_path / "run", {}, vocabulary)
    peer = transformers.BertTokenizer.from_pretrained(tmp_path / "run/huggingface")
    ours = load_tokenizer(tmp_path / "run/weights")
    is_lower = words is None or words["do_lower_case"]
    assert peer("The")["input_ids"] == [2, 5 if is_lower else 6, 3]
    assert ours.encode("The") == [5 if is_lower else 6]
    assert peer.model_max_length == SHAPE.max_position_embeddings
