"""Composer's checkpoints in and out: Hugging Face BERT, one matrix for query,
key and value, MosaicBERT.
"""

import dataclasses
import datetime
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.objectives import MaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.load import load_weights
from mlbert.models.weights.weight_files import padded, read_composer, write_composer
from padded_batches import unpadded
from same_weights import assert_same_parameters, assert_same_tensors, randomize
from unit.models.weights.convert.conftest import Call, fused_attention

HEADS = ("bert.pooler.", "cls.seq_relationship.")
ASSETS = Path(__file__).parents[4] / "assets/composer"
PUBLISHED = ASSETS / "ep0-ba4-rank0.pt"
POSITIONS = "model.bert.embeddings.position_embeddings.weight"
BIASES = "model.bert.encoder.layer.0.attention.self.Wqkv.bias"


def container(model, **more):
    """Return a checkpoint as Composer saves it: weights among objects
    that weights_only loading refuses.
    """
    timestamp = {"Timestamp": {"batch": 4, "total_wct": datetime.timedelta(seconds=2)}}
    return {
        "state": {"model": OrderedDict(model), "timestamp": timestamp, **more},
        "rng": [{"cuda": []}],
    }


def masked_lm(state):
    """Names and tensors of their masked-LM model: no pooler, no next-sentence head,
    the decoder's copies.
    """
    model = {
        f"model.{name}": tensor for name, tensor in state.items() if not name.startswith(HEADS)
    }
    model["model.cls.predictions.decoder.weight"] = model[
        "model.bert.embeddings.word_embeddings.weight"
    ]
    model["model.cls.predictions.decoder.bias"] = model["model.cls.predictions.bias"]
    return model


def fused(state):
    """The methods form: query, key and value in one matrix, only the decoder's bias."""
    model = {
        name: tensor for name, tensor in masked_lm(state).items() if ".attention.self." not in name
    }
    del model["model.cls.predictions.bias"]
    stem = "model.bert.encoder.layer.{}.attention.self.Wqkv"
    return model | fused_attention(state, f"{stem}.weight", f"{stem}.bias")


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
    out, _ = mlbert("composer-to-torch", folder / "ep0-ba4-rank0.pt", tmp_path / "ours")
    assert ", 0 missing" in out
    expected = {name: tensor for name, tensor in state.items() if not name.startswith(HEADS)}
    assert_same_tensors(load_file(tmp_path / "ours" / "model.safetensors"), expected)


def test_written_container(tmp_path, own_folder, state, mlbert):
    out, _ = mlbert("torch-to-composer", own_folder, tmp_path / "start.pt")
    assert "cls.seq_relationship.bias: dropped (Composer's models have no such part)" in out
    assert "44 taken, 2 dropped, 0 missing" in out
    content = torch.load(tmp_path / "start.pt", weights_only=True)
    model = content["state"]["model"]
    wanted = masked_lm(state)
    wanted |= {f"model.{name}": tensor for name, tensor in state.items() if ".pooler." in name}
    assert model["model.bert.embeddings.word_embeddings.weight"].shape == (197, 32)
    assert_same_tensors(model, wanted)


def models(shape):
    """One of each kind and head that Composer's BERTs have; every number is drawn at random."""
    mosaic = shape.with_options("position_embedding_type=alibi gated_mlp=true hidden_act=gelu_erf")
    made = [
        *(
            kind(shape)
            for shape in (shape, mosaic)
            for kind in (BertForMaskedLM, BertForPreTraining)
        ),
        *(
            BertForSequenceClassification(shape, labels)
            for shape in (shape, mosaic)
            for labels in (1, 3)
        ),
    ]
    return [randomize(model, 1.0) for model in made]


@pytest.mark.parametrize("number", range(8))
def test_round_trip(tmp_path, shape, mlbert, number):
    """To Composer and back: all tensors and the shape.

    What a run writes is what the command writes.
    """
    model = models(shape)[number]
    write_weights(model, tmp_path, {}, None)
    write_composer(to_huggingface(model), model.config, tmp_path / "by_run.pt")
    mlbert("torch-to-composer", tmp_path / "weights", tmp_path / "there.pt")
    by_run, by_command = (read_composer(tmp_path / name) for name in ("by_run.pt", "there.pt"))
    assert by_run.shape == by_command.shape
    assert_same_tensors(by_run.tensors, by_command.tensors)
    mlbert("composer-to-torch", tmp_path / "there.pt", tmp_path / "back")
    assert BertConfig.from_json(tmp_path / "back/bert_config.json") == model.config
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("weights", "back"))
    assert_same_tensors(
        back, {name: there[name] for name in there if not name.startswith("cls.seq_relationship.")}
    )
    keys = torch.load(tmp_path / "there.pt", weights_only=True)["state"]["model"].keys()
    assert ("model.bert.encoder.layer.1.mlp.wo.weight" in keys) == model.config.gated_mlp
    assert ("model.classifier.bias" in keys) == hasattr(model, "classifier")


