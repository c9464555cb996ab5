"""Whole Composer checkpoints: tensors and plain containers come out, nothing that a file names is called."""

from __future__ import annotations

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

from mlbert.models.weights.weight_files import STAND_INS, read_pt
from user_errors import user_error


class _Call:
    """Pickled as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


def everything_that_composer_keeps() -> dict[str, Any]:
    """The kinds of objects in a Composer checkpoint, beside tensors of several types and forms."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "state": {
            "model": OrderedDict(
                whole=base,
                transposed=base.T,
                row=base[1],
                empty=torch.empty(0, 3),
                number=torch.tensor(2.5, dtype=torch.float64),
                half=torch.ones(2, 2, dtype=torch.bfloat16),
                parameter=torch.nn.Parameter(torch.full((2,), 7.0)),
            ),
            "timestamp": {"time": datetime.timedelta(seconds=3), "batch": 4},
            "callbacks": omegaconf.OmegaConf.create({"a": [1, {"b": 2}]}),
            "metadata": {"torch": torch.torch_version.TorchVersion("2.13.0"), "counts": defaultdict(list, {"a": [1]})},
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


def test_torch_itself_refuses_this_file(file):
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


def read(path):
    return read_pt(path, "Give another", STAND_INS)


def test_tensors_come_out_bit_for_bit(file):
    tensors = read(file)["state"]["model"]
    for name, expected in everything_that_composer_keeps()["state"]["model"].items():
        assert torch.equal(tensors[name], expected), name
        assert tensors[name].dtype == expected.dtype
    assert tensors["whole"].data_ptr() == tensors["transposed"].data_ptr()


def test_only_plain_values_and_stand_ins_are_created(file):
    def kinds(value):
        if isinstance(value, dict):
            return {type(value)}.union(*(kinds(item) for item in value.values()))
        if isinstance(value, list | tuple):
            return {type(value)}.union(*(kinds(item) for item in value))
        return {type(value)}

    state = read(file)["state"]
    plain = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None)}
    stand_in = type(state["timestamp"]["time"])
    assert kinds(state) <= {*plain, torch.Tensor, torch.nn.Parameter, stand_in}
    assert vars(state["timestamp"]["time"]) == {}
    assert type(state["callbacks"]) is stand_in
    assert state["dataset_state"] == {"train": {"epoch": 0, 7: "seven"}}
    assert state["flags"] == (True, None, "text", 1.5, -3)


def payloads(path):
    mark = f"touch {path}"
    return [
        _Call(os.system, mark),
        _Call(eval, f"__import__('os').system({mark!r})"),
        _Call(exec, f"import os; os.system({mark!r})"),
        _Call(getattr, "text", "upper"),
        _Call(open, path, "w"),
        _Call(torch.load, path),
        {"deep": [{"deeper": _Call(os.system, mark)}]},
    ]


@pytest.mark.parametrize("number", range(7))
def test_forbidden_calls_are_refused_and_not_made(tmp_path, number):
    ran = tmp_path / "ran"
    torch.save({"state": {"model": {}}, "payload": payloads(str(ran))[number]}, tmp_path / "evil.pt")
    with user_error("checkpoint.unsafe", tmp_path / "evil.pt"):
        read(tmp_path / "evil.pt")
    assert not ran.exists()


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


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "text": lambda path: path.write_text("hello"),
    "no pickle": lambda path: zipped(path, {"archive/other": "x"}),
    "not a pickle": lambda path: zipped(path, {"archive/data.pkl": "hello"}),
    "compressed": lambda path: zipped(path, unzipped(path), zipfile.ZIP_DEFLATED),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_error(file, damage):
    DAMAGES[damage](file)
    # The other messages quote PyTorch, which may change.
    with user_error(
        "file.unreadable" if damage == "gone" else "checkpoint.damaged", file, wording=damage in ("compressed", "gone")
    ):
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


def test_flipped_bit_in_a_tensor(file):
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(12, dtype=torch.float32).numpy().tobytes()) + 9] ^= 1
    file.write_bytes(content)
    with user_error("checkpoint.damaged", file):
        read(file)
