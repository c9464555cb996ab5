"""The classes that travel in a folder, for shapes that transformers does not have, do what its own
classes do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mlbert
import remote_shapes
from remote_shapes import CLOSE, FORMS, LENGTHS, padded_inputs
from same_weights import randomize

SIZES = remote_shapes.SIZES | {"num_hidden_layers": 3}


@pytest.fixture(params=FORMS)
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {**SIZES, **FORMS[request.param], **dropout}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return padded_inputs()


@pytest.fixture
def folder(shape: dict[str, Any], tmp_path: Path) -> Iterator[Path]:
    model = mlbert.new_model(shape)
    randomize(model, 0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "decoder.weight", "predictions.bias")):
                parameter[SIZES["vocab_size"] :].zero_()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, kind: str = "MaskedLM", **more: object) -> transformers.PreTrainedModel:
    auto = getattr(transformers, f"AutoModel{f'For{kind}' if kind else ''}")
    model = auto.from_pretrained(folder, trust_remote_code=True, **more)
    assert type(model).__name__.startswith("Mlbert")
    return model.eval()


def test_optional_outputs_and_embeddings_as_input(folder: Path, inputs) -> None:
    model = load(folder)
    with torch.no_grad():
        plain = model(**inputs)
        full = model(**inputs, output_hidden_states=True, output_attentions=True)
        eager = load(folder, attn_implementation="eager")(**inputs)
        words = model.get_input_embeddings()(inputs["input_ids"])
        from_words = model(inputs_embeds=words, attention_mask=inputs["attention_mask"])
        as_tuple = model(**inputs, return_dict=False)
        encoder = load(folder, "")(**inputs)
    assert plain.hidden_states is None
    assert plain.attentions is None
    is_token = inputs["attention_mask"].bool()
    for other in (full, eager, from_words):
        torch.testing.assert_close(other.logits[is_token], plain.logits[is_token], **CLOSE)
    assert torch.equal(as_tuple[0], plain.logits)
    assert len(full.hidden_states) == SIZES["num_hidden_layers"] + 1
    hidden = full.hidden_states[-1]
    torch.testing.assert_close(hidden[is_token], encoder.last_hidden_state[is_token], **CLOSE)
    (first, *_) = full.attentions
    assert len(full.attentions) == SIZES["num_hidden_layers"]
    assert first.shape == (2, SIZES["num_attention_heads"], max(LENGTHS), max(LENGTHS))
    torch.testing.assert_close(first.sum(-1), torch.ones_like(first.sum(-1)), **CLOSE)
    assert (first[1, :, :, LENGTHS[1] :] == 0).all()
    with pytest.raises(ValueError, match="exactly one"):
        model(attention_mask=inputs["attention_mask"])


def gradients(model: transformers.PreTrainedModel, inputs) -> dict[str, torch.Tensor]:
    model.train()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_gradient_checkpointing_changes_no_gradient(folder: Path, inputs) -> None:
    model = load(folder)
    expected = gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    found = gradients(model, inputs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE)


@pytest.mark.parametrize("rows", [8, -3])
def test_resized_vocabulary_comes_back(folder: Path, inputs, rows: int, tmp_path: Path) -> None:
    model = load(folder)
    ids = inputs["input_ids"].clamp(max=50)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(SIZES["vocab_size"] + rows, mean_resizing=False)
        after = model(ids).logits
    kept = SIZES["vocab_size"] + min(rows, 0)
    assert after.shape[-1] == SIZES["vocab_size"] + rows == model.config.vocab_size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], **CLOSE)
    model.save_pretrained(tmp_path / "resized")
    with torch.no_grad():
        again = load(tmp_path / "resized")(ids).logits
        ours = mlbert.load_model(tmp_path / "resized").eval()(ids).logits
    torch.testing.assert_close(again, after, **CLOSE)
    torch.testing.assert_close(ours, after, **CLOSE)


def test_token_classifier(shape, inputs, tmp_path: Path) -> None:
    model = mlbert.new_model(shape, "token-classification", 3).eval()
    randomize(model, 0.1)
    model.save_pretrained(tmp_path / "tags")
    peer = load(tmp_path / "tags", "TokenClassification")
    labels = (inputs["input_ids"] % 3).where(inputs["attention_mask"] == 1, -100)
    again = mlbert.load_model(tmp_path / "tags").eval()
    with torch.no_grad():
        expected = model(**inputs, labels=labels)
        for other in (peer, again):
            found = other(**inputs, labels=labels)
            torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
            is_token = labels != -100
            torch.testing.assert_close(found.logits[is_token], expected.logits[is_token], **CLOSE)


def test_lora(folder: Path, inputs, tmp_path: Path) -> None:
    import peft

    base = load(folder)
    options = peft.LoraConfig(target_modules=["query", "value"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(base, options).eval()
    with torch.no_grad():
        expected = adapted(**inputs).logits
        adapted.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
        torch.testing.assert_close(again(**inputs).logits, expected, **CLOSE)
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        ours = mlbert.load_model(tmp_path / "merged").eval()(**inputs).logits
    is_token = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[is_token], expected[is_token], **CLOSE)
