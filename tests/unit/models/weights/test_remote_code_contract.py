"""The contract that transformers' common tests check of each of its models, for the classes that
travel in a folder.

transformers installs no tests, so the checks are written anew; the name after each docstring is
that of the test of its ``ModelTesterMixin`` with the same subject. What it removed in version 5
(masks and pruning of heads), and what these classes do not have (generation, a cache, chunked
feed-forward layers, a table of positions to resize in ALiBi models), is not here.
"""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import mlbert
from remote_shapes import CLOSE, FORMS, LENGTHS, SIZES, padded_inputs
from same_weights import randomize

HEADS = ("", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
WIDTH = max(LENGTHS)


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked-LM model without dropout."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = mlbert.new_model({**SIZES, **FORMS[request.param], **dropout})
    randomize(model, 0.1)
    path = tmp_path_factory.mktemp("remote") / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture(params=HEADS)
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    return load(folder, request.param)


def load(folder: Path, head: str = "ForMaskedLM", **more: object) -> Any:
    auto = getattr(transformers, f"AutoModel{head}")
    transformers.set_seed(0)  # of new heads
    found = auto.from_pretrained(folder, trust_remote_code=True, **more)
    assert type(found).__name__ == f"Mlbert{head or 'Model'}"
    return found.eval()


@torch.no_grad()
def output(model: Any, **inputs: Any) -> torch.Tensor:
    """Return the model's main output."""
    merged = padded_inputs() | inputs
    return model(**merged)[0]


def labels_for(model: Any) -> torch.Tensor:
    ids = padded_inputs()["input_ids"]
    if hasattr(model, "cls"):
        return ids
    return ids[:, 0] % 2 if "Sequence" in type(model).__name__ else ids % 2


def test_the_folder_comes_back(model: Any, tmp_path: Path) -> None:
    """test_save_load, test_can_use_safetensors,
    test_model_weights_reload_no_missing_tied_weights
    """
    model.save_pretrained(tmp_path)
    again, loading = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    assert torch.equal(output(again.eval()), output(model))
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "modeling_mlbert.py").is_file(), "the code travels with the weights"


def test_sharded_checkpoints(model: Any, tmp_path: Path) -> None:
    """test_checkpoint_sharding_local"""
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(output(type(model).from_pretrained(tmp_path).eval()), output(model))


def test_copies_and_pickles_are_equal(model: Any) -> None:
    """test_torch_save_load"""
    expected = output(model)
    assert torch.equal(output(copy.deepcopy(model)), expected)
    state = pickle.loads(pickle.dumps(model.state_dict()))
    other = copy.deepcopy(model)
    randomize(other, 0.2)
    other.load_state_dict(state)
    assert torch.equal(output(other), expected)


def test_tied_weights_are_stored_once(folder: Path, tmp_path: Path) -> None:
    """test_tied_weights_keys, test_tie_model_weights, test_load_save_without_tied_weights"""
    model = load(folder)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    size = model.config.vocab_size * model.config.hidden_size
    tables = [name for name, tensor in stored.items() if tensor.numel() == size]
    assert len(tables) == (1 if model.config.tie_word_embeddings else 2)
    words = model.get_input_embeddings().weight
    before = output(model)
    with torch.no_grad():
        words.mul_(1.5)
    assert not torch.equal(output(model), before)


def test_embeddings_are_found_and_replaced(model: Any) -> None:
    """test_model_get_set_embeddings"""
    table = model.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    other = torch.nn.Embedding(*table.weight.shape)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    decoder = model.get_output_embeddings()
    has_own = hasattr(model, "cls") and not model.config.tie_word_embeddings
    assert isinstance(decoder, torch.nn.Linear) if has_own else decoder is None


def test_embeddings_as_input(model: Any) -> None:
    """test_inputs_embeds, test_inputs_embeds_matches_input_ids"""
    words = model.get_input_embeddings()(padded_inputs()["input_ids"])
    found = output(model, input_ids=None, inputs_embeds=words)
    torch.testing.assert_close(found, output(model), **CLOSE)


