"""Files are written as a whole or not at all, and for others than their owner too."""

import hashlib
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mlbert.host.files import (
    Tensors,
    tensors_sha256,
    whole_file,
    write_atomically,
    write_tensors,
    write_weights_file,
)
from user_errors import user_error


def parts_of(tensors: dict[str, torch.Tensor]) -> Tensors:
    contents = {
        name: one.reshape(-1).view(torch.uint8).numpy().data for name, one in tensors.items()
    }
    return [
        (name, str(one.dtype), tuple(one.shape), contents[name]) for name, one in tensors.items()
    ]


def test_tensors_are_written_byte_for_byte_as_by_the_library(tmp_path):
    kinds = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
    ]
    kinds += [torch.bool, torch.int8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {f"{number % 3}{kind}": torch.arange(5).to(kind) for number, kind in enumerate(kinds)}
    tensors |= {'ä"\\': torch.tensor(1.5), "empty": torch.zeros(2, 0), "large": torch.rand(700_000)}
    digest = write_tensors(tmp_path / "own", parts_of(tensors))
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "own").read_bytes()).hexdigest()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_of_tensors_gets_the_mode_of_any_new_file(umask, mode, tmp_path):
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        write_tensors(path, parts_of({"a": torch.zeros(2)}))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_equal_tensors_make_equal_files_with_a_checksum(tmp_path):
    tensors = {"b": torch.arange(3.0), "a": torch.zeros(2, 0), "ä": torch.tensor(1.5)}
    parts = parts_of(tensors)
    for name, order in (("x", parts), ("y", parts[::-1])):
        write_weights_file(tmp_path / name, order)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "sha256": tensors_sha256(parts)}
        assert all(torch.equal(file.get_tensor(name), one) for name, one in tensors.items())


def test_a_failed_write_leaves_no_file(tmp_path):
    def write_half() -> None:
        with whole_file(tmp_path / "file") as file:
            file.write(b"half")
            raise ZeroDivisionError

    (tmp_path / "file").write_text("before")
    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_writing_into_a_missing_folder(tmp_path):
    with user_error("file.unwritable", tmp_path / "absent/file"):
        write_atomically(tmp_path / "absent" / "file", b"")
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "absent" / "file", parts_of({"a": torch.zeros(2)}))
