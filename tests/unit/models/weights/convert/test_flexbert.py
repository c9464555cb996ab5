"""Composer checkpoints of ModernBERT's research repository: its names and its configuration."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.convert import (
    composer_to_torch,
    torch_to_composer,
    torch_to_huggingface,
)
from mlbert.models.weights.flexbert import flexbert_config, shape_of_flexbert
from mlbert.models.weights.huggingface import read_config
from mlbert.models.weights.load import load_weights, open_saved
from mlbert.models.weights.weight_files import read_composer
from modernbert_peers import SMALL, open_own, save_peer
from same_weights import assert_same_parameters, assert_same_tensors
from user_errors import user_error

# The model_config of the published modernbert-base-pretrain.yaml.
PUBLISHED: dict[str, Any] = {
    "vocab_size": 50368,
    "init_method": "full_megatron",
    "num_hidden_layers": 22,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "attention_layer": "rope",
    "attention_probs_dropout_prob": 0.0,
    "attn_out_bias": False,
    "attn_out_dropout_prob": 0.1,
    "attn_qkv_bias": False,
    "bert_layer": "prenorm",
    "embed_dropout_prob": 0.0,
    "embed_norm": True,
    "final_norm": True,
    "skip_first_prenorm": True,
    "embedding_layer": "sans_pos",
    "loss_function": "fa_cross_entropy",
    "loss_kwargs": {"reduction": "mean"},
    "mlp_dropout_prob": 0.0,
    "mlp_in_bias": False,
    "mlp_layer": "glu",
    "mlp_out_bias": False,
    "normalization": "layernorm",
    "norm_kwargs": {"eps": 1e-5, "bias": False},
    "hidden_act": "gelu",
    "head_pred_act": "gelu",
    "activation_function": "gelu",
    "padding": "unpadded",
    "rotary_emb_dim": None,
    "rotary_emb_base": 10000.0,
    "rotary_emb_scale_base": None,
    "rotary_emb_interleaved": False,
    "allow_embedding_resizing": True,
    "sliding_window": 128,
    "global_attn_every_n_layers": 3,
    "unpad_embeddings": True,
    "compile_model": True,
    "masked_prediction": True,
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES = (*SIZES, "num_attention_heads")


def flexbert_name(name: str) -> str:
    """Return the research repository's name of a tensor of transformers, below Composer's model."""
    name = re.sub(r"^model\.layers\.", "bert.encoder.layers.", name)
    name = re.sub(r"^model\.(embeddings|final_norm)\.", r"bert.\1.", name)
    return f"model.{name}"


def write_checkpoint(folder: Path, **values: Any) -> tuple[Path, Path]:
    """Write the same random model as a Composer checkpoint and for transformers; return both."""
    peer = folder / "peer"
    bases = {"full_attention": 10_000.0, "sliding_attention": 10_000.0}
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    save_peer(peer, rope_parameters=rope)
    tensors = load_file(peer / "model.safetensors")
    tensors["decoder.weight"] = tensors["model.embeddings.tok_embeddings.weight"]
    model = {flexbert_name(name): tensor for name, tensor in tensors.items()}
    model["model.bert.encoder.layers.0.attn.rotary_emb.inv_freq"] = torch.ones(8)
    content = PUBLISHED | {name: SMALL[name] for name in SIZES}
    content |= {"sliding_window": SMALL["local_attention"], "model_type": "bert"} | values
    config = {"file_extension": ".json", "content": content, "class": "FlexBertConfig"}
    state = {"model": model, "integrations": {"huggingface": {"model": {"config": config}}}}
    state["timestamp"] = {"Timestamp": {"iteration_wct": datetime.timedelta(seconds=1)}}
    file = folder / "ep0-ba4-rank0.pt"
    torch.save({"state": state, "rng": []}, file)
    return file, peer


def test_it_is_the_model_of_transformers(tmp_path):
    file, peer = write_checkpoint(tmp_path)
    shape = read_composer(file).shape
    theirs = read_config(peer / "config.json")
    assert shape.with_options(
        "attention_output_dropout_prob=0 max_position_embeddings=256"
    ) == theirs.with_options("attention_output_dropout_prob=0")
    assert shape.attention_output_dropout == 0.1
    model = BertForMaskedLM(shape)
    report = load_weights(model, file)  # INIT_CHECKPOINT
    assert not report.missing
    assert_same_parameters(model, open_own(peer))
    opened, report, _, _ = open_saved(file)  # --from, fill-mask, export
    assert not report.missing
    assert type(opened).__name__ == "BertForMaskedLM"
    assert_same_parameters(opened, model)


def test_both_ways_bit_for_bit(tmp_path):
    file, peer = write_checkpoint(tmp_path)
    report = composer_to_torch(file, tmp_path / "ours")
    assert not report.missing
    torch_to_composer(tmp_path / "ours", tmp_path / "back.pt")
    given = torch.load(file, weights_only=False)["state"]["model"]
    found = torch.load(tmp_path / "back.pt", weights_only=True)["state"]
    given.pop("model.bert.encoder.layers.0.attn.rotary_emb.inv_freq")
    assert_same_tensors(found["model"], given)
    assert read_composer(tmp_path / "back.pt").shape == read_composer(file).shape
    torch_to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    assert_same_tensors(
        load_file(tmp_path / "theirs/model.safetensors"), load_file(peer / "model.safetensors")
    )


def test_the_published_configuration():
    shape = shape_of_flexbert(PUBLISHED, "x.pt")
    assert shape == BertConfig(
        vocab_size=50368,
        hidden_size=768,
        num_hidden_layers=22,
        num_attention_heads=12,
        intermediate_size=1152,
        max_position_embeddings=8192,
        hidden_act="gelu_erf",
        hidden_dropout_prob=0.0,
        attention_output_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        position_embedding_type="rotary",
        rope_frequencies="product",
        norm_position="pre",
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        norm_bias=False,
        classifier_bias=False,
        local_attention=128,
        global_attn_every_n_layers=3,
        initializer="megatron",
        classifier_pooling="cls",
    )
    extended = PUBLISHED | {"rotary_emb_base": 160_000.0, "local_attn_rotary_emb_base": 10_000.0}
    found = shape_of_flexbert(extended, "x.pt")
    assert (found.rope_theta, found.local_rope_theta) == (160_000.0, 10_000.0)


@pytest.mark.parametrize(
    "options",
    [
        "hidden_dropout_prob=0.1",
        "sliding_window=-1 global_attn_every_n_layers=-1",
        "global_attn_every_n_layers=-1",
        "local_attn_rotary_emb_base=500.0",
        "attn_qkv_bias=True attn_out_bias=True mlp_in_bias=True mlp_out_bias=True",
        "pooling_type=mean hidden_act=gelu_pytorch_tanh head_pred_act=gelu_pytorch_tanh",
        "init_method=normal tie_word_embeddings=False head_pred_bias=True",
    ],
)
def test_configurations_come_back(options):
    values = dict(PUBLISHED)
    for option in options.split():
        name, _, text = option.partition("=")
        texts = {"True": True, "False": False, "-1": -1}
        number = float(text) if "." in text else text
        values[name] = texts.get(text, number)
    shape = shape_of_flexbert(values, "x.pt")
    assert shape_of_flexbert(flexbert_config(shape), "x.pt") == shape


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_layer", "rope_parallel"),
        ("bert_layer", "parallel_prenorm"),
        ("mlp_layer", "mlp"),
        ("normalization", "rmsnorm"),
        ("skip_first_prenorm", False),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_scale_base", 512),
        ("attn_out_bias", True),
        ("hidden_act", "silu"),
        ("decoder_bias", False),
    ],
)
def test_another_flexbert_is_refused(name, value):
    values = PUBLISHED | {name: value}
    if name == "hidden_act":
        values["head_pred_act"] = value
    with user_error("model.unsupported", "x.pt") as caught:
        shape_of_flexbert(values, "x.pt")
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rotary_emb_dim", 32), ("num_attention_heads", 7), ("hidden_size", "x"), ("pooling_type", 3)],
)
def test_an_impossible_configuration_is_one_line(name, value):
    with user_error("model.shape", "x.pt"):
        shape_of_flexbert(PUBLISHED | {name: value}, "x.pt")


def test_a_contradiction_in_the_configuration_is_named():
    with pytest.raises(UserError, match="hidden_size 100 is not a multiple of"):
        shape_of_flexbert({**PUBLISHED, "hidden_size": 100}, "x.pt")
