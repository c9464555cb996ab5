"""Starting weights: each form that INIT_CHECKPOINT may name gives the same model."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mlbert.config.bert_config import BertConfig
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification
from mlbert.models.huggingface_model import (
    HuggingFaceForMaskedLM,
    HuggingFaceForSequenceClassification,
)
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.load import load_weights
from mlbert.models.weights.weight_files import padded, write_composer
from mlbert.recipes.assembly import start_weights
from same_weights import assert_same_parameters, initialized
from stored_sets import flip
from user_errors import user_error

SHAPE = BertConfig(101, 16, 2, 2, 24, max_position_embeddings=32)
MOSAIC = SHAPE.with_options("gated_mlp=true position_embedding_type=alibi hidden_act=gelu_erf")
PRE_TRAINING_HEADS = [
    f"cls.{head} (no such parameter)" for head in ("predictions", "seq_relationship")
]
EXACT = SHAPE.with_options("hidden_act=gelu_erf")
OTHERS = {
    "mosaic into plain": (MOSAIC, SHAPE, "hidden_act gelu_erf"),
    "mosaic into plain of the exact GELU": (MOSAIC, EXACT, "position_embedding_type alibi"),
    "plain into mosaic": (EXACT, MOSAIC, "position_embedding_type absolute"),
    "other vocabulary": (SHAPE, SHAPE.with_options("vocab_size=131"), "word_embeddings.weight"),
    "fewer layers": (SHAPE, SHAPE.with_options("num_hidden_layers=1"), "encoder.layer.1."),
    "more layers": (SHAPE, SHAPE.with_options("num_hidden_layers=3"), "encoder.layer.2."),
    "other width": (SHAPE, SHAPE.with_options("hidden_size=32"), "16]"),
    "other heads": (
        SHAPE,
        SHAPE.with_options("num_attention_heads=4"),
        "MODEL_OPTIONS=num_attention_heads=2",
    ),
}
EMPTY = [{"state": {}}, {"state": {"model": {}}}, {"other": 1}, [1], {"model": 3}]
ODD_TENSORS = {
    "sparse": (torch.zeros(101, 16).to_sparse(), "checkpoint.format"),
    "no data": (torch.zeros(101, 16, device="meta"), "checkpoint.format"),
    "2 bytes for 10^12 numbers": (
        torch.zeros(1, dtype=torch.bfloat16).expand(10**6, 10**6),
        "checkpoint.shape",
    ),
    "complex": (torch.zeros(101, 16, dtype=torch.complex64), "checkpoint.damaged"),
    "8 bits": (torch.zeros(101, 16).to(torch.float8_e4m3fn), "checkpoint.damaged"),
}


def drawn(kind, shape, *numbers, seed=1):
    return initialized(kind(shape, *numbers), seed)


def model(seed):
    return drawn(BertForPreTraining, SHAPE, seed=seed)


@pytest.fixture
def state():
    return to_huggingface(model(1))


@pytest.mark.parametrize("form", ["file", "folder", "nvidia", "segmented", "state", "old folder"])
def test_forms(tmp_path, state, form):
    names = {
        "file": "model.safetensors",
        "folder": "model.safetensors",
        "old folder": "pytorch_model.bin",
    }
    path = tmp_path / names.get(form, "model.pt")
    content = state
    if form == "nvidia":
        rows = padded(state, SHAPE)
        content = {
            "model": {
                **rows,
                "cls.predictions.decoder.weight": rows["bert.embeddings.word_embeddings.weight"],
            }
        }
    elif form == "segmented":
        segments = {True: "bert_model_segment.", False: "heads_only_segment."}
        content = {
            "model": {
                segments[name.startswith("bert.")] + name: value for name, value in state.items()
            }
        }
    save_file(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    started = model(2)
    report = load_weights(started, tmp_path if form.endswith("folder") else path)
    assert report.missing == {}
    assert len(report.taken) == 46
    assert_same_parameters(started, model(1))


def test_values_in_the_vocabulary_padding_are_ignored(tmp_path, state):
    rows = {name: tensor.clone() for name, tensor in padded(state, SHAPE).items()}
    rows["bert.embeddings.word_embeddings.weight"][101:] = 3.0
    torch.save({"model": rows}, tmp_path / "model.pt")
    started = model(2)
    load_weights(started, tmp_path / "model.pt")
    assert not started.bert.embeddings.word_embeddings.weight[101:].any()


def test_missing_heads_stay_as_drawn(tmp_path, state):
    save_file(
        {name: tensor for name, tensor in state.items() if "pooler" not in name},
        tmp_path / "a.safetensors",
    )
    started = model(2)
    report = load_weights(started, tmp_path / "a.safetensors")
    assert report.missing == dict.fromkeys(
        ("bert.pooler.dense.weight", "bert.pooler.dense.bias"), "initialized"
    )
    assert torch.equal(started.bert.pooler.dense.weight, model(2).bert.pooler.dense.weight)
    assert f"44 taken, 0 dropped, {len(report.missing)} missing" == report.lines()[-1]


def written(model, folder, form):
    """Write the model's weights in this form, and return their path."""
    if form == "composer":
        write_composer(to_huggingface(model), model.config, folder / "a.pt")
        return folder / "a.pt"
    write_weights(model, folder, {}, None)
    return folder / form


