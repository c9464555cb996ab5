"""ALiBi, gated feed-forward layers and tied decoder against MosaicBERT's own numbers; see tests/assets/mosaicbert."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlbert import ops
from mlbert.core.bert_config import BertConfig
from mlbert.core.checkpoint_names import PREDICTION_BIAS
from mlbert.feed.batch import Batch
from mlbert.models import BertForMaskedLM, BertForSequenceClassification
from mlbert.models.objectives import Classification, MaskedLM, Regression
from model_loss import loss_of
from padded_batches import unpadded

ASSETS = Path(__file__).parents[2] / "assets/mosaicbert"
EXPECTED = json.loads((ASSETS / "expected.json").read_text())
SHAPE = BertConfig(
    vocab_size=200,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=96,
    max_position_embeddings=64,
    hidden_act="gelu_erf",
    attention_probs_dropout_prob=0.0,
    position_embedding_type="alibi",
    gated_mlp=True,
)
EMBEDDINGS = ("bert.embeddings.word_embeddings", "bert.embeddings.token_type_embeddings")


def mosaic_names(num_layers: int, head: str) -> dict[str, str]:
    """Our names of a gated BERT with ALiBi to those of a MosaicBERT, without Composer's ``model.`` before them.

    Query, key and value, in this order, are one tensor there, named thrice here. ``head``: "mlm", or "classifier" with
    the pooler.
    """
    names = {f"{part}.weight": f"{part}.weight" for part in EMBEDDINGS}
    pairs = [("bert.embeddings.LayerNorm", "bert.embeddings.LayerNorm")]
    for layer in range(num_layers):
        stem = f"bert.encoder.layer.{layer}"
        pairs += [
            (f"{stem}.attention.self.{part}", f"{stem}.attention.self.Wqkv") for part in ("query", "key", "value")
        ]
        pairs += [(f"{stem}.attention.output.{part}",) * 2 for part in ("dense", "LayerNorm")]
        pairs += [(f"{stem}.output.dense", f"{stem}.mlp.wo"), (f"{stem}.output.LayerNorm", f"{stem}.mlp.layernorm")]
        names[f"{stem}.intermediate.dense.weight"] = f"{stem}.mlp.gated_layers.weight"
    heads = ("bert.pooler.dense", "classifier")
    if head == "mlm":
        heads = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
        names[PREDICTION_BIAS] = "cls.predictions.decoder.bias"
    pairs += [(part, part) for part in heads]
    return names | {f"{own}.{kind}": f"{theirs}.{kind}" for own, theirs in pairs for kind in ("weight", "bias")}


@pytest.fixture(params=["plain", "auto"])
def chosen_ops(request: pytest.FixtureRequest) -> Any:
    ops.select(request.param)
    yield
    ops.select("auto")


def batch_of(smallest_label: int, labels: Tensor | None = None) -> Batch:
    """Their batch without padding; MosaicBERT's loss leaves labels of id 0 out, its metrics do not."""
    return unpadded(ASSETS / "batch.npz", smallest_label, labels)


def own_tensors(theirs: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """Their tensors under our names; every one of theirs is used."""
    names = mosaic_names(SHAPE.num_hidden_layers, head)
    assert {f"model.{name}" for name in names.values()} == set(theirs)
    own = {}
    for name, key in names.items():
        tensor = theirs[f"model.{key}"]
        parts = ("query", "key", "value")
        part = next((i for i, kind in enumerate(parts) if f".self.{kind}." in name), None)
        own[name] = tensor if part is None else tensor.chunk(3)[part]
    return own


def masked_lm() -> BertForMaskedLM:
    model = BertForMaskedLM(SHAPE)
    model.load_state_dict(own_tensors(load_file(ASSETS / "mlm_weights.safetensors"), "mlm"))
    return model


def test_hidden_states_and_logits(chosen_ops: None) -> None:
    outputs = {name: torch.from_numpy(value) for name, value in np.load(ASSETS / "outputs.npz").items()}
    model, batch = masked_lm(), batch_of(0)
    one_layer = masked_lm()
    del one_layer.bert.encoder.layer[1]
    one_layer.bert.use_linears(None)
    with torch.no_grad():
        found = {
            "embeddings": model.bert.embeddings(batch, None),
            "layer_0": one_layer.bert(batch, None, None),
            "layer_1": model.bert(batch, None, None),
            "logits": model(batch, None).masked,
        }
    for name, value in found.items():
        torch.testing.assert_close(value, outputs[name], atol=1e-5, rtol=0, msg=name)


def test_loss_and_gradients(chosen_ops: None) -> None:
    model = masked_lm()
    loss = loss_of(model, batch_of(1), objective=MaskedLM("step"))
    assert float(loss.detach()) == pytest.approx(EXPECTED["mosaic_loss"], abs=1e-5)
    loss.backward()
    gradients = own_tensors(load_file(ASSETS / "mlm_gradients.safetensors"), "mlm")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-5, msg=name)


def test_metrics() -> None:
    """With id 0, as their evaluation counts."""
    model, objective = masked_lm(), MaskedLM("step")
    with torch.no_grad():
        found = objective.metrics(objective.sums(model, batch_of(0)).tolist(), None)
    theirs = EXPECTED["mosaic_eval_metrics"]
    assert found["mlm_accuracy"] == pytest.approx(theirs["MaskedAccuracy"], abs=1e-7)
    assert found["loss"] == pytest.approx(theirs["LanguageCrossEntropy"], abs=1e-5)


@pytest.mark.parametrize("task", ["single_label", "regression"])
def test_classifier(task: str) -> None:
    wanted = EXPECTED[f"mosaic_cls_{task}"]
    weights = load_file(ASSETS / "classifier_weights.safetensors")
    if task == "regression":
        weights |= load_file(ASSETS / "regression_head.safetensors")
    model = BertForSequenceClassification(SHAPE, wanted["num_labels"])
    model.load_state_dict(own_tensors(weights, "classifier"))
    batch = batch_of(0, torch.tensor(wanted["labels"], dtype=torch.float32))
    objective = Regression("step", "pearson") if task == "regression" else Classification(3, "step", "accuracy")
    torch.testing.assert_close(model(batch, None).labels, torch.tensor(wanted["logits"]), atol=1e-5, rtol=0)
    loss = loss_of(model, batch, objective=objective)
    assert float(loss.detach()) == pytest.approx(wanted["loss"], abs=1e-5)
    loss.backward()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    assert sum(squares) ** 0.5 == pytest.approx(wanted["grad_norm"], rel=1e-5)


def test_slopes() -> None:
    for heads, slopes in EXPECTED["alibi_slopes"].items():
        shape = dataclasses.replace(SHAPE, num_attention_heads=int(heads), hidden_size=4 * int(heads))
        assert shape.alibi_slopes == pytest.approx(slopes, rel=1e-6)
