"""What a log calls the weights that a run starts from: the same wherever they lie."""

import hashlib
import shutil
from pathlib import Path

import pytest

from mlbert.runs.starting_weights import name_weights


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", ["weights/model.safetensors", "model.safetensors", "pytorch_model.bin"])
def test_a_folder_means_its_weights(name, tmp_path):
    (tmp_path / "run/weights").mkdir(parents=True)
    (tmp_path / "run" / name).write_bytes(b"w")
    assert name_weights(tmp_path / "run") == ("run", sha256(b"w"))
    assert name_weights(tmp_path / "run" / name)[1] == sha256(b"w")


def test_a_checkpoint_of_tensorflow_is_its_files(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001", "model.ckpt-71.index", "model.ckpt-7.meta"):
        (folder / name).write_bytes(name.encode())
    (folder / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-7"\n')
    parts = ("model.ckpt-7.data-00000-of-00001", "model.ckpt-7.index")
    wanted = sha256("".join(f"{sha256(name.encode())}  {name}\n" for name in parts).encode())
    assert name_weights(folder / "model.ckpt-7") == ("model.ckpt-7", wanted)
    assert name_weights(folder / "model.ckpt-7.index")[1] == wanted
    assert name_weights(folder) == ("a", wanted)
    shutil.move(folder, tmp_path / "b")
    assert name_weights(tmp_path / "b/model.ckpt-7") == ("model.ckpt-7", wanted)


def test_missing_weights_are_reported(tmp_path):
    assert name_weights(None) == ("none", "none")
    assert name_weights(Path("gs:/bucket/model.ckpt")) == ("model.ckpt", "unknown")
    assert name_weights(tmp_path) == (tmp_path.name, "unknown")
