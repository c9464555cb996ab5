"""The model for other people's loops has the numbers of transformers, padded or not."""

from pathlib import Path

import pytest
import torch
import transformers

import mlbert
from mlbert.data.batches import Batch
from mlbert.library.model import EncoderModel
from same_weights import randomize
from user_errors import user_error

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
POSITIONS = 40
LENGTHS = (7, 12, 3)
LABELS = 3
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def bert(name: str, **more: object) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=POSITIONS, **more)
    return getattr(transformers, f"Bert{name}")(config)


def modernbert(name: str, **more: object) -> transformers.PreTrainedModel:
    options = {"pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 6}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = transformers.ModernBertConfig(
        **SIZES, max_position_embeddings=POSITIONS, **options, **tokens, **more
    )
    return getattr(transformers, f"ModernBert{name}")(config)


def roberta(name: str, **more: object) -> transformers.PreTrainedModel:
    rows = {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1, "pad_token_id": 1}
    return getattr(transformers, f"Roberta{name}")(
        transformers.RobertaConfig(**SIZES, **rows, **more)
    )


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    """Return padded token ids and their mask."""
    width = max(LENGTHS)
    is_token = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 101, is_token.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.where(is_token, 1), "attention_mask": is_token.long()}


def labels_of(inputs: dict[str, torch.Tensor], classes: int) -> torch.Tensor:
    """Return a label for every third token, -100 for the others."""
    ids = inputs["input_ids"]
    is_chosen = (torch.arange(ids.numel()).view(ids.shape) % 3 == 0) & (
        inputs["attention_mask"] == 1
    )
    return (ids % classes).where(is_chosen, -100)


def loaded(model: transformers.PreTrainedModel, folder: Path, **more: object) -> EncoderModel:
    randomize(model, 0.1).eval().save_pretrained(folder)
    return mlbert.load_model(folder, **more).eval()


@pytest.mark.parametrize("make", [bert, modernbert, roberta])
def test_masked_lm_equals_transformers(make, inputs, tmp_path: Path) -> None:
    peer = make("ForMaskedLM")
    model = loaded(peer, tmp_path / "peer")
    labels = labels_of(inputs, SIZES["vocab_size"])
    is_token = inputs["attention_mask"] == 1
    with torch.no_grad():
        expected = peer(**inputs, labels=labels, output_hidden_states=True)
        found = model(**inputs)
        assert found.loss is None
        torch.testing.assert_close(found.logits[is_token], expected.logits[is_token], **CLOSE)
        assert (found.logits[~is_token] == 0).all()
        hidden = model.encode(**inputs)[is_token]
        torch.testing.assert_close(hidden, expected.hidden_states[-1][is_token], **CLOSE)
        with_labels = model(**inputs, labels=labels)
    torch.testing.assert_close(with_labels.loss, expected.loss, **CLOSE)
    chosen = expected.logits[labels != -100]
    torch.testing.assert_close(with_labels.logits, chosen, **CLOSE)

    # The same tokens as one stream
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    flat = model(inputs["input_ids"][is_token], labels=labels[is_token], cu_seqlens=ends)
    torch.testing.assert_close(flat.loss, expected.loss, **CLOSE)
    assert flat.logits is None, "the loss's backward pass uses their memory"

    # Gradients
    flat.loss.backward()
    peer(**inputs, labels=labels).loss.backward()
    words = peer.get_input_embeddings().weight.grad
    own = model.core.bert.embeddings.word_embeddings.weight.grad[: len(words)]
    torch.testing.assert_close(own, words, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [bert, modernbert, roberta])
def test_classifiers_equal_transformers(make, inputs, tmp_path: Path) -> None:
    classes = torch.tensor([2, 0, 1])
    peer = make("ForSequenceClassification", num_labels=LABELS)
    model = loaded(peer, tmp_path / "classes")
    with torch.no_grad():
        expected = peer(**inputs, labels=classes)
        found = model(**inputs, labels=classes)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    torch.testing.assert_close(found.loss, expected.loss, **CLOSE)

    labels = labels_of(inputs, LABELS)
    of_tokens = make("ForTokenClassification", num_labels=LABELS)
    tagger = loaded(of_tokens, tmp_path / "tags")
    is_token = inputs["attention_mask"] == 1
    with torch.no_grad():
        expected = of_tokens(**inputs, labels=labels)
        found = tagger(**inputs, labels=labels)
    torch.testing.assert_close(found.logits[is_token], expected.logits[is_token], **CLOSE)
    torch.testing.assert_close(found.loss, expected.loss, **CLOSE)

    with pytest.warns(UserWarning, match=r"has no .*classifier\.weight"):
        other = mlbert.load_model(tmp_path / "classes", "token-classification", 5)
    assert other(**inputs).logits.shape == (*inputs["input_ids"].shape, 5)


def test_saved_folder_is_read_by_transformers(inputs, tmp_path: Path) -> None:
    model = mlbert.new_model({**SIZES, "max_position_embeddings": POSITIONS}, seed=3).eval()
    model.save_pretrained(tmp_path / "saved")
    peer = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved").eval()
    is_token = inputs["attention_mask"] == 1
    with torch.no_grad():
        found = model(**inputs).logits[is_token]
        torch.testing.assert_close(found, peer(**inputs).logits[is_token], **CLOSE)


def test_batches_of_a_set_and_dropout(pretrained: Path) -> None:
    model = mlbert.load_model(pretrained / "model")
    batch: Batch = next(iter(mlbert.open_dataset(pretrained, 4)))
    torch.manual_seed(1)
    first = model.train()(batch).loss
    second = model(batch).loss
    torch.manual_seed(1)
    assert torch.equal(model(batch).loss, first)
    assert not torch.equal(second, first)
    assert torch.equal(model.eval()(batch).loss, model(batch).loss)


def test_mistakes(inputs, tmp_path: Path) -> None:
    model = mlbert.new_model({**SIZES, "max_position_embeddings": 10})
    with user_error("data.too-long", "input_ids"):
        model(**inputs)
    left = {"attention_mask": inputs["attention_mask"].flip(1), "input_ids": inputs["input_ids"]}
    with user_error("config.value", "attention_mask"):
        model(**left)
    with user_error("config.value", "labels"):
        model(torch.ones(2, 4).long(), labels=torch.tensor([1, 2]))
    with user_error("config.missing", "num_labels"):
        mlbert.new_model(SIZES, "classification")
    with user_error("config.choice", "head 'tagger'"):
        mlbert.new_model(SIZES, "tagger")
    with user_error("checkpoint.missing", "none"):
        mlbert.load_model(tmp_path / "none")
