"""Checkpoints: what is written comes back; damage, a full disk and another run's folder are told apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mlbert.training.checkpoint import CheckpointFolder
from user_errors import user_error


def folder(tmp_path, **identity):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2, identity={"model": "a", "ranks": 1, **identity})


def tensors(value):
    return {"weights": torch.full((1000,), float(value)), "optimizer.exp_avg": torch.arange(10.0)}


def saved(tmp_path, steps=(1, 2, 3)):
    target = folder(tmp_path)
    for step in steps:
        target.save(step, tensors(step), {"step": step})
    return target


def test_newest_is_loaded_and_older_ones_go(tmp_path):
    target = saved(tmp_path)
    checkpoint, warnings = target.load_newest()
    assert checkpoint.state == {"step": 3}
    assert torch.equal(checkpoint.tensors["weights"], tensors(3)["weights"])
    assert warnings == []
    assert sorted(p.name for p in target.path.iterdir()) == ["step_00000002", "step_00000003"]


def test_a_checkpoint_is_hashed_while_it_is_written(tmp_path):
    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    before = bytes_read()
    folder(tmp_path).save(1, {"weights": torch.rand(1_000_000)}, {})
    assert bytes_read() - before < 1_000_000, "the four megabytes are not read back"


def test_no_checkpoint_is_no_error(tmp_path):
    assert folder(tmp_path).load_newest() == (None, [])


def damage_truncate(path):
    file = path / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def damage_flip(path):
    file = path / "tensors.safetensors"
    blob = bytearray(file.read_bytes())
    blob[-5] ^= 1
    file.write_bytes(blob)


def damage_state(path):
    (path / "state.json").write_text('{"format": ')


def damage_remove(path):
    (path / "tensors.safetensors").unlink()


def damage_format(path):
    record = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**record, "format": "other"}))


def damage_entry(change):
    def damage(path):
        record = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(change(record)))

    return damage


ENTRIES = {
    "one bit": lambda record: {**record, "state": {"step": record["state"]["step"] ^ 1}},
    "negative": lambda record: {**record, "state": {"step": -1}},
    "not finite": lambda record: {**record, "state": {"step": float("nan")}},
    "text": lambda record: {**record, "state": {"step": "3"}},
    "renamed": lambda record: {**record, "state": {"steps": 3}},
    "no state": lambda record: {name: value for name, value in record.items() if name != "state"},
    "no identity": lambda record: {name: value for name, value in record.items() if name != "identity"},
    "no checksum": lambda record: {name: value for name, value in record.items() if name != "record_sha256"},
    "a list": lambda record: [record],
    "another step": lambda record: {**record, "step": 7},
}


def damage_depth(path):
    (path / "state.json").write_text("[" * 100_000)


DAMAGES = [damage_truncate, damage_flip, damage_state, damage_remove, damage_format, damage_depth]
DAMAGES = {damage.__name__: damage for damage in DAMAGES} | {name: damage_entry(to) for name, to in ENTRIES.items()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_falls_back_with_a_warning(tmp_path, damage):
    target = saved(tmp_path)
    DAMAGES[damage](target.path / "step_00000003")
    checkpoint, warnings = target.load_newest()
    assert checkpoint.state == {"step": 2}
    assert len(warnings) == 1
    assert "step_00000003" in warnings[0]


def test_all_damaged_is_an_error_that_names_the_folder(tmp_path):
    target = saved(tmp_path)
    for entry in target.path.iterdir():
        damage_flip(entry)
    with user_error("checkpoint.damaged", tmp_path / "checkpoints"):
        target.load_newest()


def test_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path)
    with user_error("run.other-settings", tmp_path / "checkpoints/step_00000003"):
        folder(tmp_path, model="b").load_newest()


def test_half_written_folder_is_not_a_checkpoint(tmp_path):
    target = saved(tmp_path)
    shutil.copytree(target.path / "step_00000003", target.path / ".partial_step_00000009")
    assert target.load_newest()[0].state == {"step": 3}


def test_full_disk_leaves_nothing_half_written(tmp_path):
    target = saved(tmp_path)
    # A file in the way makes the write fail as a full disk does: with an OSError in the middle.
    (target.path / ".partial_step_00000004").write_text("in the way")
    (target.path / ".partial_step_00000004").chmod(0o400)
    with user_error("file.unwritable", tmp_path / "checkpoints/step_00000004"):
        target.save(4, tensors(4), {"step": 4})
    assert target.load_newest()[0].state == {"step": 3}
