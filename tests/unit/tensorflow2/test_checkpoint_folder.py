"""Checkpoints of a TensorFlow 2 run: bit-equal resume on every replica, damage, other settings.

How folders are written and which one is taken is tested in unit/training/test_checkpoint.py.
"""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from mlbert.config.bert_config import BertConfig
from mlbert.runs.progress import TrainState
from tf2_bert.checkpoints import CheckpointFolder
from tf2_bert.model import BertPretrainer
from user_errors import user_error

SHAPE = BertConfig(197, 32, 2, 4, 48, max_position_embeddings=40)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


class Slots(tf.Module):
    """A dummy optimizer state: a moment of each parameter, and a counter."""

    def __init__(self, model):
        super().__init__()
        self.iterations = tf.Variable(0, dtype=tf.int64)
        self.moments = [tf.Variable(tf.zeros_like(parameter)) for parameter in model.parameters().values()]

    def update(self, model, number):
        for index, (moment, parameter) in enumerate(zip(self.moments, model.parameters().values(), strict=True)):
            moment.assign(tf.random.stateless_normal(moment.shape, [index, number]))
            parameter.assign_add(moment)
        self.iterations.assign(number)

    def state(self):
        return [int(self.iterations.numpy()), *(moment.numpy().tobytes() for moment in self.moments)]


IDENTITY = {"model": SHAPE.to_json(), "optimizer": "lamb", "train_batch_size": 8, "train_data": "sha256:0"}


def run_of(path, keep=2, seed=1, is_chief=True, **identity):
    model = BertPretrainer(SHAPE, seed=seed)
    slots = Slots(model)
    scale = tf.Variable(1024.0)
    objects = {"model": model, "optimizer": slots, "loss_scale": scale}
    return (
        model,
        slots,
        scale,
        CheckpointFolder(path, objects, keep=keep, identity={**IDENTITY, **identity}, is_chief=is_chief),
    )


def saved(path, steps=(1, 2, 3), **options):
    """Save checkpoints at these steps; return the weights and slots at each."""
    model, slots, scale, folder = run_of(path, **options)
    states = {}
    for step in steps:
        slots.update(model, step)
        scale.assign(2.0**step)
        folder.save(TrainState(step=step, samples=8 * step, accuracy=step / 7))
        states[step] = model.values(), slots.state(), 2.0**step
    return states


def assert_restored(path, step, states, notes=0):
    model, slots, scale, folder = run_of(path, seed=9)
    state, warnings = TrainState(), []
    assert folder.restore_newest(state, warnings.append)
    assert state == TrainState(step=step, samples=8 * step, accuracy=step / 7)
    values, kept, loss_scale = states[step]
    assert_same(model.values(), values)
    assert slots.state() == kept
    assert float(scale.numpy()) == loss_scale
    assert len(warnings) == notes


def test_resume_is_bit_equal(tmp_path):
    states = saved(tmp_path / "checkpoints")
    assert_restored(tmp_path / "checkpoints", 3, states)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000003"]


def test_restore_without_checkpoints_changes_nothing(tmp_path):
    _, slots, _, folder = run_of(tmp_path / "checkpoints")
    state = TrainState()
    assert not folder.restore_newest(state, pytest.fail)
    assert (state, int(slots.iterations.numpy())) == (TrainState(), 0)


@pytest.mark.parametrize("name", ["variables.data-00000-of-00001", "variables.index"])
def test_damaged_checkpoint_is_skipped(tmp_path, name):
    states = saved(tmp_path / "checkpoints")
    file = tmp_path / "checkpoints/step_00000003" / name
    file.write_bytes(file.read_bytes()[:200])
    assert_restored(tmp_path / "checkpoints", 2, states, notes=1)


def test_checkpoint_of_other_settings_is_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    with user_error("run.other-settings", tmp_path / "step_00000001"):
        run_of(tmp_path, optimizer="adamw")[-1].restore_newest(TrainState(), str)


def test_variables_missing_from_the_checkpoint_are_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    objects = {"model": BertPretrainer(SHAPE), "optimizer": tf.Variable(0.0)}
    folder = CheckpointFolder(tmp_path, objects, keep=1, identity=IDENTITY)
    with user_error("run.other-settings", tmp_path / "step_00000001"):
        folder.restore_newest(TrainState(), str)


def test_only_the_chief_keeps_files(tmp_path):
    saved(tmp_path / "checkpoints", is_chief=False)
    assert not (tmp_path / "checkpoints").exists()
