"""Files are written as a whole or not at all, and for others than their owner too."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from mlbert.host.files import tensors_sha256, whole_file, write_atomically, write_tensors, write_weights_file
from user_errors import user_error


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_file_of_safetensors_gets_the_mode_of_any_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        write_tensors(path, lambda place: save_file({"a": np.zeros(2)}, place))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_a_place_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "no folder" / "model.safetensors", lambda place: save_file({"a": np.zeros(2)}, place))


def test_equal_tensors_make_equal_files_with_a_checksum(tmp_path: Path) -> None:
    tensors = {"b": np.arange(3.0), "a": np.zeros((2, 0)), "ä": np.array(1.5)}
    parts = [(name, one.shape, one.reshape(-1).view(np.uint8).data) for name, one in tensors.items()]
    for name in "xyz":
        write_weights_file(tmp_path / name, lambda path, words: save_file(tensors, path, metadata=words), parts)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes()
    with safe_open(tmp_path / "x", framework="np") as file:
        assert file.metadata() == {"format": "pt", "sha256": tensors_sha256(parts)}
        assert {name: file.get_tensor(name).tolist() for name in tensors} == {
            name: one.tolist() for name, one in tensors.items()
        }


def test_writing_into_no_folder(tmp_path: Path) -> None:
    with user_error("file.unwritable", tmp_path / "absent/file"):
        write_atomically(tmp_path / "absent" / "file", b"")


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def write_half() -> None:
        with whole_file(tmp_path / "file") as file:
            file.write(b"half")
            raise ZeroDivisionError

    (tmp_path / "file").write_text("before")
    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
