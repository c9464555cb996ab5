"""Starting weights: each form that INIT_CHECKPOINT may name gives the same model."""

import pytest
import torch
from safetensors.torch import save_file

from mlbert.core.errors import UserError
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.models.huggingface import to_huggingface
from mlbert.models.load import load_weights
from mlbert.models.renaming import padded

SHAPE = BertConfig(
    vocab_size=101,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
)


def model(seed):
    made = BertForPreTraining(SHAPE)
    made.initialize(seed)
    return made


@pytest.fixture
def state():
    return to_huggingface(model(1))


@pytest.mark.parametrize("form", ["file", "folder", "nvidia", "segmented"])
def test_forms(tmp_path, state, form):
    path = tmp_path / ("model.pt" if form in ("nvidia", "segmented") else "model.safetensors")
    if form in ("file", "folder"):
        save_file(state, path)
    elif form == "nvidia":
        rows = padded(state, SHAPE)
        rows["cls.predictions.decoder.weight"] = rows["bert.embeddings.word_embeddings.weight"]
        torch.save({"model": rows}, path)
    else:
        heads = {True: "bert_model_segment.", False: "heads_only_segment."}
        torch.save({"model": {heads[name.startswith("bert.")] + name: value for name, value in state.items()}}, path)
    started = model(2)
    report = load_weights(started, tmp_path if form == "folder" else path)
    assert report.missing == {}
    assert len(report.taken) == 46
    for (name, found), expected in zip(started.named_parameters(), model(1).parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_values_in_the_vocabulary_padding_are_not_taken(tmp_path, state):
    rows = {name: tensor.clone() for name, tensor in padded(state, SHAPE).items()}
    rows["bert.embeddings.word_embeddings.weight"][101:] = 3.0
    torch.save({"model": rows}, tmp_path / "model.pt")
    started = model(2)
    load_weights(started, tmp_path / "model.pt")
    assert not started.bert.embeddings.word_embeddings.weight[101:].any()


def test_missing_heads_stay_as_drawn(tmp_path, state):
    save_file({name: tensor for name, tensor in state.items() if "pooler" not in name}, tmp_path / "a.safetensors")
    started = model(2)
    report = load_weights(started, tmp_path / "a.safetensors")
    assert report.missing == dict.fromkeys(("bert.pooler.dense.weight", "bert.pooler.dense.bias"), "initialised")
    assert torch.equal(started.bert.pooler.dense.weight, model(2).bert.pooler.dense.weight)
    assert f"44 taken, 0 dropped, {len(report.missing)} missing" == report.lines()[-1]


def test_nothing_changes_when_a_tensor_does_not_fit(tmp_path, state):
    save_file({**state, "cls.seq_relationship.bias": torch.zeros(3)}, tmp_path / "a.safetensors")
    started = model(2)
    with pytest.raises(UserError, match=r"cls\.seq_relationship\.bias has shape \[3\], the model wants \[2\]"):
        load_weights(started, tmp_path / "a.safetensors")
    for found, expected in zip(started.parameters(), model(2).parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["model.bin", "model.ckpt-28252"])
def test_other_files_are_sent_to_convert(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match="mlbert convert"):
        load_weights(model(2), tmp_path / name)