def test_shapes_and_counts_of_optional_outputs(model: Any) -> None:
    """test_attention_outputs, test_hidden_states_output"""
    with torch.no_grad():
        given = model(**padded_inputs(), output_attentions=True, output_hidden_states=True)
        model.config.output_hidden_states = True
        configured = model(**padded_inputs())
    layers = SIZES["num_hidden_layers"]
    heads = SIZES["num_attention_heads"]
    assert [tuple(x.shape) for x in given.hidden_states] == [(2, WIDTH, 32)] * (layers + 1)
    assert [tuple(x.shape) for x in given.attentions] == [(2, heads, WIDTH, WIDTH)] * layers
    assert len(configured.hidden_states) == layers + 1
    assert configured.attentions is None


def test_outputs_are_the_same_as_a_tuple(model: Any) -> None:
    """test_model_outputs_equivalence"""
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        named = model(**padded_inputs(), **options).to_tuple()
        plain = model(**padded_inputs(), **options, return_dict=False)
    flat = torch.utils._pytree.tree_leaves
    for one, other in zip(flat(named), flat(plain), strict=True):
        assert torch.equal(one, other)


def test_gradients_reach_hidden_states_and_every_parameter(model: Any) -> None:
    """test_retain_grad_hidden_states_attentions, test_training"""
    model.train()
    found = model(**padded_inputs(), output_hidden_states=True, output_attentions=True)
    found.hidden_states[0].retain_grad()
    found.attentions[0].retain_grad()
    if getattr(found, "pooler_output", None) is not None:
        (found[0].sum() + found.pooler_output.sum()).backward()
    else:
        found[0].square().sum().backward()
    assert found.hidden_states[0].grad.abs().sum() > 0
    assert found.attentions[0].grad.abs().sum() > 0
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == set()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(folder: Path, reentrant: bool) -> None:
    """test_training_gradient_checkpointing_use_reentrant_true and _false,
    test_gradient_checkpointing_enable_disable"""
    model = load(folder).train()
    labels = padded_inputs()["input_ids"]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**padded_inputs(), labels=labels).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    model.enable_input_require_grads()
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_a_row_is_the_same_alone_and_in_a_batch(model: Any) -> None:
    """test_batching_equivalence"""
    inputs = padded_inputs()
    whole = output(model)
    for row, length in enumerate(LENGTHS):
        alone = output(
            model,
            input_ids=inputs["input_ids"][row : row + 1, :length],
            attention_mask=inputs["attention_mask"][row : row + 1, :length],
        )
        of_batch = whole[row] if whole.dim() == 2 else whole[row, :length]
        torch.testing.assert_close(alone[0], of_batch, **CLOSE)


def test_evaluation_repeats(model: Any) -> None:
    """test_determinism"""
    assert torch.equal(output(model), output(model))


def test_names_of_arguments(model: Any) -> None:
    """test_forward_signature, test_model_main_input_name"""
    names = list(inspect.signature(model.forward).parameters)
    assert names[0] == model.main_input_name == "input_ids"
    assert names[1] == "attention_mask"


