"""Checkpoints of a TensorFlow 2 run: bit-equal resume on every replica, damage, other settings, killed writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from mlbert.config.bert_config import BertConfig
from mlbert.runs.progress import TrainState
from programs import free_ports
from tf2_bert.checkpoints import CheckpointFolder, initial_values
from tf2_bert.model import BertPretrainer
from user_errors import user_error

SHAPE = BertConfig(197, 32, 2, 4, 48, max_position_embeddings=40)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


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


@pytest.mark.parametrize(
    "change", [{"model": "{}"}, {"optimizer": "adamw"}, {"train_batch_size": 16}, {"train_data": "sha256:1"}]
)
def test_checkpoint_of_other_settings_is_an_error(tmp_path, change):
    saved(tmp_path, steps=[1])
    with user_error("run.other-settings", tmp_path / "step_00000001") as caught:
        run_of(tmp_path, **change)[-1].restore_newest(TrainState(), str)
    assert "\n" not in str(caught.value)


def test_variables_missing_from_the_checkpoint_are_an_error(tmp_path):
    saved(tmp_path, steps=[1])
    objects = {"model": BertPretrainer(SHAPE), "optimizer": tf.Variable(0.0)}
    folder = CheckpointFolder(tmp_path, objects, keep=1, identity=IDENTITY)
    with user_error("run.other-settings", tmp_path / "step_00000001"):
        folder.restore_newest(TrainState(), str)


def test_only_the_chief_keeps_files(tmp_path):
    saved(tmp_path / "checkpoints", is_chief=False)
    assert not (tmp_path / "checkpoints").exists()


def test_full_disk_keeps_the_older_checkpoint(tmp_path):
    states = saved(tmp_path, steps=[1])
    (tmp_path / ".partial_step_00000002").write_text("in the way")
    with user_error("file.unwritable", tmp_path / "step_00000002"):
        saved(tmp_path, steps=[2])
    assert_restored(tmp_path, 1, states)


KILLED = """
import sys, time
from pathlib import Path
import test_checkpoint_folder as t
folder = Path(sys.argv[1])
real = t.tf.train.Checkpoint.write
def write(self, prefix, *rest):
    real(self, prefix, *rest)
    if "step_00000002" in prefix:
        print("writing", flush=True)
        time.sleep(100)
t.tf.train.Checkpoint.write = write
t.saved(folder, steps=[1, 2])
"""


@pytest.mark.slow
def test_killed_writer_keeps_the_older_checkpoint(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "checkpoints"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert left == [".partial_step_00000002", "step_00000001"]
    assert_restored(tmp_path / "checkpoints", 1, saved(tmp_path / "again", steps=[1]))
    saved(tmp_path / "checkpoints", steps=[1, 2])
    left = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
    assert left == ["step_00000001", "step_00000002"]


PROGRAM = """
import json, sys
from pathlib import Path
import tensorflow as tf
import test_checkpoint_folder as t
from tf2_bert.checkpoints import write_weights

folder, kind, task = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if kind == "mirrored":
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

def barrier():
    total = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
    strategy.experimental_local_results(tf.function(lambda: strategy.run(total))())

def assert_on_replicas(model, values):
    t.assert_same(model.values(), values)
    for name, variable in model.parameters().items():
        first, *others = (part.numpy() for part in strategy.experimental_local_results(variable))
        assert len(others) == (kind == "mirrored")
        for other in others:
            t.np.testing.assert_array_equal(first, other, err_msg=name)

def run_of(seed):
    with strategy.scope():
        return t.run_of(folder / "checkpoints", seed=seed, is_chief=task == 0)

model, slots, scale, checkpoints = run_of(1)
start = t.BertPretrainer(t.SHAPE, seed=3).values()
model.assign(start)
assert_on_replicas(model, start)
slots.update(model, 1)
checkpoints.save(t.TrainState(step=1))
barrier()
again, slots_again, _, checkpoints = run_of(2)
assert checkpoints.restore_newest(t.TrainState(), print)
assert_on_replicas(again, model.values())
assert slots_again.state() == slots.state()
if task == 0:
    write_weights(folder, model, {})
barrier()
t.assert_same(t.initial_values(folder / "tf2" / "model.ckpt", again)[0], model.values())
barrier()
print("done")
"""


def start(folder, kind, task=0, **environment):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, kind, str(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def assert_done(*processes):
    try:
        for process in processes:
            out, error = process.communicate(timeout=100)
            assert out == "done\n", error[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_weights_and_checkpoints_reach_every_replica(tmp_path):
    assert_done(start(tmp_path, "mirrored"))
    model, _, _, folder = run_of(tmp_path / "checkpoints", seed=5)
    assert folder.restore_newest(TrainState(), pytest.fail)
    assert_same(model.values(), initial_values(tmp_path, model)[0])


@pytest.mark.slow
def test_two_workers_write_one_checkpoint(tmp_path):
    workers = [f"localhost:{port}" for port in free_ports(2)]
    clusters = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": task}} for task in range(2)]
    assert_done(*(start(tmp_path, "workers", task, TF_CONFIG=json.dumps(clusters[task])) for task in range(2)))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
