"""Larger models from smaller ones: tiles, layers, and a lower loss than a random model's."""

import dataclasses
import itertools

import pytest
import torch
import transformers
from torch.nn import functional as F

from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForMaskedLM, BertForSequenceClassification
from mlbert.models.weights.checkpoint_state import parameter_shapes
from mlbert.models.weights.convert import grow_model
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.grow import check_growth, grow, layer_source, tile
from mlbert.models.weights.huggingface import read_config, to_huggingface
from mlbert.models.weights.load import load_weights, open_saved
from modernbert_peers import SMALL, masked_batch, save_peer
from same_weights import randomize
from user_errors import user_error

BASE = BertConfig.from_json(CONFIGS / "modernbert_base.json")
LARGE = BertConfig.from_json(CONFIGS / "modernbert_large.json")
STEPS = 150


def larger(small: BertConfig, heads: int = 2, layers: int = 3, inner: int = 24) -> BertConfig:
    """Return a shape with more heads of the same size, layers and inner columns."""
    return dataclasses.replace(
        small,
        hidden_size=small.hidden_size + heads * small.head_size,
        num_attention_heads=small.num_attention_heads + heads,
        num_hidden_layers=small.num_hidden_layers + layers,
        intermediate_size=small.intermediate_size + inner,
    )


@pytest.fixture
def small(tmp_path) -> BertConfig:
    transformers.ModernBertConfig(**SMALL).save_pretrained(tmp_path)
    return read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("entries", "size", "expected"),
    [
        ([1, 2, 3], 8, [2, 3, 1, 2, 3, 1, 2, 3]),
        ([1, 2, 3], 5, [3, 1, 2, 3, 1]),
        ([1, 2], 4, [2, 1, 2, 1]),
        ([1, 2, 3], 3, [1, 2, 3]),
        ([1], 3, [1, 1, 1]),
    ],
)
def test_tiles_go_outwards_from_the_middle(entries, size, expected):
    assert tile(torch.tensor(entries), 0, size).tolist() == expected


def test_published_layers():
    """Large from base: each of 22 layers is used, six of them twice."""
    check_growth(BASE, LARGE, "large")
    sources = [layer_source(layer, BASE, LARGE) for layer in range(28)]
    assert sources[:9] == [0, 1, 2, 2, 3, 4, 5, 6, 6]
    assert sorted(set(sources)) == list(range(22))
    assert len(sources) == 28


@pytest.mark.parametrize("heads", [False, True])
def test_each_matrix_apart(small, heads):
    large = larger(small)
    model = randomize(BertForSequenceClassification(small, 3) if heads else BertForMaskedLM(small))
    state = to_huggingface(model)
    grown, became = grow(state, small, large)
    new = BertForSequenceClassification(large, 3) if heads else BertForMaskedLM(large)
    sizes = {name: tuple(tensor.shape) for name, tensor in to_huggingface(new).items()}
    assert {name: tuple(tensor.shape) for name, tensor in grown.items()} == sizes
    assert all(became.values())
    middle = slice((large.hidden_size - 48) // 2, (large.hidden_size - 48) // 2 + 48)
    for layer in range(large.num_hidden_layers):
        source = f"bert.encoder.layer.{layer_source(layer, small, large)}"
        target = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            weight = grown[f"{target}.attention.self.{part}.weight"]
            expected = state[f"{source}.attention.self.{part}.weight"]
            assert torch.equal(weight[middle, middle], expected)
        first = (large.intermediate_size - small.intermediate_size) // 2
        for half in range(2):
            weight = grown[f"{target}.intermediate.dense.weight"].chunk(2)[half]
            expected = state[f"{source}.intermediate.dense.weight"].chunk(2)[half]
            inside = weight[first : first + small.intermediate_size, middle]
            assert torch.equal(inside, expected)
        norm = f"{target}.attention.LayerNorm.weight"
        if layer and f"{source}.attention.LayerNorm.weight" not in state:
            assert torch.equal(grown[norm], torch.ones(large.hidden_size))
    words = grown["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(words[:, middle], state["bert.embeddings.word_embeddings.weight"])


def test_the_same_size_is_the_same_model(small):
    state = to_huggingface(randomize(BertForMaskedLM(small)))
    grown, _ = grow(state, small, small)
    assert grown.keys() == state.keys()
    assert all(torch.equal(grown[name], state[name]) for name in state)


def test_any_kind_of_model_grows():
    options = [
        {"gated_mlp": gated, "norm_position": norm, "tie_word_embeddings": tied}
        for gated, norm, tied in itertools.product([False, True], ["pre", "post"], [False, True])
    ]
    for option in options:
        small = BertConfig(99, 32, 2, 2, 48, 32, **option)
        large = larger(small)
        state = to_huggingface(randomize(BertForMaskedLM(small)))
        grown, _ = grow(state, small, large)
        expected = to_huggingface(BertForMaskedLM(large))
        assert {name: tensor.shape for name, tensor in grown.items()} == {
            name: tensor.shape for name, tensor in expected.items()
        }
        assert grown.keys() <= parameter_shapes(large).keys()


def test_a_grown_model_knows_more_than_a_random_one(tmp_path, small):
    """A small model that has learnt something; the loss of the larger one before any step."""
    small = dataclasses.replace(small, vocab_size=99)
    model = BertForMaskedLM(small)
    model.initialize(1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss(network: BertForMaskedLM, seed: int) -> torch.Tensor:
        batch = masked_batch([24] * 8, 20, seed)  # one fifth of the vocabulary occurs
        return F.cross_entropy(network(batch, None).masked, batch.masked_labels)

    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    write_weights(model, tmp_path / "small", {}, None)
    large = larger(small)
    (tmp_path / "large.json").write_text(large.to_json())
    report = grow_model(tmp_path / "small/weights", tmp_path / "large", tmp_path / "large.json")
    assert not report.missing
    grown = BertForMaskedLM(large)
    assert not load_weights(grown, tmp_path / "large").missing
    random = BertForMaskedLM(large)
    random.initialize(1)
    with torch.no_grad():
        losses = [float(loss(network, STEPS)) for network in (model, grown, random)]
    assert losses[0] <= losses[1] + 0.05
    assert losses[1] < losses[2] - 0.5, losses


def test_from_a_folder_of_transformers(tmp_path):
    """The larger shape is the config.json of any model; the head is kept."""
    save_peer(tmp_path / "small")
    values = SMALL | {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 7}
    transformers.ModernBertConfig(**values).save_pretrained(tmp_path / "shape")
    grow_model(tmp_path / "small", tmp_path / "large", tmp_path / "shape/config.json")
    model, report, _, _ = open_saved(tmp_path / "large")
    assert not report.missing
    assert type(model).__name__ == "BertForMaskedLM"
    assert model.config == read_config(tmp_path / "shape/config.json")


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size": 32, "num_attention_heads": 2},
        {"num_hidden_layers": 4},
        {"num_attention_heads": 6},
        {"vocab_size": 100},
        {"norm_bias": True},
        {"local_attention": 32},
    ],
)
def test_another_kind_is_refused(small, options):
    with user_error("model.shape", "large.json"):
        check_growth(small, dataclasses.replace(small, **options), "large.json")