@pytest.mark.parametrize("tokens", [70, 50])
def test_resized_embeddings(model: Any, tokens: int) -> None:
    """test_resize_tokens_embeddings, test_resize_embeddings_untied"""
    ids = padded_inputs()["input_ids"].clamp(max=49)
    before = output(model, input_ids=ids)
    model.resize_token_embeddings(tokens)
    after = output(model, input_ids=ids)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == tokens
    if hasattr(model, "cls"):
        kept = min(tokens, before.shape[-1])
        assert after.shape[-1] == tokens
        before = before[..., :kept]
        after = after[..., :kept]
    torch.testing.assert_close(after, before, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loaded_in_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    """test_bc_torch_dtype, test_from_pretrained_dtype"""
    exact = output(load(folder))
    model = load(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    found = output(model)
    assert found.dtype == dtype
    is_token = padded_inputs()["attention_mask"].bool()
    difference = (found.float() - exact)[is_token].abs().max()
    assert difference < 0.1 * exact[is_token].abs().max()
    assert {p.dtype for p in load(folder, torch_dtype=dtype).parameters()} == {dtype}


def test_implementations_of_attention(model: Any, folder: Path) -> None:
    """test_eager_matches_sdpa_inference, test_can_set_attention_dynamically,
    test_config_attn_implementation_setter"""
    assert model.config._attn_implementation == "sdpa"
    expected = output(model)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    found = output(model)
    if found.dim() == 3:
        is_token = padded_inputs()["attention_mask"].bool()
        found = found[is_token]
        expected = expected[is_token]
    torch.testing.assert_close(found, expected, **CLOSE)
    with pytest.raises(ValueError, match="does not support"):
        load(folder, attn_implementation="flash_attention_2")


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        ("regression", 1, torch.tensor([0.5, -2.0])),
        ("regression", 3, torch.tensor([[0.5, -2.0, 1.0], [1.0, 0.0, 2.0]])),
        ("single_label_classification", 3, torch.tensor([2, 0])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
        (None, 1, torch.tensor([0.5, -2.0])),
        (None, 3, torch.tensor([2, 0])),
        (None, 3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
    ],
)
def test_losses_are_those_of_bert(
    folder: Path, problem: str | None, num_labels: int, labels: torch.Tensor
) -> None:
    """test_problem_types"""
    options = {"num_labels": num_labels, "problem_type": problem}
    model = load(folder, "ForSequenceClassification", **options)
    config = transformers.BertConfig(**SIZES, **options)
    peer = transformers.BertForSequenceClassification(config).eval()
    logits = output(model)
    assert logits.shape == (2, num_labels)
    peer.classifier.register_forward_hook(lambda *_: logits)  # our logits in its loss
    with torch.no_grad():
        found = model(**padded_inputs(), labels=labels).loss
        expected = peer(**padded_inputs(), labels=labels).loss
    torch.testing.assert_close(found, expected, **CLOSE)


def test_heads_of_another_size_are_drawn_anew(folder: Path, tmp_path: Path) -> None:
    """test_load_with_mismatched_shapes, test_can_load_ignoring_mismatched_shapes"""
    load(folder, "ForSequenceClassification", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path, "ForSequenceClassification", num_labels=5)
    model = load(tmp_path, "ForSequenceClassification", num_labels=5, ignore_mismatched_sizes=True)
    assert output(model).shape == (2, 5)
    assert model.classifier.weight.std() < 0.1
    assert (model.classifier.bias == 0).all()


def test_weights_are_initialized(folder: Path) -> None:
    """test_initialization, test_can_init_all_missing_weights, test_can_be_initialized_on_meta"""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    for head in HEADS:
        auto = getattr(transformers, f"AutoModel{head}")
        drawn = auto.from_config(config, trust_remote_code=True)
        for name, parameter in drawn.state_dict().items():
            if name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif "LayerNorm" in name:
                assert (parameter == 1).all(), name
            else:
                assert parameter.std() == pytest.approx(config.initializer_range, rel=0.25), name
        with torch.device("meta"):
            shapes = auto.from_config(config, trust_remote_code=True)
        assert {p.device.type for p in shapes.parameters()} == {"meta"}


def test_generation_is_refused(folder: Path) -> None:
    """test_generative_selfcontained: it is not a generative model"""
    model = load(folder)
    assert not model.can_generate()
    with pytest.raises((AttributeError, ValueError, TypeError)):
        model.generate(padded_inputs()["input_ids"])


@pytest.mark.parametrize("head", HEADS[1:])
def test_a_step_of_the_trainer(folder: Path, head: str, tmp_path: Path) -> None:
    """transformers' Trainer trains it, saves it, and resumes."""
    model = load(folder, head)
    inputs = padded_inputs()
    labels = labels_for(model)
    rows = [
        {**{name: tensor[i] for name, tensor in inputs.items()}, "labels": labels[i]}
        for i in range(2)
    ]
    before = copy.deepcopy(model.state_dict())
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "save_steps": 1,
        "gradient_checkpointing": True,
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(**options, max_steps=1)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    again = transformers.TrainingArguments(**options, max_steps=2)
    trainer = transformers.Trainer(load(folder, head), again, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2
