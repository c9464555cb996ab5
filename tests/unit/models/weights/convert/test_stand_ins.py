"""Composer checkpoints: loading gives tensors and plain containers,
and calls nothing that a file names.
"""

import datetime
import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import omegaconf
import pytest
import torch

from mlbert.models.weights.stand_ins import stand_ins
from mlbert.models.weights.weight_files import read_pt
from stored_sets import flip
from unit.models.weights.convert.conftest import Call
from user_errors import user_error


def everything_that_composer_keeps() -> dict[str, Any]:
    """Return all kinds of objects of a Composer checkpoint,
    and tensors of several types and forms.
    """
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {"whole": base, "transposed": base.T, "row": base[1], "empty": torch.empty(0, 3)}
    tensors |= {
        "number": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
    }
    tensors["parameter"] = torch.nn.Parameter(torch.full((2,), 7.0))
    return {
        "state": {
            "model": OrderedDict(tensors),
            "timestamp": {"time": datetime.timedelta(seconds=3), "batch": 4},
            "callbacks": omegaconf.OmegaConf.create({"a": [1, {"b": 2}]}),
            "metadata": {
                "torch": torch.torch_version.TorchVersion("2.13.0"),
                "counts": defaultdict(list, {"a": [1]}),
            },
            "dataset_state": {"train": {"epoch": 0, 7: "seven"}},
            "flags": (True, None, "text", 1.5, -3),
        },
        "rng": [{"numpy": np.arange(5), "generator": torch.get_rng_state()}],
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ep0-ba4-rank0.pt"
    torch.save(everything_that_composer_keeps(), path)
    return path


def read(path):
    return read_pt(path, "Give a different file", stand_ins())


def test_tensors_come_out_bit_for_bit_of_a_file_that_torch_refuses(file):
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    tensors = read(file)["state"]["model"]
    for name, expected in everything_that_composer_keeps()["state"]["model"].items():
        assert torch.equal(tensors[name], expected), name
        assert tensors[name].dtype == expected.dtype
    assert tensors["whole"].data_ptr() == tensors["transposed"].data_ptr()


def test_only_plain_values_and_stand_ins_are_created(file):
    def kinds(value):
        items = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else ()
        )
        return {type(value)}.union(*map(kinds, items))

    state = read(file)["state"]
    plain = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None)}
    stand_in = type(state["timestamp"]["time"])
    assert kinds(state) <= {*plain, torch.Tensor, torch.nn.Parameter, stand_in}
    assert vars(state["timestamp"]["time"]) == {}
    assert type(state["callbacks"]) is stand_in
    assert state["dataset_state"] == {"train": {"epoch": 0, 7: "seven"}}
    assert state["flags"] == (True, None, "text", 1.5, -3)


@pytest.mark.parametrize(
    "payload",
    [
        Call(os.system, "touch ran"),
        {"deep": [{"deeper": Call(os.system, "touch ran")}]},
        *(Call(run, "__import__('os').system('touch ran')") for run in (eval, exec)),
        Call(getattr, "text", "upper"),
        Call(open, "ran", "w"),
        Call(torch.load, "ran"),
    ],
    ids=["system", "deep", "eval", "exec", "getattr", "open", "torch.load"],
)
def test_forbidden_calls_are_refused_and_not_made(tmp_path, monkeypatch, payload):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": {"model": {}}, "payload": payload}, tmp_path / "evil.pt")
    with user_error("checkpoint.unsafe", tmp_path / "evil.pt"):
        read(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_many_references_to_one_list_stay_small(tmp_path):
    value: list = ["x"]
    for _ in range(60):
        value = [value, value]
    torch.save({"state": value}, tmp_path / "bomb.pt")
    tree = read(tmp_path / "bomb.pt")
    assert tree["state"][0] is tree["state"][1]


def zipped(path, contents, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def unzipped(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def flip_a_tensor(path):
    flip(path, path.read_bytes().index(torch.arange(12, dtype=torch.float32).numpy().tobytes()) + 9)


# Of the damaged files, the wording is ours for some; the others quote PyTorch, which may change.
@pytest.mark.parametrize(
    ("damage", "code", "is_ours"),
    [
        pytest.param(flip_a_tensor, "checkpoint.damaged", True, id="flipped bit"),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[:-200]),
            "checkpoint.damaged",
            False,
            id="truncated",
        ),
        pytest.param(lambda path: path.write_text("hello"), "checkpoint.damaged", False, id="text"),
        pytest.param(
            lambda path: zipped(path, {"archive/other": "x"}),
            "checkpoint.damaged",
            False,
            id="no pickle",
        ),
        pytest.param(
            lambda path: zipped(path, {"archive/data.pkl": "hello"}),
            "checkpoint.damaged",
            False,
            id="not a pickle",
        ),
        pytest.param(
            lambda path: zipped(path, unzipped(path), zipfile.ZIP_DEFLATED),
            "checkpoint.damaged",
            True,
            id="compressed",
        ),
        pytest.param(lambda path: path.unlink(), "file.unreadable", True, id="gone"),
    ],
)
def test_damage_is_one_error(file, damage, code, is_ours):
    damage(file)
    with user_error(code, file, wording=is_ours):
        read(file)


def test_tensor_beyond_its_storage(file):
    """Twelve numbers that the file says are 300 x 4."""
    content = unzipped(file)
    (name,) = (name for name in content if name.endswith("data.pkl"))
    whole = b"K\x00K\x03K\x04"  # offset 0, sizes 3 and 4
    assert whole in content[name]
    zipped(file, content | {name: content[name].replace(whole, b"K\x00M\x2c\x01K\x04", 1)})
    with user_error("checkpoint.damaged", file, wording=False):
        read(file)
