"""Composer's checkpoints in and out: Hugging Face BERT, one matrix for query, key and value, MosaicBERT refused."""

from __future__ import annotations

import datetime
import os
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

from mlbert.models.huggingface import huggingface_config
from mlbert.models.renaming import padded

HEADS = ("bert.pooler.", "cls.seq_relationship.")


class _Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def container(model, **more):
    """A checkpoint as Composer keeps one: weights below objects that weights_only loading refuses."""
    timestamp = {"Timestamp": {"batch": 4, "total_wct": datetime.timedelta(seconds=2)}}
    return {"state": {"model": OrderedDict(model), "timestamp": timestamp, **more}, "rng": [{"cuda": []}]}


def masked_lm(state):
    """Names and tensors of their masked-LM model: no pooler, no next-sentence head, the decoder's copies."""
    model = {f"model.{name}": tensor for name, tensor in state.items() if not name.startswith(HEADS)}
    model["model.cls.predictions.decoder.weight"] = model["model.bert.embeddings.word_embeddings.weight"]
    model["model.cls.predictions.decoder.bias"] = model["model.cls.predictions.bias"]
    return model


def fused(state):
    """The methods form: query, key and value in one matrix, only the decoder's bias."""
    model = {name: tensor for name, tensor in masked_lm(state).items() if ".attention.self." not in name}
    for layer in range(2):
        stem = f"model.bert.encoder.layer.{layer}.attention.self"
        for kind in ("weight", "bias"):
            own = [f"{stem}.{part}.{kind}".removeprefix("model.") for part in ("query", "key", "value")]
            model[f"{stem}.Wqkv.{kind}"] = torch.cat([state[name] for name in own])
    del model["model.cls.predictions.bias"]
    return model


@pytest.fixture
def folder(tmp_path, shape):
    path = tmp_path / "composer"
    path.mkdir()
    (path / "bert_config.json").write_text(shape.to_json())
    return path


@pytest.mark.parametrize("form", [masked_lm, fused])
@pytest.mark.parametrize("rows", ["true", "padded"])
def test_their_checkpoints_are_read(tmp_path, folder, shape, state, mlbert, form, rows):
    source = padded(state, shape) if rows == "padded" else state
    torch.save(container(form(source)), folder / "ep0-ba4-rank0.pt")
    code, out, error = mlbert("mosaic-to-torch", folder / "ep0-ba4-rank0.pt", tmp_path / "ours")
    assert code == 0, error
    assert "bert.pooler.dense.weight: missing (initialised)" in out
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        if not name.startswith(HEADS):
            assert torch.equal(found[name], tensor), name


def test_shape_comes_from_the_checkpoint_itself(tmp_path, folder, shape, state, mlbert):
    (folder / "bert_config.json").unlink()
    content = {"config": {"file_extension": ".json", "content": huggingface_config(shape)}}
    torch.save(container(masked_lm(state), integrations={"huggingface": {"model": content}}), folder / "a.pt")
    assert mlbert("mosaic-to-torch", folder / "a.pt", tmp_path / "ours")[0] == 0
    assert (tmp_path / "ours" / "bert_config.json").read_text() == shape.to_json()


def test_written_container(tmp_path, own_folder, state, mlbert):
    code, out, error = mlbert("torch-to-mosaic", own_folder, tmp_path / "start.pt")
    assert code == 0, error
    assert "cls.seq_relationship.bias: dropped (Composer's masked-LM model has no such part)" in out
    assert "42 taken, 4 dropped, 0 missing" in out
    content = torch.load(tmp_path / "start.pt", weights_only=True)
    model = content["state"]["model"]
    assert model.keys() == masked_lm(state).keys()
    assert model["model.bert.embeddings.word_embeddings.weight"].shape == (197, 32)
    for name, tensor in masked_lm(state).items():
        assert torch.equal(model[name], tensor), name


def test_round_trip(tmp_path, own_folder, state, mlbert):
    mlbert("torch-to-mosaic", own_folder, tmp_path / "start.pt")
    config = own_folder / "bert_config.json"
    assert mlbert("mosaic-to-torch", tmp_path / "start.pt", tmp_path / "back", "--config", config)[0] == 0
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in state.items():
        assert name.startswith(HEADS) or torch.equal(found[name], tensor), name


def mosaic_bert(file, state):
    model = fused(state)
    model["model.bert.encoder.layer.0.mlp.gated_layers.weight"] = torch.zeros(96, 32)
    torch.save(container(model), file)
    return ("is a MosaicBERT", "gated_layers", "ALiBi")


def forbidden(file, state):
    torch.save(container(masked_lm(state), extra=_Payload(f"touch {file.with_name('ran')}")), file)
    return ("system, which is not loaded",)


def no_model(file, state):
    torch.save({"state": {"optimizers": {}}}, file)
    return ("has no state.model",)


def no_container(file, state):
    torch.save([1, 2], file)
    return ("has no state.model",)


def missing(file, state):
    model = masked_lm(state)
    del model["model.bert.embeddings.position_embeddings.weight"]
    torch.save(container(model), file)
    return ("bert.embeddings.position_embeddings.weight is missing",)


def wrong_shape(file, state):
    torch.save(container({**fused(state), "model.bert.encoder.layer.0.attention.self.Wqkv.bias": torch.zeros(8)}), file)
    return ("Wqkv.bias has shape [8], the model wants [96]",)


def truncated(file, state):
    torch.save(container(masked_lm(state)), file)
    file.write_bytes(file.read_bytes()[:5000])
    return ("damaged or no PyTorch file",)


def gone(file, state):
    return ("No such file",)


@pytest.mark.parametrize(
    "damage", [mosaic_bert, forbidden, no_model, no_container, missing, wrong_shape, truncated, gone]
)
def test_damage_is_one_line_and_nothing_is_written(tmp_path, folder, state, refused, damage):
    named = damage(folder / "a.pt", state)
    refused("mosaic-to-torch", folder / "a.pt", tmp_path / "ours", target=tmp_path / "ours", named=named)
    assert not (folder / "ran").exists()
