"""bert_config.json: the benchmark's file, and damaged ones."""

import dataclasses
import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining
from user_errors import user_error

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)
CHANGES = st.dictionaries(
    st.sampled_from([field.name for field in dataclasses.fields(BertConfig)]), VALUES, min_size=1
)
OPTIONS = {
    "position_embedding_type": st.sampled_from(["absolute", "alibi"]),
    "norm_position": st.sampled_from(["post", "pre"]),
    "gated_mlp": st.booleans(),
    "tie_word_embeddings": st.booleans(),
}


def write(tmp_path, text):
    path = tmp_path / "bert_config.json"
    path.write_text(text)
    return path


def test_large_is_the_benchmarks_shape(tmp_path):
    large = BertConfig.from_json(CONFIGS / "large.json")
    keys = sorted(set(json.loads(large.to_json())) - {"layer_norm_eps"})
    text = json.dumps({key: getattr(large, key) for key in keys}, indent=2) + "\n"
    # md5 of the benchmark's published bert_config.json
    assert hashlib.md5(text.encode()).hexdigest() == "7f59165e21b7d566db610ff6756c926b"
    assert BertConfig.from_json(write(tmp_path, text)) == large


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_shapes_are_valid(path):
    shape = BertConfig.from_json(path)
    assert shape.padded_vocab_size % 8 == 0
    assert BertConfig(**json.loads(shape.to_json())) == shape


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 30}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob"),
        ({"hiden_size": 32}, "hiden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"position_embedding_type": "rope"}, "absolute"),
        ({"norm_position": "middle"}, "post"),
        ({"gated_mlp": 1}, "true or false"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"num_hidden_layers": 10**6}, "1024"),
        ({"vocab_size": 10**12}, "262144"),
    ],
)
def test_bad_values_are_named_with_the_file(tmp_path, change, named):
    path = write(tmp_path, json.dumps({**TINY, **change}))
    with user_error("model.shape", path) as error:
        BertConfig.from_json(path)
    assert named in str(error.value)


@given(changes=CHANGES, left_out=st.sets(st.sampled_from(list(TINY)), max_size=1))
@settings(max_examples=30)
def test_any_values_make_a_shape_or_one_line(tmp_path_factory, changes, left_out):
    values = {name: value for name, value in {**TINY, **changes}.items() if name not in left_out}
    path = write(tmp_path_factory.getbasetemp(), json.dumps(values))
    try:
        shape = BertConfig.from_json(path)
    except UserError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
        assert len(str(error)) < 900  # noqa: PT017
    else:
        assert BertConfig.from_json(write(path.parent, shape.to_json())) == shape


def test_options_are_written_where_they_are_used(tmp_path):
    plain = BertConfig(**TINY)
    assert "gated_mlp" not in plain.to_json()
    other = BertConfig(
        **TINY, position_embedding_type="alibi", norm_position="pre", tie_word_embeddings=False
    )
    assert BertConfig.from_json(write(tmp_path, other.to_json())) == other


@given(
    sizes=st.tuples(*[st.integers(1, 20)] * 6),
    heads=st.integers(1, 3),
    options=st.fixed_dictionaries(OPTIONS),
)
@settings(max_examples=50)
def test_parameters_of_any_shape(sizes, heads, options):
    vocab, per_head, layers, inner, positions, types = sizes
    shape = BertConfig(
        vocab, per_head * heads, layers % 4 + 1, heads, inner, positions, types, **options
    )
    with torch.device("meta"):
        model = BertForPreTraining(shape)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("bert-base-uncased", 109_514_298),
        ("mosaic_base", 137_400_384),
        ("modernbert_base", 149_655_232),
        ("modernbert_large", 395_881_664),
    ],
)
def test_published_sizes(name, published):
    """Parameters of the masked-LM models; MosaicBERT pads its vocabulary as we do,
    Hugging Face's BERT does not.
    """
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig.from_json(CONFIGS / f"{name}.json"))
    shape = model.config
    padding = (shape.padded_vocab_size - shape.vocab_size) * (shape.hidden_size + 1)
    assert (
        sum(p.numel() for p in model.parameters()) - (0 if shape.gated_mlp else padding)
        == published
    )


def test_published_shapes_are_ours_with_the_exact_gelu():
    for published, own in (
        ("bert-base-uncased", "base"),
        ("bert-large-uncased", "large"),
        ("bert-tiny", "tiny"),
    ):
        shape = BertConfig.from_json(CONFIGS / f"{own}.json")
        assert BertConfig.from_json(CONFIGS / f"{published}.json") == shape.with_options(
            "hidden_act=gelu_erf"
        )


def test_options_take_the_place_of_the_files_values():
    shape = BertConfig(**TINY)
    assert shape.with_options(None) == shape.with_options(" ") == shape
    text = (
        "num_hidden_layers=6  gated_mlp=True hidden_dropout_prob=0 layer_norm_eps=1e-5 "
        "hidden_act=gelu_erf"
    )
    changes = {
        "num_hidden_layers": 6,
        "gated_mlp": True,
        "hidden_dropout_prob": 0.0,
        "layer_norm_eps": 1e-5,
    }
    assert shape.with_options(text) == dataclasses.replace(shape, **changes, hidden_act="gelu_erf")


def test_an_option_may_be_none():
    shape = BertConfig(**TINY).with_options(
        "position_embedding_type=rotary norm_position=pre gated_mlp=true embedding_dropout_prob=0.2"
    )
    assert shape.embedding_dropout == 0.2
    assert shape.with_options("embedding_dropout_prob=none").embedding_dropout_prob is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(
            (text, "config.unknown-name")
            for text in ("num_hidden_layer=2", "max_position_embedding=512", "xyz=1")
        ),
        *((text, "config.value") for text in ("gated_mlp", "gated_mlp=yep", "hidden_size=3.5")),
        *((text, "config.value") for text in ("hidden_dropout_prob=x", "hidden_dropout_prob=nan")),
        *((text, "model.shape") for text in ("hidden_size=30", "position_embedding_type=rope")),
        ("hidden_size=64 hidden_size=32", "config.duplicate"),
    ],
)
def test_bad_options_are_one_line(text, code):
    with user_error(code, "MODEL_OPTIONS"):
        BertConfig(**TINY).with_options(text)