@pytest.mark.parametrize("form", ["weights", "composer", "huggingface"])
@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize(
    ("start", "missing", "unused"),
    [
        (
            (BertForMaskedLM,),
            ["bert.pooler.dense", "classifier"],
            ["cls.predictions (no such parameter)"],
        ),
        ((BertForPreTraining,), ["classifier"], PRE_TRAINING_HEADS),
        (
            (BertForSequenceClassification, 3),
            ["classifier"],
            ["classifier (of 3 labels, but the model has 2)"],
        ),
        ((BertForSequenceClassification, 2), [], []),
    ],
)
def test_heads_that_do_not_fit_are_reported(tmp_path, form, theirs, start, missing, unused):
    """A classifier starts from a masked-LM model, from a classifier of another task, and from one
    of the same task.
    """
    kind, *numbers = start
    path = written(drawn(kind, SHAPE, *numbers), tmp_path, form)
    own = HuggingFaceForSequenceClassification if theirs else BertForSequenceClassification
    lines = []
    model = start_weights(
        own(SHAPE, 2), SimpleNamespace(init_checkpoint=path), 2, World(), lines.append
    )
    named = [f"{part}.{kind}" for part in missing for kind in ("weight", "bias")]
    wanted = [f"warning: {path} has no {name}" for name in named]
    if unused:  # Composer's files have no head for the next sentence
        wanted.append(
            f"warning: of {path} is not used: "
            f"{', '.join(unused[:1] if form == 'composer' else unused)}"
        )
    assert lines == wanted
    fresh = dict(drawn(own, SHAPE, 2, seed=2).named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert torch.equal(parameter, fresh[name]) == (name in named), name


def test_a_masked_lm_model_leaves_a_classifier_behind(tmp_path):
    path = written(drawn(BertForSequenceClassification, SHAPE, 2), tmp_path, "composer")
    report = load_weights(drawn(HuggingFaceForMaskedLM, SHAPE), path)
    assert report.unused_heads() == [
        "bert.pooler (no such parameter)",
        "classifier (no such parameter)",
    ]
    names = {name.rsplit(".", 1)[0].removeprefix("cls.predictions") for name in report.missing}
    assert names == {"", ".transform.dense", ".transform.LayerNorm"}


@pytest.mark.parametrize("form", ["weights", "composer"])
@pytest.mark.parametrize("case", OTHERS)
def test_another_model_is_one_line_and_nothing_changes(tmp_path, form, case):
    theirs, ours, named = OTHERS[case]
    path = written(drawn(BertForMaskedLM, theirs), tmp_path, form)
    model = drawn(BertForMaskedLM, ours, seed=2)
    code = "checkpoint.incomplete" if case == "more layers" else "checkpoint.shape"
    with user_error(code, path if form == "composer" else path / "model.safetensors") as error:
        load_weights(model, path)
    assert named in str(error.value)
    assert_same_parameters(model, drawn(BertForMaskedLM, ours, seed=2))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (MOSAIC, SHAPE),
        (SHAPE, MOSAIC),
        (SHAPE, SHAPE.with_options("position_embedding_type=alibi")),
    ],
    ids=["mosaic into plain", "plain into mosaic", "absolute into alibi"],
)
def test_the_kind_is_recognized_by_its_tensors(tmp_path, theirs, ours):
    """There is no configuration next to them."""
    save_file(to_huggingface(drawn(BertForMaskedLM, theirs)), tmp_path / "a.safetensors")
    with user_error("checkpoint.shape", tmp_path / "a.safetensors"):
        load_weights(drawn(BertForMaskedLM, ours), tmp_path / "a.safetensors")


