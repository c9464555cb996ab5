"""ALiBi, gated feed-forward layers and tied decoder against MosaicBERT's own numbers;
see tests/assets/mosaicbert.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.models.bert import BertForMaskedLM, BertForSequenceClassification
from mlbert.models.objectives import Classification, MaskedLM, Regression
from mlbert.models.weights.weight_files import load_state, own_state, parameter_sizes
from model_loss import loss_of
from padded_batches import unpadded

ASSETS = Path(__file__).parents[2] / "assets/mosaicbert"
EXPECTED = json.loads((ASSETS / "expected.json").read_text())
SHAPE = BertConfig(200, 48, 2, 6, 96, max_position_embeddings=64).with_options(
    "hidden_act=gelu_erf attention_probs_dropout_prob=0 position_embedding_type=alibi "
    "gated_mlp=true"
)


def batch_of(smallest_label: int, labels: Tensor | None = None) -> Batch:
    """Their batch without padding; MosaicBERT's loss leaves labels of id 0 out,
    its metrics do not.
    """
    return unpadded(ASSETS / "batch.npz", smallest_label, labels)


def own_tensors(model: Any, name: str) -> dict[str, Tensor]:
    """A file of theirs under our names; every tensor of it is used."""
    own, report = own_state(load_file(ASSETS / name), SHAPE, name, known=parameter_sizes(model))
    assert report.missing == report.dropped == {}
    return own


def masked_lm() -> BertForMaskedLM:
    model = BertForMaskedLM(SHAPE)
    model.load_state_dict(own_tensors(model, "mlm_weights.safetensors"))
    return model


def test_hidden_states_and_logits(chosen_ops):
    outputs = {
        name: torch.from_numpy(value) for name, value in np.load(ASSETS / "outputs.npz").items()
    }
    model = masked_lm()
    one_layer = masked_lm()
    batch = batch_of(0)
    del one_layer.bert.encoder.layer[1]
    one_layer.bert.use_linears(None)
    with torch.no_grad():
        found = {
            "embeddings": model.bert.embeddings(batch, None),
            "layer_0": one_layer.bert(batch, None, None),
            "layer_1": model.bert(batch, None, None),
            "logits": model(batch, None).masked,
        }
    torch.testing.assert_close(found, {name: outputs[name] for name in found}, atol=1e-5, rtol=0)


def test_loss_and_gradients(chosen_ops):
    model = masked_lm()
    loss = loss_of(model, batch_of(1), objective=MaskedLM("step"))
    assert float(loss.detach()) == pytest.approx(EXPECTED["mosaic_loss"], abs=1e-5)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(
        gradients, own_tensors(model, "mlm_gradients.safetensors"), atol=1e-6, rtol=1e-6
    )


def test_id_0_counts():
    """In our loss as in the metrics of both; their own loss leaves it out."""
    model = masked_lm()
    objective = MaskedLM("step")
    loss = loss_of(model, batch_of(0), objective=objective)
    assert float(loss.detach()) == pytest.approx(
        EXPECTED["mosaic_loss_if_label0_counted"], abs=1e-5
    )
    with torch.no_grad():
        found = objective.metrics(objective.sums(model, batch_of(0)).tolist(), None)
    theirs = EXPECTED["mosaic_eval_metrics"]
    assert found["mlm_accuracy"] == pytest.approx(theirs["MaskedAccuracy"], abs=1e-7)
    assert found["loss"] == pytest.approx(theirs["LanguageCrossEntropy"], abs=1e-5)


@pytest.mark.parametrize("task", ["single_label", "regression", "multi_label"])
def test_classifier(task):
    wanted = EXPECTED[f"mosaic_cls_{task}"]
    model = BertForSequenceClassification(SHAPE, wanted["num_labels"])
    weights = load_file(ASSETS / "classifier_weights.safetensors")
    weights |= load_file(ASSETS / f"{task}_head.safetensors") if task != "single_label" else {}
    assert load_state(model, weights, "classifier").missing == {}
    labels = torch.tensor(wanted["labels"], dtype=torch.float32)
    batch = batch_of(0, labels)
    logits = model(batch, None).labels
    torch.testing.assert_close(logits, torch.tensor(wanted["logits"]), atol=1e-5, rtol=0)
    if task == "multi_label":  # we have the model for it but no objective
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    else:
        objective = (
            Regression("step", "pearson")
            if task == "regression"
            else Classification(3, "step", "accuracy")
        )
        loss = loss_of(model, batch, objective=objective)
    assert float(loss.detach()) == pytest.approx(wanted["loss"], abs=1e-5)
    loss.backward()
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    assert float(torch.cat(gradients).norm()) == pytest.approx(wanted["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(dtype, chosen_ops):
    """LayerNorm computes in float32 inside and gives its result in the low precision;
    so does dropout's sum.
    """
    exact = masked_lm()
    model = BertForMaskedLM(SHAPE, dtype)
    model.load_state_dict(exact.state_dict())
    batch = batch_of(0)
    logits = model(batch, None).masked
    wanted = exact(batch, None).masked
    assert logits.dtype == dtype
    error = (logits.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (0.03 if dtype == torch.bfloat16 else 0.004)
    loss = loss_of(model, batch, objective=MaskedLM("step"))
    assert float(loss.detach()) == pytest.approx(
        EXPECTED["mosaic_loss_if_label0_counted"], rel=0.01
    )
    loss.backward()
    loss_of(exact, batch, objective=MaskedLM("step")).backward()
    found, expected = (
        torch.cat([p.grad.flatten() for p in one.parameters()]).double() for one in (model, exact)
    )
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_slopes():
    for heads, slopes in EXPECTED["alibi_slopes"].items():
        shape = dataclasses.replace(
            SHAPE, num_attention_heads=int(heads), hidden_size=4 * int(heads)
        )
        assert shape.alibi_slopes == pytest.approx(slopes, rel=1e-6)
