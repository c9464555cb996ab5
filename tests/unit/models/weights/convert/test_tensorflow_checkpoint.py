"""Checkpoints that TensorFlow wrote: every variable's fate, damaged files."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from mlbert.config.bert_config import BertConfig
from mlbert.models.weights.checkpoint_names import tf1_names
from programs import run_quietly
from same_weights import assert_same_tensors
from stored_sets import flip

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
pytestmark = pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow is not installed (extra tf)")
TENSORS = 46
DROPPED = "dropped (optimizer slot or counter)"
# Parts of the output; the slots and the step are dropped.
REPORTED = {
    "tf1": [
        f"global_step: {DROPPED}",
        f"bert/pooler/dense/kernel/LAMB_1: {DROPPED}",
        "cls/predictions/output_bias: taken as cls.predictions.bias",
        f"{TENSORS} taken, {2 * TENSORS + 1} dropped, 0 missing",
    ],
    "pretrainer": [
        f".OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE: {DROPPED}",
        f"{TENSORS} taken",
    ],
    "items": [f"{TENSORS} taken"],
}
PREFIX = {
    "tf1": "tf1/model.ckpt-28252",
    "pretrainer": "pretrainer/bert_model.ckpt",
    "items": "items/bert_model.ckpt",
}
TF1 = "model.ckpt-28252"
DATA = f"{TF1}.data-00000-of-00001"
INDEX = f"{TF1}.index"
CONFIG = "bert_config.json"
SHAPES = ({"intermediate_size": 64}, {"vocab_size": 190}, {"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def written(tmp_path_factory, shape, state) -> Path:
    """Return the folder that tensorflow_program.py wrote from the small BERT."""
    folder = tmp_path_factory.mktemp("tensorflow")
    names = tf1_names(shape.num_hidden_layers)
    arrays = {
        names[name]: value.T if names[name].endswith("kernel") else value
        for name, value in state.items()
    }
    np.savez(
        folder / "weights.npz",
        **{name: value.contiguous().numpy() for name, value in arrays.items()},
    )
    (folder / "bert_config.json").write_text(shape.to_json())
    program = Path(__file__).with_name("tensorflow_program.py")
    done = run_quietly(sys.executable, program, folder, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def copied(tmp_path, written):
    """Return the TensorFlow 1 checkpoint's prefix in a folder that may be damaged."""
    return shutil.copytree(written / "tf1", tmp_path / "tf1") / "model.ckpt-28252"


@pytest.mark.parametrize("form", list(PREFIX))
def test_weights_equal_those_of_tensorflow(tmp_path, written, mlbert, state, form):
    out, error = mlbert(
        f"{'tf1' if form == 'tf1' else 'tf2'}-to-torch", written / PREFIX[form], tmp_path / "ours"
    )
    assert error == ""
    assert [part for part in [*REPORTED[form], "0 missing"] if part not in out] == []
    assert_same_tensors(load_file(tmp_path / "ours" / "model.safetensors"), state)


def test_in_one_step_to_nvidias_form(tmp_path, written, mlbert):
    out, _ = mlbert("tf1-to-nvidia", f"{written / PREFIX['tf1']}.index", tmp_path / "at_once.pt")
    assert f"{TENSORS} taken, {2 * TENSORS + 1} dropped, 0 missing" in out
    mlbert("tf1-to-torch", written / PREFIX["tf1"], tmp_path / "ours")
    mlbert("torch-to-nvidia", tmp_path / "ours", tmp_path / "in_two.pt")
    assert (tmp_path / "at_once.pt").read_bytes() == (tmp_path / "in_two.pt").read_bytes()
    mlbert("tf1-to-nvidia", written / PREFIX["tf1"], tmp_path / "at_once.pt", status=2)


def test_heads_that_the_checkpoint_lacks_are_initialized_and_named(
    tmp_path, written, mlbert, state
):
    out, _ = mlbert("tf2-to-torch", written / "encoder_only/bert_model.ckpt", tmp_path / "ours")
    assert "cls.predictions.transform.dense.weight: missing (initialized)" in out
    assert "39 taken" in out
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found["bert.pooler.dense.weight"].equal(state["bert.pooler.dense.weight"])
    assert not found["cls.predictions.bias"].any()


@pytest.mark.parametrize("form", list(PREFIX))
def test_a_checkpoint_of_the_other_version_is_named(tmp_path, written, refused, form):
    other = "tf2" if form == "tf1" else "tf1"
    prefix = written / PREFIX[form]
    refused(
        f"{other}-to-torch", prefix, tmp_path / "ours", code="checkpoint.format", subject=prefix
    )


def test_config_option_suffix_and_vocabulary(tmp_path, copied, mlbert, shape):
    config = copied.with_name("bert_config.json").rename(tmp_path / "elsewhere.json")
    copied.with_name("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    index = copied.with_name(f"{copied.name}.index")
    mlbert("tf1-to-torch", index, tmp_path / "ours", "--config", config)
    names = {"bert_config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    assert BertConfig.from_json(tmp_path / "ours" / "bert_config.json") == shape


def cut(size):
    return lambda file: file.write_bytes(file.read_bytes()[:size])


def flip_a_bit(file):
    flip(file, 5000)


def change(**changes):
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "damage", "code", "subject"),
    [
        *(
            (DATA, damage, "checkpoint.damaged", TF1)
            for damage in (cut(20_000), flip_a_bit, Path.unlink)
        ),
        *(
            (INDEX, damage, "checkpoint.damaged", TF1)
            for damage in (cut(100), lambda file: file.write_text("hello\n"))
        ),
        *((name, Path.unlink, "file.missing", name) for name in (INDEX, CONFIG)),
        *((CONFIG, change(**changes), "checkpoint.shape", TF1) for changes in SHAPES),
    ],
)
def test_damage_is_one_line_and_nothing_is_written(
    tmp_path, copied, refused, name, damage, code, subject
):
    damage(copied.with_name(name))
    wording = code != "checkpoint.damaged"  # TensorFlow's own words
    refused(
        "tf1-to-torch",
        copied,
        tmp_path / "ours",
        code=code,
        subject=copied.with_name(subject),
        wording=wording,
    )


@pytest.mark.parametrize(
    ("command", "name", "code"),
    [
        ("tf1", "incomplete", "checkpoint.incomplete"),
        *((tf, "foreign", "checkpoint.format") for tf in ("tf1", "tf2")),
    ],
)
def test_a_checkpoint_without_the_variables_is_named(
    tmp_path, written, refused, command, name, code
):
    source = written / name / "model.ckpt"
    refused(f"{command}-to-torch", source, tmp_path / "ours", code=code, subject=source)


def test_tf2_of_another_shape(tmp_path, written, refused):
    values = json.loads((written / "items/bert_config.json").read_text())
    config = tmp_path / "other.json"
    prefix = written / PREFIX["items"]
    for changes in ({"num_attention_heads": 2}, {"num_hidden_layers": 1}):
        config.write_text(json.dumps({**values, **changes}))
        refused(
            "tf2-to-torch",
            prefix,
            tmp_path / "ours",
            "--config",
            config,
            code="checkpoint.shape",
            subject=prefix,
        )


def test_without_tensorflow_the_extra_is_named(tmp_path, copied, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    refused("tf1-to-torch", copied, tmp_path / "ours", code="package.missing", subject=copied)
