"""Runs that save and restore checkpoints of a small model, also in other processes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from mlbert.config.bert_config import BertConfig
from mlbert.runs.progress import TrainState
from tf2_bert.checkpoints import CheckpointFolder, initial_values, write_weights
from tf2_bert.model import BertPretrainer
from unit.tensorflow2.device_programs import use_virtual_cpus

# 197 is not a multiple of 8: other programs pad the vocabulary.
SHAPE = BertConfig(197, 32, 2, 4, 48, max_position_embeddings=40)
IDENTITY = {"model": SHAPE.to_json(), "optimizer": "lamb", "train_batch_size": 8, "train_data": "sha256:0"}


def cut(file: Path, size: int) -> None:
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


def run_of(path, keep=2, seed=1, is_chief=True, **identity):
    """Return a model, its slots and loss scale, and the folder that saves them."""
    model = BertPretrainer(SHAPE, seed=seed)
    slots, scale = Slots(model), tf.Variable(1024.0)
    objects = {"model": model, "optimizer": slots, "loss_scale": scale}
    folder = CheckpointFolder(path, objects, keep=keep, identity={**IDENTITY, **identity}, is_chief=is_chief)
    return model, slots, scale, folder


def saved(path, steps=(1, 2, 3), **options):
    """Save checkpoints at these steps; return the weights, slots and loss scale at each."""
    model, slots, scale, folder = run_of(path, **options)
    states = {}
    for step in steps:
        slots.update(model, step)
        scale.assign(2.0**step)
        folder.save(TrainState(step=step, samples=8 * step, accuracy=step / 7))
        states[step] = model.values(), slots.state(), 2.0**step
    return states


def save_and_hang(path: Path) -> None:
    """Save two checkpoints, but hang before the second is complete."""
    write = tf.train.Checkpoint.write

    def write_and_hang(self, prefix, *rest):
        write(self, prefix, *rest)
        if "step_00000002" in prefix:
            path.with_name("writing").touch()
            time.sleep(100)

    tf.train.Checkpoint.write = write_and_hang
    saved(path, steps=[1, 2])


def assert_restored_on_replicas(folder: Path, is_mirrored: bool, task: int) -> None:
    """Save and restore weights and checkpoints on two virtual devices or as one of two workers."""
    if is_mirrored:
        use_virtual_cpus(2)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def barrier():
        total = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
        strategy.experimental_local_results(tf.function(lambda: strategy.run(total))())

    def assert_on_replicas(model, values):
        np.testing.assert_equal(model.values(), values)
        for name, variable in model.parameters().items():
            first, *others = (part.numpy() for part in strategy.experimental_local_results(variable))
            assert len(others) == is_mirrored
            for other in others:
                np.testing.assert_array_equal(first, other, err_msg=name)

    def replicated_run(seed):
        with strategy.scope():
            return run_of(folder / "checkpoints", seed=seed, is_chief=task == 0)

    model, slots, _, checkpoints = replicated_run(1)
    start = BertPretrainer(SHAPE, seed=3).values()
    model.assign(start)
    assert_on_replicas(model, start)
    slots.update(model, 1)
    checkpoints.save(TrainState(step=1))
    barrier()
    again, slots_again, _, checkpoints = replicated_run(2)
    assert checkpoints.restore_newest(TrainState(), print)
    assert_on_replicas(again, model.values())
    assert slots_again.state() == slots.state()
    if task == 0:
        write_weights(folder, model, {})
    barrier()
    np.testing.assert_equal(initial_values(folder / "tf2" / "model.ckpt", again)[0], model.values())
    barrier()
