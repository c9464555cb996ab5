"""Checkpoints of a TensorFlow 2 run: bit-equal resume on every replica, damage, other settings, killed writers."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from mlbert.runs.progress import TrainState
from programs import free_ports
from tf2_bert.checkpoints import CheckpointFolder, initial_values
from tf2_bert.model import BertPretrainer
from unit.tensorflow2.checkpoint_programs import (
    IDENTITY,
    SHAPE,
    assert_restored_on_replicas,
    cut,
    run_of,
    save_and_hang,
    saved,
)
from unit.tensorflow2.processes import assert_success, start
from user_errors import user_error


def assert_restored(path, step, states, notes=0):
    model, slots, scale, folder = run_of(path, seed=9)
    state, warnings = TrainState(), []
    assert folder.restore_newest(state, warnings.append)
    assert state == TrainState(step=step, samples=8 * step, accuracy=step / 7)
    values, kept, loss_scale = states[step]
    np.testing.assert_equal(model.values(), values)
    assert slots.state() == kept
    assert float(scale.numpy()) == loss_scale
    assert len(warnings) == notes


def test_resume_is_bit_equal(tmp_path):
    states = saved(tmp_path / "checkpoints")
    assert_restored(tmp_path / "checkpoints", 3, states)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000003"]


def test_restore_without_checkpoints_changes_nothing(tmp_path):
    """Only the chief writes any."""
    saved(tmp_path / "checkpoints", is_chief=False)
    assert not (tmp_path / "checkpoints").exists()
    _, slots, _, folder = run_of(tmp_path / "checkpoints")
    state = TrainState()
    assert not folder.restore_newest(state, pytest.fail)
    assert (state, int(slots.iterations.numpy())) == (TrainState(), 0)


@pytest.mark.parametrize("name", ["variables.data-00000-of-00001", "variables.index", "state.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: cut(file, 200)])
def test_damaged_checkpoint_is_skipped(tmp_path, name, damage):
    states = saved(tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "step_00000003" / name)
    assert_restored(tmp_path / "checkpoints", 2, states, notes=1)


def test_only_damaged_checkpoints_is_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    (tmp_path / "step_00000001" / "variables.index").unlink()
    with user_error("checkpoint.damaged", tmp_path):
        run_of(tmp_path)[-1].restore_newest(TrainState(), str)


def test_checkpoint_of_other_settings_or_variables_is_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    for change in ({"model": "{}"}, {"optimizer": "adamw"}, {"train_batch_size": 16}, {"train_data": "sha256:1"}):
        with user_error("run.other-settings", tmp_path / "step_00000001"):
            run_of(tmp_path, **change)[-1].restore_newest(TrainState(), str)
    objects = {"model": BertPretrainer(SHAPE), "optimizer": tf.Variable(0.0)}
    folder = CheckpointFolder(tmp_path, objects, keep=1, identity=IDENTITY)
    with user_error("run.other-settings", tmp_path / "step_00000001"):
        folder.restore_newest(TrainState(), str)


def test_full_disk_keeps_the_older_checkpoint(tmp_path):
    states = saved(tmp_path, steps=[1])
    (tmp_path / ".partial_step_00000002").write_text("in the way")
    with user_error("file.unwritable", tmp_path / "step_00000002"):
        saved(tmp_path, steps=[2])
    assert_restored(tmp_path, 1, states)


@pytest.mark.slow
def test_killed_writer_keeps_the_older_checkpoint(tmp_path):
    process, deadline = start(save_and_hang, tmp_path, tmp_path / "checkpoints"), time.monotonic() + 100
    while not (tmp_path / "writing").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    left = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert left == [".partial_step_00000002", "step_00000001"]
    assert_restored(tmp_path / "checkpoints", 1, saved(tmp_path / "again", steps=[1]))
    saved(tmp_path / "checkpoints", steps=[1, 2])
    left = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_00000001", "step_00000002"]


@pytest.mark.slow
def test_weights_and_checkpoints_reach_every_replica(tmp_path):
    assert_success(start(assert_restored_on_replicas, tmp_path, tmp_path, True, 0))
    model, _, _, folder = run_of(tmp_path / "checkpoints", seed=5)
    assert folder.restore_newest(TrainState(), pytest.fail)
    np.testing.assert_equal(model.values(), initial_values(tmp_path, model)[0])


@pytest.mark.slow
def test_two_workers_write_one_checkpoint(tmp_path):
    workers = [f"localhost:{port}" for port in free_ports(2)]
    clusters = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": task}} for task in range(2)]
    words = (assert_restored_on_replicas, tmp_path, tmp_path, False)
    assert_success(*(start(*words, task, TF_CONFIG=json.dumps(clusters[task])) for task in range(2)))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