@pytest.mark.parametrize("number", [0, 2])
def test_kind_comes_from_the_tensors_if_the_file_lacks_a_shape(
    tmp_path, folder, shape, mlbert, number
):
    plain = dataclasses.replace(shape, hidden_act="gelu_erf")
    model = models(shape)[number]
    write_composer(to_huggingface(model), model.config, tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt", weights_only=True)
    del content["state"]["integrations"]
    torch.save(content, folder / "a.pt")
    (folder / "bert_config.json").write_text((plain if number else shape).to_json())
    mlbert("composer-to-torch", folder / "a.pt", tmp_path / "back")
    assert BertConfig.from_json(tmp_path / "back/bert_config.json") == model.config


def test_the_published_programs_checkpoint(tmp_path, mlbert):
    """A whole one, through the command, to the outputs that its own program gave."""
    out, _ = mlbert("composer-to-torch", PUBLISHED, tmp_path / "ours")
    assert "decoder.weight: dropped (tied to bert.embeddings.word_embeddings.weight)" in out
    assert "31 taken, 1 dropped, 0 missing" in out
    shape = BertConfig.from_json(tmp_path / "ours/bert_config.json")
    assert (shape.gated_mlp, shape.position_embedding_type, shape.hidden_act) == (
        True,
        "alibi",
        "gelu_erf",
    )
    model = BertForMaskedLM(shape)
    assert load_weights(model, tmp_path / "ours").missing == {}
    check = {
        name: torch.from_numpy(value)
        for name, value in np.load(ASSETS / "forward_check.npz").items()
    }
    batch = unpadded(ASSETS / "forward_check.npz", smallest_label=1)
    everywhere = dataclasses.replace(batch, masked_positions=torch.arange(batch.num_tokens))
    logits = check["logits"][check["attention_mask"].bool()]
    with torch.no_grad():
        torch.testing.assert_close(model(everywhere, None).masked, logits, atol=1e-5, rtol=0)
        metrics = MaskedLM("step").metrics(MaskedLM("step").sums(model, batch).tolist(), None)
    assert metrics["loss"] == pytest.approx(float(check["loss"]), abs=1e-5)
    started = BertForMaskedLM(shape)
    assert load_weights(started, PUBLISHED).missing == {}
    assert_same_parameters(started, model)
    mlbert("torch-to-composer", tmp_path / "ours", tmp_path / "again.pt")
    there = read_composer(PUBLISHED)
    back = read_composer(tmp_path / "again.pt")
    assert there.shape == back.shape
    assert_same_tensors(back.tensors, there.tensors)


@pytest.mark.parametrize(
    "options",
    [
        "position_embedding_type=alibi gated_mlp=true",  # without the exact GELU
        "gated_mlp=true",
        "norm_position=pre",
        "tie_word_embeddings=false",
    ],
)
def test_shapes_that_composer_lacks_are_refused(tmp_path, shape, refused, options):
    model = BertForMaskedLM(shape.with_options(options))
    write_weights(model, tmp_path, {}, None)
    refused(
        "torch-to-composer",
        tmp_path / "weights",
        tmp_path / "a.pt",
        code="model.unsupported",
        subject="Composer",
    )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(
            lambda file, state: container(read_composer(PUBLISHED).tensors),
            "checkpoint.shape",
            id="next to another shape",
        ),
        pytest.param(
            lambda file, state: container(
                masked_lm(state), extra=Call(os.system, f"touch {file.with_name('ran')}")
            ),
            "checkpoint.unsafe",
            id="forbidden",
        ),
        pytest.param(
            lambda file, state: {"state": {"optimizers": {}}}, "checkpoint.format", id="no model"
        ),
        pytest.param(lambda file, state: [1, 2], "checkpoint.format", id="no container"),
        pytest.param(
            lambda file, state: container(
                {k: v for k, v in masked_lm(state).items() if k != POSITIONS}
            ),
            "checkpoint.incomplete",
            id="missing",
        ),
        pytest.param(
            lambda file, state: container({**fused(state), BIASES: torch.zeros(8)}),
            "checkpoint.shape",
            id="wrong shape",
        ),
    ],
)
def test_damage_is_one_line_and_nothing_is_written(tmp_path, folder, state, refused, content, code):
    file = folder / "a.pt"
    torch.save(content(file, state), file)
    refused("composer-to-torch", file, tmp_path / "ours", code=code, subject=file)
    assert not (folder / "ran").exists()
