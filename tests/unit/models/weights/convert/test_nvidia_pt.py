"""NVIDIA's .pt files: plain, segmented and fused names, the padded vocabulary,
the tied decoder, damage.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlbert.models.weights.weight_files import read_weights
from same_weights import assert_same_tensors
from unit.models.weights.convert.conftest import Call, fused_attention

NAMES = Path(__file__).parents[4] / "assets" / "checkpoints" / "names.txt"
STEM = "bert_model_segment.bert.encoder.layer"
LAST = "bert.encoder.layer.1.output.dense.weight"


@pytest.fixture
def plain(tmp_path, own_folder, mlbert):
    """Return a .pt file that we wrote, with its configuration next to it."""
    out, _ = mlbert("torch-to-nvidia", own_folder, tmp_path / "nvidia" / "model.pt")
    assert "46 taken, 0 dropped, 0 missing" in out
    (tmp_path / "nvidia" / "bert_config.json").write_bytes(
        (own_folder / "bert_config.json").read_bytes()
    )
    return tmp_path / "nvidia" / "model.pt"


def test_round_trip(tmp_path, own_folder, plain, state, mlbert, refused):
    content = torch.load(plain, weights_only=True)
    assert list(content) == ["model"]
    model = content["model"]
    assert len(model) == 47
    assert model["bert.embeddings.word_embeddings.weight"].shape == (200, 32)
    assert model["cls.predictions.bias"].shape == (200,)
    assert torch.equal(
        model["cls.predictions.decoder.weight"], model["bert.embeddings.word_embeddings.weight"]
    )
    assert not model["bert.embeddings.word_embeddings.weight"][197:].any()
    assert torch.equal(model["bert.pooler.dense.weight"], state["bert.pooler.dense.weight"])
    out, _ = mlbert("nvidia-to-torch", plain, tmp_path / "back")
    assert (
        "cls.predictions.decoder.weight: dropped (tied to bert.embeddings.word_embeddings.weight)"
        in out
    )
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), state)
    before = plain.read_bytes()
    refused("torch-to-nvidia", own_folder, plain, code="file.exists", subject=plain)
    assert plain.read_bytes() == before


@pytest.mark.parametrize(
    ("form", "attention"),
    [
        *((form, None) for form in ("plain", "segmented", "fused")),
        ("segmented", ("attention.self.Wqkv", "attention.self.Bqkv")),
        ("segmented", ("attention.self.Wqkv.weight", "attention.self.Wqkv.bias")),
        ("transformer_engine", ("attention.qkv_weight", "attention.qkv_bias")),
    ],
)
def test_names_of_training_programs(tmp_path, plain, mlbert, state, form, attention):
    rows = [line.split() for line in NAMES.read_text().splitlines()]
    names = {own: theirs for _, of, theirs, own in rows if of == form} or {
        own: own for own in state
    }
    prefix = "module." if form == "fused" else ""
    content = {
        prefix + names[own]: state[own]
        for own in state
        if attention is None or ".attention.self." not in own
    }
    if attention:
        content |= fused_attention(state, *(f"{STEM}.{{}}.{name}" for name in attention))
    file = plain.with_name("other.pt")
    torch.save({"model": content}, file)
    out, _ = mlbert("nvidia-to-torch", file, tmp_path / "back")
    assert "0 dropped, 0 missing" in out
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), state)


def test_half_precision_becomes_float32(tmp_path, plain, mlbert, state):
    file = plain.with_name("half.pt")
    torch.save({"model": {name: tensor.half() for name, tensor in state.items()}}, file)
    mlbert("nvidia-to-torch", file, tmp_path / "back")
    rounded = {name: tensor.half().float() for name, tensor in state.items()}
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), rounded)


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_state_dicts_of_other_programs(tmp_path, plain, mlbert, state, key, prefix):
    tensors = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    file = plain.with_name("other.pt")
    torch.save(tensors if key is None else {key: tensors, "epoch": 3}, file)
    out, _ = mlbert("nvidia-to-torch", file, tmp_path / "back")
    assert "0 dropped, 0 missing" in out
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), state)
    assert read_weights(file).tensors.keys() == tensors.keys()  # as INIT_CHECKPOINT


def changed(name, tensor):
    return lambda file, good: {"model": {**good, name: tensor}}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(
            lambda file, good: {
                "model": good,
                "more": Call(os.system, f"touch {file.with_name('ran')}"),
            },
            "checkpoint.unsafe",
            id="payload",
        ),
        pytest.param(
            lambda file, good: {"other": good}, "checkpoint.format", id="unknown container"
        ),
        pytest.param(
            lambda file, good: {"model": {"weight": torch.zeros(2)}},
            "checkpoint.incomplete",
            id="other model",
        ),
        pytest.param(
            lambda file, good: {"model": {k: good[k] for k in good if k != LAST}},
            "checkpoint.incomplete",
            id="missing tensor",
        ),
        pytest.param(
            changed("bert.pooler.dense.weight", torch.zeros(3, 3)),
            "checkpoint.shape",
            id="wrong shape",
        ),
        pytest.param(
            changed(LAST.replace("1", "2"), torch.zeros(3, 3)), "checkpoint.shape", id="third layer"
        ),
        pytest.param(
            changed("cls.predictions.decoder.weight", torch.ones(197, 32)),
            "checkpoint.damaged",
            id="untied",
        ),
        pytest.param(
            changed("bert.pooler.dense.bias", torch.zeros(32).long()),
            "checkpoint.damaged",
            id="integers",
        ),
    ],
)
def test_damage_is_one_line_and_nothing_is_written(tmp_path, plain, state, refused, content, code):
    torch.save(content(plain, state), plain)
    refused("nvidia-to-torch", plain, tmp_path / "back", code=code, subject=plain)
    assert not plain.with_name("ran").exists()


@pytest.mark.parametrize(
    ("name", "code"), [("model.pt", "file.unreadable"), ("bert_config.json", "file.missing")]
)
def test_a_missing_file_is_one_line(tmp_path, plain, refused, name, code):
    plain.with_name(name).unlink()
    refused("nvidia-to-torch", plain, tmp_path / "back", code=code, subject=plain.with_name(name))
