"""Weights written at the end of a run: `transformers` reads and trains every shape,
and we read them back unchanged.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from host_batches import made_up_batches
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.weights.convert import torch_to_huggingface
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import padded_inputs, read_config, to_huggingface
from mlbert.models.weights.load import load_weights
from same_weights import assert_same_tensors, randomize

SHAPE = BertConfig(99, 32, 2, 2, 64, max_position_embeddings=32)
FREE = dataclasses.replace(SHAPE, tie_word_embeddings=False)
MOSAIC = dataclasses.replace(SHAPE, position_embedding_type="alibi", gated_mlp=True)
PRE_NORM = dataclasses.replace(SHAPE, norm_position="pre", hidden_act="gelu_erf")
ROTARY = dataclasses.replace(
    MOSAIC,
    position_embedding_type="rotary",
    norm_position="pre",
    rope_theta=500.0,
    tie_word_embeddings=False,
)
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "The",
    "end",
    "of",
    "a",
    "long",
    "day",
]


def loaded(kind: Any, folder: Path) -> Any:
    model, loading = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=True)
    if not model.config.tie_word_embeddings:
        # Of a plain BERT with a separate decoder: unused.
        loading["missing_keys"].discard("cls.predictions.bias")
    assert not any(loading.values())
    return model.eval()


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (BertForPreTraining(SHAPE), "PreTraining"),
        (BertForMaskedLM(FREE), "MaskedLM"),
        *(
            (BertForSequenceClassification(SHAPE, labels), "SequenceClassification")
            for labels in (3, 1)
        ),
        # No class of `transformers` has these shapes.
        *(
            (model, "MaskedLM")
            for model in (BertForMaskedLM(MOSAIC), *map(BertForPreTraining, (PRE_NORM, ROTARY)))
        ),
        *(
            (BertForSequenceClassification(*case), "SequenceClassification")
            for case in ((MOSAIC, 3), (ROTARY, 1))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_hugging_face_reads_its_copy(tmp_path, model, kind):
    write_weights(randomize(model), tmp_path, {"steps": 3}, None)
    assert "| steps | 3 |" in (tmp_path / "huggingface/README.md").read_text()
    torch_to_huggingface(tmp_path / "weights", tmp_path / "converted")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "converted" / name).read_bytes() == (
            tmp_path / "huggingface" / name
        ).read_bytes()
    peer = loaded(getattr(transformers, f"AutoModelFor{kind}"), tmp_path / "converted")
    batch = made_up_batches(3, seed=1, vocab_size=99, max_tokens=32)[0].to("cpu")
    inputs = padded_inputs(batch)
    with torch.no_grad():
        found = model(batch, None)[0][:, : SHAPE.vocab_size]
        expected = peer(
            **{k: inputs[k] for k in ("input_ids", "token_type_ids", "attention_mask")}
        )[0]
    expected = expected if hasattr(model, "classifier") else expected[inputs["labels"] != -100]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert read_config(tmp_path / "huggingface/config.json") == model.config
    for name in ("huggingface", "weights", "."):
        again = type(model)(
            model.config, *[model.num_labels] if hasattr(model, "classifier") else []
        )
        assert load_weights(again, tmp_path / name).missing == {}
        assert_same_tensors(to_huggingface(again), to_huggingface(model))
    if isinstance(model, BertForPreTraining):
        assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters


def test_a_published_card_names_no_folder_and_no_machine(tmp_path):
    facts = {
        "command": "/srv/ada/mlbert finetune --from '/srv/ada/my model' --out=/srv/ada/x a=b",
        "train_data": Path("/srv/ada/rows.csv"),
        "hosts": ["ada-laptop"],
    }
    shape = dataclasses.replace(ROTARY, tie_word_embeddings=True, classifier_pooling="mean")
    model = BertForSequenceClassification(shape, 3)
    write_weights(randomize(model), tmp_path, facts, None, ["x", "y", "z"])
    card = (tmp_path / "huggingface/README.md").read_text()
    assert "# ModernBertForSequenceClassification" in card
    assert "pipeline_tag: text-classification" in card
    assert "| command | mlbert finetune --from 'my model' --out=x a=b |" in card
    assert "| train_data | rows.csv |" in card
    assert "Labels: x, y, z." in card
    assert "ada" not in card


@pytest.mark.parametrize("shape", [MOSAIC, dataclasses.replace(ROTARY, tie_word_embeddings=True)])
def test_a_shape_of_ours_is_trained_by_transformers(tmp_path, shape):
    """As sentence-transformers and `Trainer` use a model:
    embeddings of padded text, masked-LM steps, a new head.
    """
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    write_weights(randomize(BertForPreTraining(shape)), tmp_path, {}, vocabulary)
    folder = tmp_path / "huggingface"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    encoder = loaded(transformers.AutoModel, folder)
    texts = ["the end", "The end of a long long day", ""]
    with torch.no_grad():
        together = encoder(**tokenizer(texts, padding=True, return_tensors="pt"), return_dict=True)
        for text, states, pooled in zip(
            texts, together.last_hidden_state, together.pooler_output, strict=True
        ):
            alone = encoder(**tokenizer(text, return_tensors="pt"), return_dict=False)
            torch.testing.assert_close(states[: alone[0].shape[1]], alone[0][0], atol=1e-5, rtol=0)
            torch.testing.assert_close(pooled, alone[1][0], atol=1e-5, rtol=0)

    model = loaded(transformers.AutoModelForMaskedLM, folder)
    method = {
        "max_steps": 12,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
    }
    output = {"report_to": [], "logging_steps": 4, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path / "trained"), **method, **output)
    rows = [dict(tokenizer(texts[1])) for _ in range(8)]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.8 * losses[0], losses
    trainer.save_model(str(tmp_path / "again"))
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    again = loaded(transformers.AutoModelForMaskedLM, tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model.eval()(**inputs).logits)

    new = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, num_labels=4
    )
    assert torch.equal(new.bert.pooler.dense.weight, encoder.pooler.dense.weight)
    assert 0 < new.classifier.weight.std() < 0.05
    for labels in (torch.tensor([0, 3, 1]), torch.zeros(3, 4)):
        new(**inputs, labels=labels).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in new.parameters())


@pytest.mark.parametrize("of_data", [None, True, False])
@pytest.mark.parametrize("words", [None, {"do_lower_case": True}, {"do_lower_case": False}])
def test_the_tokenizer_keeps_the_case_that_the_text_was_read_in(tmp_path, words, of_data):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS[:7]))
    if words is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    write_weights(
        randomize(BertForMaskedLM(SHAPE)), tmp_path / "run", {}, vocabulary, lower_case=of_data
    )
    peer = transformers.BertTokenizer.from_pretrained(tmp_path / "run/huggingface")
    ours = load_tokenizer(tmp_path / "run/weights")
    is_lower = of_data if of_data is not None else words is None or words["do_lower_case"]
    assert peer("The")["input_ids"] == [2, 5 if is_lower else 6, 3]
    assert ours.encode("The") == [5 if is_lower else 6]
    assert peer.model_max_length == SHAPE.max_position_embeddings
