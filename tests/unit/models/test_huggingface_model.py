"""Hugging Face's classes behind our protocol: their published numbers,
our own model's on the same weights.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.config.configuration import Configuration
from mlbert.data.batches import Batch
from mlbert.distributed.world import World
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import (
    HuggingFaceForMaskedLM,
    HuggingFaceForSequenceClassification,
)
from mlbert.models.objectives import Classification, MaskedLM, Regression
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import huggingface_config, to_huggingface
from mlbert.models.weights.load import load_weights
from mlbert.models.weights.weight_files import load_state, padded
from mlbert.recipes import masked_lm_stored
from mlbert.recipes.assembly import Compute, choose_compute, make_masked_lm
from mlbert.recipes.classification_build import make_classifier
from mlbert.training.protocols import BuildContext
from model_loss import loss_of
from padded_batches import unpadded
from same_weights import assert_same_parameters, initialized, randomize
from training_settings import configuration
from user_errors import user_error

ASSETS = Path(__file__).parents[2] / "assets/huggingface"
EXPECTED = json.loads((ASSETS / "expected.json").read_text())
SHAPE = BertConfig(163, 48, 2, 4, 96, max_position_embeddings=64)
PRE_TRAINING = BertConfig(160, 32, 2, 4, 80, max_position_embeddings=48, hidden_act="gelu_erf")
MASKED_LM = BertConfig(197, 48, 2, 6, 96, max_position_embeddings=64, hidden_act="gelu_erf")
MASKED_LM_BATCH = ASSETS.parent / "mosaicbert/batch.npz"


def outputs(name: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.from_numpy(value)
        for key, value in np.load(ASSETS / f"{name}_outputs.npz").items()
    }


def loaded(model: Any, name: str) -> Any:
    report = load_state(model, load_file(ASSETS / f"{name}_weights.safetensors"), name)
    assert report.missing == {}
    return model


def batches(accumulation: int = 1) -> list[Batch]:
    return [b.to("cpu") for b in made_up_batches(6, 3, 163, 64, accumulation=accumulation)]


def test_the_published_logits_of_the_pre_training_model():
    """At the fixed length of the published batch, and at the longest of the batch."""
    batch = unpadded(ASSETS / "pre_training_batch.npz")
    wanted = outputs("pre_training")
    for pad_to in (48, None):
        model = loaded(HuggingFaceForMaskedLM(PRE_TRAINING, pad_to=pad_to), "pre_training")
        torch.testing.assert_close(
            model(batch, None).masked, wanted["masked_logits"], atol=1e-5, rtol=0
        )
        metrics = MaskedLM("step").metrics(MaskedLM("step").sums(model, batch).tolist(), None)
        assert metrics["loss"] == pytest.approx(EXPECTED["pre_training"]["mlm_loss"], abs=1e-5)
        assert metrics["mlm_accuracy"] == pytest.approx(
            EXPECTED["pre_training"]["mlm_accuracy"], abs=1e-6
        )


@pytest.mark.parametrize("kind", [HuggingFaceForMaskedLM, BertForMaskedLM])
def test_published_masked_lm_gradients(kind):
    """Theirs and ours: id 0 is a label as any other for both."""
    model = loaded(kind(MASKED_LM), "masked_lm")
    batch = unpadded(MASKED_LM_BATCH)
    wanted = outputs("masked_lm")
    torch.testing.assert_close(
        model(batch, None).masked[:, :197], wanted["masked_logits"], atol=1e-5, rtol=0
    )
    if isinstance(model, BertForMaskedLM):
        torch.testing.assert_close(
            model.bert.embeddings(batch, None), wanted["hidden_0"], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            model.bert(batch, None, None), wanted["hidden_2"], atol=1e-5, rtol=0
        )
    loss = MaskedLM("step").loss(model, batch, None, [torch.tensor(float(batch.num_masked))])
    assert float(loss.detach()) == pytest.approx(EXPECTED["masked_lm"]["loss"], abs=1e-5)
    loss.backward()
    gradients = {name: p.grad[:197] for name, p in model.named_parameters()}
    for name, wanted_gradient in load_file(ASSETS / "masked_lm_gradients.safetensors").items():
        found = gradients[name.removeprefix("model.")]
        torch.testing.assert_close(found, wanted_gradient, atol=1e-6, rtol=1e-5, msg=name)
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    assert norm == pytest.approx(EXPECTED["masked_lm"]["grad_norm"], rel=1e-5)


def same_step(theirs: Any, ours: Any, objective: Any, batch: Batch) -> None:
    """One loss and one gradient, theirs on the padded batch, ours on the tokens."""
    losses = [loss_of(model, batch, objective=objective) for model in (theirs, ours)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), abs=1e-5)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    assert {name for name, _ in theirs.named_parameters()} == gradients.keys()
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(
            p.grad, gradients[name][: len(p)], atol=1e-6, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pad_to", [None, 64])
def test_masked_lm_equals_ours(tmp_path, tied, pad_to):
    """Ours starts from the weights that theirs leaves, and the other way round."""
    shape = dataclasses.replace(SHAPE, tie_word_embeddings=tied)
    theirs = randomize(HuggingFaceForMaskedLM(shape, pad_to=pad_to), 0.1)
    ours = BertForMaskedLM(shape)
    write_weights(theirs, tmp_path, {}, None)
    assert load_weights(ours, tmp_path / "weights").missing == {}
    same_step(theirs, ours, MaskedLM("step"), batches()[0])
    write_weights(ours, tmp_path / "back", {}, None)
    again = HuggingFaceForMaskedLM(shape)
    report = load_weights(again, tmp_path / "back/huggingface")
    assert report.missing == report.dropped == {}
    assert_same_parameters(again, theirs)
    peer = transformers.BertForMaskedLM.from_pretrained(tmp_path / "huggingface")
    assert torch.equal(
        peer.bert.embeddings.word_embeddings.weight, theirs.bert.embeddings.word_embeddings.weight
    )


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_equals_ours(num_labels):
    theirs = initialized(HuggingFaceForSequenceClassification(SHAPE, num_labels))
    ours = BertForSequenceClassification(SHAPE, num_labels)
    assert load_state(ours, theirs.state_dict(), "theirs").missing == {}
    batch = batches()[0]
    labels = torch.arange(batch.num_samples).float() % num_labels + (
        0.5 if num_labels == 1 else 0.0
    )
    objective = (
        Regression("step", "pearson") if num_labels == 1 else Classification(3, "step", "accuracy")
    )
    same_step(theirs, ours, objective, dataclasses.replace(batch, labels=labels))


def test_padding_of_a_static_shape_changes_nothing():
    """As in evaluations on a GPU: tokens after the last sequence, empty sequences,
    ignored labels.
    """
    model = initialized(HuggingFaceForMaskedLM(SHAPE))
    for batch in made_up_batches(6, 2, 163, 64):
        larger = Batch.empty(
            batch.num_tokens + 40, batch.num_samples + 3, batch.num_masked + 5, 64, False, "cpu"
        )
        static = batch.to("cpu", out=larger)
        given = MaskedLM("step").sums(model, batch.to("cpu"))
        torch.testing.assert_close(MaskedLM("step").sums(model, static), given)


@pytest.mark.parametrize(
    "model",
    [HuggingFaceForMaskedLM(SHAPE), HuggingFaceForSequenceClassification(SHAPE, 2)],
    ids=["mlm", "classifier"],
)
def test_weights_are_those_that_the_class_draws(model):
    before = torch.get_rng_state()
    model.initialize(7)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(7)
    config = transformers.BertConfig.from_dict(huggingface_config(SHAPE))
    peer = getattr(transformers, model.architecture)(config)
    for name, p in peer.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], p), name
    words = model.bert.embeddings.word_embeddings.weight.detach()
    assert words[1:].std() == pytest.approx(0.02, rel=0.05)
    assert words.abs().max() > 2.5 * 0.02  # not cut off
    assert not words[0].any()


def test_dropout_follows_the_step_and_the_micro_batch():
    """The same step draws the same masks, whatever was drawn in between; no other does;
    evaluation drops nothing.
    """
    model = initialized(HuggingFaceForMaskedLM(SHAPE))
    (whole,) = batches()
    first, second = batches(accumulation=2)

    def logits(batch: Batch, step: int | None) -> torch.Tensor:
        torch.rand(3)
        keys = None if step is None else model.dropout_keys(1, step).tolist()
        return model(batch, keys).masked.detach()

    assert torch.equal(logits(whole, 4), logits(whole, 4))
    assert not torch.equal(logits(whole, 4), logits(whole, 5))
    assert torch.equal(logits(whole, None), logits(whole, None))
    shifted = dataclasses.replace(
        first, dropout_rows=second.dropout_rows[:1].expand(first.num_tokens)
    )
    assert not torch.equal(logits(first, 4), logits(shifted, 4))
    before = torch.get_rng_state()
    model(whole, model.dropout_keys(1, 4))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(dtype):
    theirs, exact = (
        initialized(HuggingFaceForMaskedLM(SHAPE, of)) for of in (dtype, torch.float32)
    )
    batch = batches()[0]
    found = theirs(batch, None).masked
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact(batch, None).masked, atol=0.02, rtol=0)
    loss_of(theirs, batch, objective=MaskedLM("step")).backward()
    assert {p.grad.dtype for p in theirs.parameters()} == {torch.float32}


def test_all_positions_go_through_the_whole_vocabulary():
    """This makes it the baseline: it computes S W rows of logits,
    although the objective reads M.
    """
    model = HuggingFaceForMaskedLM(SHAPE, pad_to=64)
    rows = []
    model.cls.predictions.decoder.register_forward_hook(
        lambda _, __, out: rows.append(tuple(out.shape))
    )
    batch = batches()[0]
    assert model(batch, None).masked.shape == (batch.num_masked, 163)
    assert rows == [(batch.num_samples, 64, 163)]
    assert model.training_flops(batch) == BertForMaskedLM(SHAPE).training_flops(batch)


def test_padded_vocabularies_are_accepted():
    """NVIDIA's checkpoints have rows up to a multiple of 8."""
    state = padded(to_huggingface(randomize(BertForPreTraining(SHAPE))), SHAPE)
    assert state["cls.predictions.bias"].shape == (168,)
    model = HuggingFaceForMaskedLM(SHAPE)
    words = "bert.embeddings.word_embeddings.weight"
    load_state(model, state, "start")
    assert torch.equal(model.get_parameter(words), state[words][:163])


