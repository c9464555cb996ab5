"""NVIDIA's .pt files: plain, segmented and fused names, the padded vocabulary, the tied decoder, damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from same_weights import assert_same_tensors

NAMES = Path(__file__).parents[4] / "assets" / "checkpoints" / "names.txt"
STEM = "bert_model_segment.bert.encoder.layer"


class _Payload:
    """Pickled as a call of the shell."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


@pytest.fixture
def plain(tmp_path, own_folder, mlbert):
    """A .pt file that we wrote, with its configuration beside it."""
    code, out, error = mlbert("torch-to-nvidia", own_folder, tmp_path / "nvidia" / "model.pt")
    assert code == 0, error
    assert "46 taken, 0 dropped, 0 missing" in out
    (tmp_path / "nvidia" / "bert_config.json").write_bytes((own_folder / "bert_config.json").read_bytes())
    return tmp_path / "nvidia" / "model.pt"


def test_written_form(plain, state):
    content = torch.load(plain, weights_only=True)
    assert list(content) == ["model"]
    model = content["model"]
    assert len(model) == 47
    assert model["bert.embeddings.word_embeddings.weight"].shape == (200, 32)
    assert model["cls.predictions.bias"].shape == (200,)
    assert torch.equal(model["cls.predictions.decoder.weight"], model["bert.embeddings.word_embeddings.weight"])
    assert not model["bert.embeddings.word_embeddings.weight"][197:].any()
    assert torch.equal(model["bert.pooler.dense.weight"], state["bert.pooler.dense.weight"])


def test_round_trip(tmp_path, plain, mlbert, state):
    code, out, error = mlbert("nvidia-to-torch", plain, tmp_path / "back")
    assert code == 0, error
    assert "cls.predictions.decoder.weight: dropped (tied to bert.embeddings.word_embeddings.weight)" in out
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), state)


def fuse(state, names, attention):
    """The state under other names; query, key and value as one tensor a layer where a name for it is given."""
    content = {}
    for own, tensor in state.items():
        if attention is None or ".attention.self." not in own:
            content[names[own]] = tensor
    for layer in range(2) if attention else ():
        for kind, name in zip(("weight", "bias"), attention, strict=True):
            own = [f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
            content[f"{STEM}.{layer}.{name}"] = torch.cat([state[part] for part in own])
    return content


@pytest.mark.parametrize(
    ("form", "attention"),
    [
        ("plain", None),
        ("segmented", None),
        ("segmented", ("attention.self.Wqkv", "attention.self.Bqkv")),
        ("segmented", ("attention.self.Wqkv.weight", "attention.self.Wqkv.bias")),
        ("fused", None),
        ("transformer_engine", ("attention.qkv_weight", "attention.qkv_bias")),
    ],
)
def test_names_of_training_programs(tmp_path, plain, mlbert, state, form, attention):
    rows = [line.split() for line in NAMES.read_text().splitlines()]
    names = {own: theirs for _, of, theirs, own in rows if of == form}
    content = fuse(state, names or {own: own for own in state}, attention)
    file = plain.with_name("other.pt")
    torch.save({"model": content}, file)
    code, out, error = mlbert("nvidia-to-torch", file, tmp_path / "back")
    assert code == 0, error
    assert "0 dropped, 0 missing" in out
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), state)


def test_half_precision_becomes_float32(tmp_path, plain, mlbert, state):
    file = plain.with_name("half.pt")
    torch.save({"model": {name: tensor.half() for name, tensor in state.items()}}, file)
    assert mlbert("nvidia-to-torch", file, tmp_path / "back")[0] == 0
    rounded = {name: tensor.half().float() for name, tensor in state.items()}
    assert_same_tensors(load_file(tmp_path / "back/model.safetensors"), rounded)


WORDS, LAST = "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.output.dense.weight"
DAMAGES = {
    "gone": (Path.unlink, "file.unreadable"),
    "no config": (lambda file: file.with_name("bert_config.json").unlink(), "file.missing"),
}
# What is stored in place of a good state.
CONTENTS = {
    "no container": (dict, "checkpoint.format"),
    "other model": (lambda state: {"model": {"weight": torch.zeros(2)}}, "checkpoint.incomplete"),
    "missing tensor": (
        lambda state: {"model": {name: tensor for name, tensor in state.items() if name != LAST}},
        "checkpoint.incomplete",
    ),
    **{
        name: (lambda state, changes=changes: {"model": {**state, **changes(state)}}, code)
        for name, (changes, code) in {
            "wrong shape": (lambda state: {"bert.pooler.dense.weight": torch.zeros(3, 3)}, "checkpoint.shape"),
            "third layer": (lambda state: {LAST.replace("1", "2"): torch.zeros(3, 3)}, "checkpoint.shape"),
            "untied": (lambda state: {"cls.predictions.decoder.weight": state[WORDS] + 1}, "checkpoint.damaged"),
            "integers": (lambda state: {"bert.pooler.dense.bias": torch.zeros(32).long()}, "checkpoint.damaged"),
        }.items()
    },
}


@pytest.mark.parametrize("damage", [*DAMAGES, *CONTENTS, "payload"])
def test_damage_is_one_line_and_nothing_is_written(tmp_path, plain, state, refused, damage):
    back, code = tmp_path / "back", "checkpoint.unsafe"
    if damage in DAMAGES:
        spoil, code = DAMAGES[damage]
        spoil(plain)
    elif damage in CONTENTS:
        content, code = CONTENTS[damage]
        torch.save(content(state), plain)
    else:
        torch.save({"model": state, "more": _Payload(f"touch {plain.with_name('ran')}")}, plain)
    subject = plain.with_name("bert_config.json") if damage == "no config" else plain
    refused("nvidia-to-torch", plain, back, target=back, code=code, subject=subject)
    assert not plain.with_name("ran").exists()


def test_existing_file_is_kept(tmp_path, own_folder, plain, refused):
    before = plain.read_bytes()
    refused("torch-to-nvidia", own_folder, plain, target=plain, code="file.exists", subject=plain)
    assert plain.read_bytes() == before