@pytest.mark.parametrize("prefix", ["albert.", "model.model.", "x"])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_an_encoder_that_matches_nothing_is_an_error(tmp_path, state, prefix, form):
    other = {f"{prefix}{name.removeprefix('bert.')}": tensor for name, tensor in state.items()}
    path = tmp_path / f"a.{form}"
    save_file(other, path) if form == "safetensors" else torch.save(
        {"state": {"model": other}}, path
    )
    with user_error("checkpoint.incomplete", path):
        load_weights(model(2), path)


def test_buffers_of_older_checkpoints_do_not_matter(tmp_path, state):
    save_file(
        {**state, "bert.embeddings.position_ids": torch.arange(32)[None]},
        tmp_path / "a.safetensors",
    )
    report = load_weights(model(2), tmp_path / "a.safetensors")
    assert report.dropped == {"bert.embeddings.position_ids": "no such parameter"}
    assert report.unused_heads() == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ('{"model_type": "distilbert"}', "model.unsupported"),
        ("[1]", "file.json"),
        ("{", "file.json"),
    ],
)
def test_a_bad_configuration_next_to_the_weights(tmp_path, state, content, code):
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    with user_error(code, tmp_path / "config.json"):
        load_weights(model(2), tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [*(("a.pt", content) for content in EMPTY), ("model.bin", {}), ("model.ckpt-28252", {})],
)
def test_files_that_hold_no_weights_or_need_a_conversion(tmp_path, name, content):
    torch.save(content, tmp_path / name)
    with user_error("checkpoint.format", tmp_path / name):
        load_weights(model(2), tmp_path / name)


def test_weights_without_a_checksum_are_reported_and_a_flipped_bit_is_found(tmp_path):
    path = written(drawn(BertForPreTraining, SHAPE), tmp_path, "weights")
    assert load_weights(model(2), path).warnings(path) == []
    file = path / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    with user_error("checkpoint.checksum", file):
        load_weights(model(2), path)
    save_file(load_file(file), file)
    (warning,) = load_weights(model(2), path).warnings("x")
    assert warning == "note: x has no checksum, so a damaged number in it would not be noticed"


@given(st.data())
@settings(max_examples=30)
def test_a_damaged_file_of_weights_is_one_line(whole_weights, data):
    """Cut, changed in its header, or with another length of it."""
    content = bytearray(whole_weights.read_bytes())
    header = int.from_bytes(content[:8], "little")
    kind = data.draw(st.sampled_from(["cut", "byte", "length"]))
    if kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "byte":
        content[8 + data.draw(st.integers(0, header - 1))] ^= data.draw(st.integers(1, 255))
    else:
        content[:8] = data.draw(
            st.integers(0, 2**64 - 1).filter(lambda size: size != header)
        ).to_bytes(8, "little")
    path = whole_weights.with_name("damaged.safetensors")
    path.write_bytes(content)
    try:
        load_weights(model(2), path)
    except UserError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017


@pytest.fixture(scope="module")
def whole_weights(tmp_path_factory):
    return (
        written(drawn(BertForPreTraining, SHAPE), tmp_path_factory.mktemp("whole"), "weights")
        / "model.safetensors"
    )


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors_of_other_kinds_are_one_line(tmp_path, state, kind):
    tensor, code = ODD_TENSORS[kind]
    torch.save({**state, "bert.embeddings.word_embeddings.weight": tensor}, tmp_path / "a.pt")
    with user_error(code, tmp_path / "a.pt") as caught:
        load_weights(model(2), tmp_path / "a.pt")
    assert "word_embeddings" in str(caught.value)