def chosen(implementation: str = "huggingface", **changes: object) -> tuple[Configuration, Compute]:
    changes |= {"schedule": "constant", "model_implementation": implementation}
    config = configuration(masked_lm_stored.RECIPE, **changes)
    return config, choose_compute(BuildContext(config, World(), 1, print))


@pytest.mark.parametrize("implementation", ["mlbert", "huggingface"])
def test_the_setting_chooses(implementation):
    config, compute = chosen(implementation)
    model = make_masked_lm(config, SHAPE, compute)
    classifier = make_classifier(config[ModelConfig], 32, SHAPE, 3, compute)
    is_theirs = implementation == "huggingface"
    assert isinstance(model, HuggingFaceForMaskedLM) == is_theirs
    assert isinstance(classifier, HuggingFaceForSequenceClassification) == is_theirs
    assert (model.capture_obstacle(torch.device("cuda"), 8) is not None) or not is_theirs
    assert ("transformers" in compute.ops) == is_theirs
    assert model.architecture == "BertForMaskedLM"


def test_unsupported_options_are_refused_in_one_line(monkeypatch):
    config, compute = chosen()
    with user_error("model.unsupported", "MODEL_IMPLEMENTATION=huggingface"):
        make_masked_lm(config, dataclasses.replace(SHAPE, position_embedding_type="alibi"), compute)
    with user_error("config.conflict", "PRECISION=fp8"):
        chosen(precision="fp8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with user_error("package.missing", "MODEL_IMPLEMENTATION=huggingface"):
        make_masked_lm(config, SHAPE, compute)
