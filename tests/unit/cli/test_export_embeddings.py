"""Folders for embeddings: sentence-transformers computes the mean of our own hidden states, and
other programs find what their sources require.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tokenizers
import torch
from safetensors import safe_open

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.models.bert import AnyBert, BertForMaskedLM, BertForPreTraining
from mlbert.models.fill_mask import open_model
from mlbert.models.weights.export import write_weights
from programs import RunMlbert
from same_weights import randomize

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sun", "was", "near", "##er", "river"]
TEXTS = ["the sun was near", "a river", "The sun was nearer river the the sun"]
POSITIONS = 40
BERT = BertConfig(
    vocab_size=len(WORDS),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=POSITIONS,
    hidden_act="gelu_erf",
)
ROBERTA = dataclasses.replace(BERT, position_offset=1, type_vocab_size=1)  # [PAD] is entry 0
MOSAIC = dataclasses.replace(BERT, position_embedding_type="alibi", gated_mlp=True)
OF_OWN_TEXT = dataclasses.replace(
    BERT, hidden_act="gelu", position_embedding_type="rotary", norm_position="pre", gated_mlp=True
)
MODERN = dataclasses.replace(
    OF_OWN_TEXT,
    hidden_act="gelu_erf",
    attention_bias=False,
    mlp_bias=False,
    norm_bias=False,
    classifier_bias=False,
    num_hidden_layers=4,
    local_attention=16,
    global_attn_every_n_layers=3,
    rope_frequencies="product",
    classifier_pooling="mean",
)
SHAPES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "mosaic": MOSAIC,
    "own_text": OF_OWN_TEXT,
    "modern": MODERN,
}


def of_shape(shape: BertConfig) -> AnyBert:
    """Return a pre-training model with all heads that the shape can have."""
    return BertForMaskedLM(shape) if shape.is_rotary else BertForPreTraining(shape)


@pytest.fixture
def export(tmp_path: Path, run_mlbert: RunMlbert) -> Callable[..., tuple[Path, str]]:
    """Return export(model), which writes a model, exports it, and returns the folder and what was
    printed.
    """

    def run(model: AnyBert, source: str = "weights") -> tuple[Path, str]:
        vocabulary = tmp_path / "vocab.txt"
        vocabulary.write_text("\n".join(WORDS) + "\n")
        write_weights(randomize(model), tmp_path, {"steps": 3}, vocabulary)
        words = ["--to", "sentence-transformers", "--out", tmp_path / "out"]
        status, said, complaint = run_mlbert("export", tmp_path / source, *words)
        assert status == 0, complaint
        return tmp_path / "out", said

    return run


@torch.no_grad()
def own_embeddings(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Return the mean of each text's last hidden states by our own model, float32 [S, D]."""
    model, _, tokenizer = open_model(folder)
    rows = []
    for text in texts:
        tokens = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
        rows.append((tokens, len(tokens), False, [], []))
    ragged = Ragged.from_rows(rows, tokenizer.dtype)
    longest = max(len(tokens) for tokens, *_ in rows)
    batch = HostBatch.of_sequences(ragged, np.arange(len(rows)), longest)
    hidden = model.bert(batch.to(torch.device("cpu")), None, None)  # type: ignore[attr-defined]
    parts = hidden.split([len(tokens) for tokens, *_ in rows])
    return torch.stack([part.mean(0) for part in parts]).numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_sentence_transformers_has_our_embeddings(name: str, export, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder, said = export(BertForMaskedLM(SHAPES[name]))
    assert f"wrote {folder}" in said
    peer = SentenceTransformer(str(folder), device="cpu", trust_remote_code=name == "mosaic")
    assert peer.max_seq_length == POSITIONS
    found = peer.encode(TEXTS)
    np.testing.assert_allclose(found, own_embeddings(tmp_path / "weights", TEXTS), atol=1e-5)
    long = "the " * 3 * POSITIONS
    assert np.isfinite(peer.encode(long)).all(), "it is cut"
    again = own_embeddings(folder, TEXTS)  # a run starts from this folder, too
    np.testing.assert_allclose(again, found, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("bert", None),
        ("roberta", None),
        ("modern", None),
        ("own_text", "ignores the biases of its norms"),
        ("mosaic", "only sentence-transformers reads this model"),
    ],
)
def test_servers_find_what_they_require(name: str, warning: str | None, export) -> None:
    """What the public sources of text-embeddings-inference read from a folder; the program itself
    is not installed here.
    """
    folder, said = export(of_shape(SHAPES[name]), "huggingface")
    assert ("warning" in said) == (warning is not None)
    assert (warning or "wrote") in said
    config = json.loads((folder / "config.json").read_text())
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
    length = json.loads((folder / "sentence_bert_config.json").read_text())
    assert length["max_seq_length"] == POSITIONS
    assert not config["architectures"][0].endswith(("Classification", "MaskedLM", "PreTraining"))
    for number in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id"):
        assert type(config[number]) is int, number
    if config["model_type"] == "modernbert":
        check_modernbert(config)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    first = "tok_embeddings" if config["model_type"] == "modernbert" else "word_embeddings"
    assert f"embeddings.{first}.weight" in names
    assert not any(name.startswith(("bert.", "model.", "roberta.", "cls.")) for name in names)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("The sun").tokens == ["[CLS]", "the", "sun", "[SEP]"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == POSITIONS


def check_modernbert(config: dict[str, Any]) -> None:
    """Assert that the values are there without which text-embeddings-inference refuses a file."""
    tokens = {"cls": "[CLS]", "sep": "[SEP]", "bos": "[CLS]", "eos": "[SEP]", "pad": "[PAD]"}
    for name, token in tokens.items():
        assert config[f"{name}_token_id"] == WORDS.index(token)
    for name in ("global_attn_every_n_layers", "local_attention", "max_position_embeddings"):
        assert config[name] > 0
    for name in ("global_rope_theta", "local_rope_theta", "norm_eps", "initializer_cutoff_factor"):
        assert config[name] > 0
    for name in ("norm_bias", "attention_bias"):
        assert type(config[name]) is bool
    assert {"hidden_activation", "classifier_activation", "attention_dropout"} <= config.keys()


@pytest.mark.slow
def test_embeddings_in_onnx(export, run_mlbert: RunMlbert, tmp_path: Path) -> None:
    folder, _ = export(BertForMaskedLM(MODERN))
    words = ["--to", "onnx", "--int8", "--out", tmp_path / "onnx"]
    status, said, complaint = run_mlbert("export", folder, *words)
    assert status == 0, complaint
    assert said.count("tokens' vectors have a cosine with PyTorch's of at least") == 2
    session = onnxruntime.InferenceSession(tmp_path / "onnx/model.onnx")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "onnx/tokenizer.json"))
    for text, wanted in zip(TEXTS, own_embeddings(folder, TEXTS), strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (hidden,) = session.run(["last_hidden_state"], given)
        np.testing.assert_allclose(hidden[0].mean(0), wanted, atol=1e-4)


def test_what_is_no_mean_and_what_has_no_head_is_refused(
    export, assert_fails: Callable[..., str], tmp_path: Path
) -> None:
    folder, _ = export(BertForMaskedLM(BERT))
    (folder / "modules.json").rename(folder / "modules")
    out = tmp_path / "again"
    assert_fails(("export", folder, "--to", "onnx", "--out", out), "checkpoint.shape", folder)
    words = ("export", folder, "--to", "sentence-transformers", "--out", out)
    modules = json.loads((folder / "modules").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*modules, dense]))
    assert_fails(words, "model.unsupported", "modules.json")
    (folder / "modules.json").write_text(json.dumps({"0": "text"}))
    assert_fails(words, "file.json", "modules.json")
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = folder / "1_Pooling/config.json"
    of_first = json.loads(pooling.read_text()) | {"pooling_mode_cls_token": True}
    pooling.write_text(json.dumps(of_first))
    assert_fails(words, "model.unsupported", "modules.json")
    assert not out.exists()
