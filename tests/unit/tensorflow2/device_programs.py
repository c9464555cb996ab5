"""Programs that configure virtual devices or threads, which TensorFlow allows once per process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from mlbert.data.formats.open import describe, open_store
from mlbert.host.errors import UserError
from tf2_bert import bert_benchmark
from tf2_bert.store_data import StoreEvaluation, StoreTraining
from tf2_bert.store_rows import RowShape
from tf2_bert.strategies import make_strategy, prepare_devices
from unit.tensorflow2.strategies_program import tensorflow


def use_virtual_cpus(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def read(strategy: tf.distribute.Strategy, dataset: Any, steps: int) -> list[np.ndarray]:
    """Return each field of the rows that the replicas get in these steps."""

    @tf.function
    def per_replica(iterator: Any) -> Any:
        return strategy.run(tuple, args=(next(iterator),))

    iterator, found = iter(dataset), []
    for _ in range(steps):
        fields = [strategy.experimental_local_results(field) for field in per_replica(iterator)]
        found += [[part.numpy() for part in replica] for replica in zip(*fields, strict=True)]
    return [np.concatenate(field) for field in zip(*found, strict=True)]


def read_rows(folder: Path, result: Path) -> None:
    """Save the rows that 1, 2 and 4 replicas read, and print the errors of rows that do not fit."""
    use_virtual_cpus(4)
    info, shape, arrays = describe(folder), RowShape(32, 10, 3), {}
    opened = {"vocab_size": 500, "opened": lambda: open_store(info.folder)}
    for count in (1, 2, 4):
        devices = [f"CPU:{i}" for i in range(count)]
        strategy = tf.distribute.MirroredStrategy(devices) if count > 1 else tf.distribute.get_strategy()
        assert strategy.num_replicas_in_sync == count
        training, small = (StoreTraining(info, 8 // count, s, seed=3, **opened) for s in (shape, RowShape(32, 1, 3)))
        evaluation = StoreEvaluation(info, 4, shape, 50, **opened)
        for data in (training, small, evaluation):
            data.open()
        arrays[f"train{count}"] = read(strategy, training.dataset(strategy, 2), 3)
        arrays[f"eval{count}"] = read(strategy, evaluation.dataset(strategy), evaluation.steps(count))
        try:
            read(strategy, small.dataset(strategy), 3)
        except tf.errors.OpError as error:
            print(small.translate_error(error))
    np.savez(result, **{f"{name}_{i:02}": array for name, fields in arrays.items() for i, array in enumerate(fields)})


def prepare(result: Path) -> None:
    """Write the replicas and threads after preparing 2 devices with 3 threads, and the error of a missing TPU."""
    config = tensorflow(distribution_strategy="mirrored", all_reduce_alg="hierarchical_copy")
    prepare_devices(config, 3, 2)
    strategy, _ = make_strategy(config, 2)
    rejected = None
    try:
        make_strategy(tensorflow(distribution_strategy="tpu", tpu="no-such-tpu"), 0)
    except UserError as error:
        rejected = error.code, error.subject, str(error)
    threads = tf.config.threading
    found = threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads()
    result.write_text(json.dumps([strategy.num_replicas_in_sync, found, rejected]))


def run_benchmark(folder: str, method: str) -> None:
    """Run a method of the benchmark class; write the number of its loops, and its report."""
    os.environ["TEST_REPORT_FILE_PREFIX"] = f"{folder}/proto_"

    class CountingTimer(bert_benchmark.BenchmarkTimerCallback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_batch_end(batch, logs)
            Path(folder, "loops").write_text(str(batch + 1))

    bert_benchmark.BenchmarkTimerCallback = CountingTimer
    getattr(bert_benchmark.BertClassifyBenchmarkReal(output_dir=folder, root_data_dir="/data", tpu=None), method)()
