"""Programs that configure devices or threads, which TensorFlow allows once per process.

`train_all` trains a small model for some steps in each of several cases.

Keys of a case: number of `devices`; `config`, changed settings; `alike`, a dropout rate with the
same rows on every replica, for one step. Without it, all cases get the same steps of ROWS rows. In
one process, all cases with several devices must have the same number of them, as TensorFlow's
collectives do not distinguish the strategies of a process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from mlbert.config.arguments import CommandLine
from mlbert.config.bert_config import BertConfig
from mlbert.config.configuration import Configuration
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.host.errors import UserError
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig
from mlbert.recipes.sections import resolve
from stored_sets import make_rows
from tf2_bert import bert_benchmark
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.optimizers import make_optimizer
from tf2_bert.recipe import RECIPE
from tf2_bert.rows import Rows
from tf2_bert.step import TrainStep
from tf2_bert.store_rows import RowShape, rows_of
from tf2_bert.strategies import make_strategy, prepare_devices

VOCAB_SIZE = 64
SETTINGS = {
    "bert_config_file": "unused",
    "input_dir": "unused",
    "eval_dir": "unused",
    "output_dir": "unused",
    "submission_org": "test",
    "submission_platform": "test",
    "submission_division": "open",
    "max_samples_termination": "1000000",
    "eval_iter_start_samples": "1000000",
    "eval_iter_samples": "1000000",
    "train_batch_size": "8",
    "learning_rate": "0.01",
    "max_steps": "10",
    "optimizer": "lamb",
    "scale_loss": "1",
    "seed": "5",
    "max_grad_norm": "none",
}
LENGTH = 32
PREDICTIONS = 4
SEQUENCES = 2
ROWS = 16
STEPS = 4
RATES = [0.01, 0.008, 0.006, 0.004]
DTYPES = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16}


def settings(**changes: object) -> Configuration:
    values = {**SETTINGS, **{name: str(value) for name, value in changes.items()}}
    return resolve(RECIPE, {}, CommandLine(values)).config


def tensorflow(**changes: object) -> TensorFlowConfig:
    return settings(**changes)[TensorFlowConfig]


def small_shape(dropout: float = 0.0) -> BertConfig:
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertConfig(
        VOCAB_SIZE, 32, 1, 2, 64, max_position_embeddings=16, hidden_act="gelu", **dropouts
    )


def dummy_rows(count: int, seed: int) -> Rows:
    """Return numpy rows with one or two sequences and different numbers of predictions."""
    rng = np.random.default_rng(seed)
    packs = rng.integers(1, SEQUENCES + 1, count)
    ragged = make_rows(rng.integers(5, LENGTH // SEQUENCES + 1, packs.sum()), seed, VOCAB_SIZE)
    return rows_of(ragged, packs, count, RowShape(LENGTH, PREDICTIONS, SEQUENCES))


class Trained:
    """A model with its optimizer and training step, under a strategy."""

    def __init__(
        self, config: Configuration, strategy: tf.distribute.Strategy, shape: BertConfig
    ) -> None:
        self.strategy = strategy
        compute = config[ComputeConfig]
        own = config[TensorFlowConfig]
        with strategy.scope():
            self.model = BertPretrainer(shape, DTYPES[compute.precision], seed=3)
            parameters = self.model.parameters()
            self.optimizer = make_optimizer(
                config[OptimizerConfig], parameters, compiled=own.enable_xla
            )
            self.loss_scale = LossScale.of(compute, own)
        self.step = TrainStep(
            strategy,
            self.model,
            self.optimizer,
            self.loss_scale,
            own,
            accumulation=config[DataConfig].gradient_accumulation_steps,
            gradient_clipping=config[DistributedConfig].gradient_clipping,
            seed=5,
        )

    def variables(self) -> list[np.ndarray]:
        """Return all variables that a step changes."""
        parts = [*self.model.parameters().values(), *self.optimizer.variables]
        return [
            v.numpy() for v in [*parts, *(self.loss_scale.variables if self.loss_scale else ())]
        ]

    def iterator(self, steps: list[Rows]) -> Any:
        """Return the strategy's iterator, which divides each step's global rows among the replicas,
        in order.
        """

        def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
            parts = [np.concatenate(column) for column in zip(*steps, strict=True)]
            dataset = tf.data.Dataset.from_tensor_slices(Rows(*parts)).repeat()
            return dataset.batch(
                len(steps[0].input_ids) // self.strategy.num_replicas_in_sync, drop_remainder=True
            )

        return iter(self.strategy.distribute_datasets_from_function(pipeline))


def train(case: dict[str, Any], strategies: dict[Any, tf.distribute.Strategy]) -> dict[str, Any]:
    """Run a case and return its losses, norms, evaluation sums and weights."""
    config = settings(**case.get("config", {}))
    devices = case["devices"]
    own = config[TensorFlowConfig]
    key = own.distribution_strategy, devices
    if key not in strategies:
        strategies[key], _ = make_strategy(own, devices)
    strategy = strategies[key]
    trained = Trained(config, strategy, small_shape(case.get("alike", 0.0)))
    steps = [dummy_rows(ROWS, seed) for seed in range(STEPS)]
    if "alike" in case:
        steps = [Rows(*(np.concatenate([x] * devices) for x in steps[0]))]
    result = trained.step.run_loop(trained.iterator(steps), RATES[: len(steps)], 0)
    return {
        "replicas": strategy.num_replicas_in_sync,
        "losses": result.losses.tolist(),
        "norms": result.grad_norms.tolist(),
        "sums": [
            float(value) for value in trained.step.evaluate_batch(next(trained.iterator(steps)))
        ],
        "weights": np.concatenate(
            [value.reshape(-1) for value in trained.model.values().values()]
        ).tolist(),
    }


def train_all(devices: int, cases: dict[str, dict[str, Any]], result: Path) -> None:
    """Run all cases in a process with this number of virtual CPUs, and write {name: results}."""
    config = next(iter(cases.values())).get("config", {})
    prepare_devices(tensorflow(**config), None, devices)
    strategies: dict[Any, tf.distribute.Strategy] = {}
    result.write_text(json.dumps({name: train(case, strategies) for name, case in cases.items()}))


def prepare(result: Path) -> None:
    """Write the replicas and threads after preparing 2 devices with 3 threads,
    and the error of a missing TPU.
    """
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
    getattr(
        bert_benchmark.BertClassifyBenchmarkReal(
            output_dir=folder, root_data_dir="/data", tpu=None
        ),
        method,
    )()
