"""RoBERTa, XLM-RoBERTa and CamemBERT: what transformers saves is read, gives the same logits, and
goes back into its own classes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mlbert.data.batches import Batch
from mlbert.models.bert import AnyBert, BertForSequenceClassification
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import config_from_huggingface, read_config, to_huggingface
from mlbert.models.weights.load import load_weights, open_saved
from modernbert_peers import masked_batch
from same_weights import assert_same_tensors
from user_errors import user_error

PAD = 1
OFFSET = 2  # rows of the position table before the first token's
VALUES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40 + OFFSET,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
LENGTHS = (40, 3, 17)
FAMILIES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def save_peer(folder: Path, family: str, head: str, **values: Any) -> Any:
    torch.manual_seed(0)
    prefix = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(VALUES | values))
    model = getattr(transformers, f"{prefix}For{head}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def batch_of_two_segments() -> Batch:
    """Return a batch whose sequences have two segments, which a RoBERTa does not distinguish."""
    batch = masked_batch(LENGTHS, VALUES["vocab_size"])
    batch.input_ids[batch.input_ids == PAD] = PAD + 1  # the peer takes it for padding
    batch.segment_ids[batch.position_ids > 1] = 1
    return batch


def peer_logits(model: Any, batch: Batch, is_masked_lm: bool) -> Tensor:
    """Return the logits of the masked tokens, or of the sequences."""
    rows = batch.input_ids.split(LENGTHS)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = ids != PAD
    logits = model(input_ids=ids, attention_mask=mask).logits
    return logits[mask][batch.masked_positions] if is_masked_lm else logits


def own_logits(model: AnyBert, batch: Batch) -> Tensor:
    (logits,) = model(batch, None)
    rows = VALUES["vocab_size"] if model.architecture == "BertForMaskedLM" else None
    return logits[:, :rows]


@torch.no_grad()
@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_and_the_model_goes_back(family: str, head: str, tmp_path: Path) -> None:
    peer = save_peer(tmp_path / "theirs", family, head, num_labels=3)
    model, report, *_ = open_saved(tmp_path / "theirs")
    assert not report.missing
    assert model.architecture == f"BertFor{head}"
    batch = batch_of_two_segments()
    is_masked_lm = head == "MaskedLM"
    expected = peer_logits(peer, batch, is_masked_lm)
    torch.testing.assert_close(own_logits(model, batch), expected, atol=1e-5, rtol=0)

    write_weights(model, tmp_path / "run", {}, None)
    folder = tmp_path / "run/huggingface"
    kind = getattr(transformers, f"AutoModelFor{head}")
    again, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert type(again).__name__ == f"RobertaFor{head}"
    assert not any(loading.values())
    torch.testing.assert_close(
        peer_logits(again.eval(), batch, is_masked_lm), expected, atol=1e-5, rtol=0
    )
    assert read_config(folder / "config.json") == model.config
    for saved in (folder, tmp_path / "run/weights"):
        restored, *_ = open_saved(saved)
        assert_same_tensors(to_huggingface(restored), to_huggingface(model))


@torch.no_grad()
def test_an_untied_decoder_is_read_and_written(tmp_path: Path) -> None:
    peer = save_peer(tmp_path / "theirs", "roberta", "MaskedLM", tie_word_embeddings=False)
    model, report, *_ = open_saved(tmp_path / "theirs")
    assert not report.missing
    batch = batch_of_two_segments()
    expected = peer_logits(peer, batch, is_masked_lm=True)
    torch.testing.assert_close(own_logits(model, batch), expected, atol=1e-5, rtol=0)
    write_weights(model, tmp_path / "run", {}, None)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "run/huggingface")
    torch.testing.assert_close(
        peer_logits(again.eval(), batch, is_masked_lm=True), expected, atol=1e-5, rtol=0
    )


def test_gradients_are_equal(tmp_path: Path) -> None:
    peer = save_peer(tmp_path / "theirs", "roberta", "MaskedLM")
    model, *_ = open_saved(tmp_path / "theirs")
    batch = batch_of_two_segments()
    weights = torch.randn(len(batch.masked_positions), VALUES["vocab_size"])
    (own_logits(model, batch) * weights).sum().backward()
    (peer_logits(peer, batch, is_masked_lm=True) * weights).sum().backward()
    theirs = dict(peer.named_parameters())
    own = dict(model.named_parameters())
    positions = theirs["roberta.embeddings.position_embeddings.weight"].grad
    assert not positions[:OFFSET].any()
    torch.testing.assert_close(
        own["bert.embeddings.position_embeddings.weight"].grad, positions[OFFSET:]
    )
    segments = theirs["roberta.embeddings.token_type_embeddings.weight"].grad
    torch.testing.assert_close(own["bert.embeddings.token_type_embeddings.weight"].grad, segments)


def test_a_classifier_starts_from_a_masked_lm(tmp_path: Path) -> None:
    save_peer(tmp_path / "theirs", "xlm-roberta", "MaskedLM")
    model = BertForSequenceClassification(read_config(tmp_path / "theirs/config.json"), 2)
    report = load_weights(model, tmp_path / "theirs")
    assert sorted(report.missing) == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "classifier.bias",
        "classifier.weight",
    ]


@pytest.mark.parametrize(
    ("model_type", "architecture", "words", "instead"),
    [
        ("distilbert", "DistilBertForMaskedLM", "DistilBERT", "the BERT"),
        ("deberta-v2", None, "DeBERTa", "ModernBERT"),
        ("deberta", "DebertaForMaskedLM", "DeBERTa", "ModernBERT"),
        ("eurobert", "EuroBertForMaskedLM", "EuroBERT", "mmBERT"),
        ("neobert", "NeoBERTLMHead", "NeoBERT", "ModernBERT-base"),
        ("gpt2", "GPT2LMHeadModel", "a decoder (GPT2LMHeadModel)", "an encoder"),
        ("llama", "LlamaForCausalLM", "a decoder (LlamaForCausalLM)", "an encoder"),
        ("t5", "T5ForConditionalGeneration", "an encoder with a decoder", "an encoder"),
        ("xlnet", "XLNetModel", "'xlnet'", "an encoder of one of"),
    ],
)
def test_other_families_are_refused_with_what_to_use(
    model_type: str, architecture: str | None, words: str, instead: str
) -> None:
    values = {"model_type": model_type, "hidden_size": 768, "vocab_size": 30522}
    if architecture is not None:
        values["architectures"] = [architecture]
    with user_error("model.unsupported", "config.json") as refused:
        config_from_huggingface(values)
    assert words in refused.value.problem
    assert instead in refused.value.remedy


@pytest.mark.parametrize("rows", [None, "514", 1])
def test_positions_that_do_not_fit_are_refused(rows: object) -> None:
    values = {**VALUES, "model_type": "roberta", "max_position_embeddings": rows}
    with user_error("model.shape", "config.json"):
        config_from_huggingface(values)
