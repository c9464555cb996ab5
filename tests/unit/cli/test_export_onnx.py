"""ONNX files: onnxruntime gives the logits of the model that was exported."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import AnyBert, BertForMaskedLM, BertForSequenceClassification
from mlbert.models.weights.export import write_weights
from mlbert.programs import onnx_export
from same_weights import randomize
from user_errors import assert_error_line

SHAPE = BertConfig(99, 32, 2, 2, 64, max_position_embeddings=40)  # fewer than are timed
ROBERTA = dataclasses.replace(SHAPE, position_offset=2, type_vocab_size=1)
MOSAIC = dataclasses.replace(SHAPE, position_embedding_type="alibi", gated_mlp=True)
MODERN = BertConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=256,
    position_embedding_type="rotary",
    norm_position="pre",
    gated_mlp=True,
    local_attention=16,
    global_attn_every_n_layers=3,
    rope_frequencies="product",
    classifier_pooling="mean",
)
LENGTHS = (40, 11)


def saved(model: AnyBert, folder: Path) -> Path:
    """Write a model; return the folder of ours."""
    write_weights(randomize(model), folder, {}, None)
    return folder / "weights"


def logits_of_file(file: Path, length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the logits of random tokens of this length, and the input."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(length)
    values = {
        "input_ids": draw.integers(2, SHAPE.vocab_size, (3, length)),
        "attention_mask": np.ones((3, length), np.int64),
        "token_type_ids": np.zeros((3, length), np.int64),
    }
    given = {one.name: values[one.name] for one in session.get_inputs()}
    (logits,) = session.run(["logits"], given)
    return logits, given


def check(model: AnyBert, folder: Path, run_mlbert, *words: str) -> str:
    """Export a model, compare it with the Hugging Face folder, and return what was printed."""
    source = saved(model, folder)
    status, printed, complaint = run_mlbert(
        "export", source, "--to", "onnx", "--out", folder / "out", *words
    )
    assert status == 0, complaint
    head = model.architecture.removeprefix("BertFor")
    kind = getattr(transformers, f"AutoModelFor{head}")
    peer = kind.from_pretrained(folder / "huggingface", trust_remote_code=True).eval()
    for length in LENGTHS:
        found, given = logits_of_file(folder / "out/model.onnx", length)
        with torch.no_grad():
            wanted = peer(**{name: torch.tensor(value) for name, value in given.items()}).logits
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)
    return printed


def test_a_bert_is_exported_in_32_and_8_bits(tmp_path, run_mlbert):
    printed = check(BertForMaskedLM(SHAPE), tmp_path, run_mlbert, "--int8")
    names = re.findall(r"^  (\S+):", printed, re.MULTILINE)
    assert names == ["PyTorch", "model.onnx", "model_int8.onnx"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["README.md", "config.json", "model.onnx", "model_int8.onnx"]
    small, large = (
        (tmp_path / "out" / name).stat().st_size for name in ("model_int8.onnx", "model.onnx")
    )
    assert small < large
    exact, _ = logits_of_file(tmp_path / "out/model.onnx", 20)
    rounded, _ = logits_of_file(tmp_path / "out/model_int8.onnx", 20)
    difference = np.abs(exact - rounded).max()
    assert 0 < difference < 0.2 * np.abs(exact).max()
    (said,) = re.findall(r"model\.onnx: .* differ by at most (\S+),", printed)
    assert float(said) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        BertForMaskedLM(MODERN),
        BertForSequenceClassification(MODERN, 3),
        BertForSequenceClassification(ROBERTA, 3),
        BertForMaskedLM(MOSAIC),
    ],
    ids=["modernbert", "modernbert_classifier", "roberta_classifier", "own_class"],
)
def test_other_forms_are_exported(model, tmp_path, run_mlbert):
    check(model, tmp_path, run_mlbert)


def test_wrong_words_are_refused_and_nothing_is_written(tmp_path, run_mlbert):
    source = saved(BertForMaskedLM(SHAPE), tmp_path)
    status, _, complaint = run_mlbert("export", source, "--int8", "--out", tmp_path / "out")
    assert status == 2
    assert_error_line(complaint, "config.conflict", "--int8")
    status, _, complaint = run_mlbert("export", tmp_path / "no", "--to", "onnx", "--out", "x")
    assert status == 2
    (tmp_path / "there").mkdir()
    there = tmp_path / "there"
    status, _, complaint = run_mlbert("export", source, "--to", "onnx", "--out", there)
    assert status == 2
    assert_error_line(complaint, "file.exists", "there")
    (tmp_path / "file").touch()
    for form in ("huggingface", "onnx"):
        inside = tmp_path / "file/out"
        status, _, complaint = run_mlbert("export", source, "--to", form, "--out", inside)
        assert status == 2
        assert_error_line(complaint, "file.unwritable", inside)
    assert not list(tmp_path.glob(".*partial*"))


def test_a_refused_or_killed_export_leaves_nothing(tmp_path, run_mlbert, monkeypatch):
    source = saved(BertForMaskedLM(SHAPE), tmp_path)
    left = tmp_path / ".out.partial"
    left.mkdir()  # by a killed process

    def refuse(*args: object, **settings: object) -> None:
        raise torch.onnx.OnnxExporterError("Failed to convert.\nDetails")

    monkeypatch.setattr(torch.onnx, "export", refuse)
    status, _, complaint = run_mlbert("export", source, "--to", "onnx", "--out", tmp_path / "out")
    assert status == 2
    assert_error_line(complaint, "model.unsupported", "model.onnx")
    assert not left.exists()
    assert not (tmp_path / "out").exists()


def test_the_padding_token_may_be_any_entry(tmp_path):
    """Also the last one, as of a tokenizer to which it was added."""
    saved(BertForMaskedLM(SHAPE), tmp_path)
    model = onnx_export._Network(tmp_path / "huggingface")
    for pad in (0, 7, SHAPE.vocab_size - 1):
        model.pad_token_id = pad
        batch = model.inputs(100, SHAPE.max_position_embeddings, seed=0)
        words = batch["input_ids"][batch["attention_mask"] > 0]
        assert set(words.tolist()) == set(range(SHAPE.vocab_size)) - {pad}
