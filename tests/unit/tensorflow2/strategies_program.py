"""Train a small model for some steps in each of several cases.

Keys of a case: number of `devices`; `config`, changed settings; `steps` of each loop; `hosts` and `task` of
multi_worker_mirrored; `alike`, a dropout rate with the same rows on every replica. Without `alike`, all cases get the
same steps of ROWS rows. In one process, all cases with several devices must have the same number of them, since
TensorFlow's collectives do not distinguish the strategies of a process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import CommandLine, resolve
from mlbert.config.sections import Configuration
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig
from tf2_bert.loss_scale import LossScale
from tf2_bert.model import BertPretrainer
from tf2_bert.optimizers import make_optimizer
from tf2_bert.recipe import RECIPE
from tf2_bert.rows import Rows
from tf2_bert.step import TrainStep
from tf2_bert.store_rows import RowShape, rows_of
from tf2_bert.strategies import make_strategy, prepare_devices
from unit.tensorflow2.cases import sequences

VOCAB_SIZE = 64
SETTINGS = dict.fromkeys(("bert_config_file", "input_dir", "eval_dir", "output_dir"), "unused")
SETTINGS |= dict.fromkeys(("submission_org", "submission_platform"), "test") | {"submission_division": "open"}
SETTINGS |= dict.fromkeys(("max_samples_termination", "eval_iter_start_samples", "eval_iter_samples"), "1000000")
SETTINGS |= {"train_batch_size": "8", "learning_rate": "0.01", "max_steps": "10", "optimizer": "lamb"}
SETTINGS |= {"scale_loss": "1", "seed": "5", "max_grad_norm": "none"}
LENGTH, PREDICTIONS, SEQUENCES = 32, 4, 2
ROWS, STEPS = 16, 4
RATES = [0.01, 0.008, 0.006, 0.004]
DTYPES = {"fp32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16}


def settings(**changes: object) -> Configuration:
    values = {**SETTINGS, **{name: str(value) for name, value in changes.items()}}
    return resolve(RECIPE, {}, CommandLine(values)).config


def tensorflow(**changes: object) -> TensorFlowConfig:
    return settings(**changes)[TensorFlowConfig]


def small_shape(dropout: float = 0.0) -> BertConfig:
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertConfig(VOCAB_SIZE, 32, 1, 2, 64, max_position_embeddings=16, hidden_act="gelu", **dropouts)


def dummy_rows(count: int, seed: int) -> Rows:
    """Return numpy rows with one or two sequences and different numbers of predictions."""
    rng = np.random.default_rng(seed)
    packs = rng.integers(1, SEQUENCES + 1, count)
    ragged = sequences(rng.integers(5, LENGTH // SEQUENCES + 1, packs.sum()), seed, VOCAB_SIZE)
    return rows_of(ragged, packs, count, RowShape(LENGTH, PREDICTIONS, SEQUENCES))


class Trained:
    """A model with its optimizer and training step, under a strategy."""

    def __init__(self, config: Configuration, strategy: tf.distribute.Strategy, shape: BertConfig) -> None:
        self.strategy = strategy
        compute, own = config[ComputeConfig], config[TensorFlowConfig]
        with strategy.scope():
            self.model = BertPretrainer(shape, DTYPES[compute.precision], seed=3)
            parameters = self.model.parameters()
            self.optimizer = make_optimizer(config[OptimizerConfig], parameters, compiled=own.enable_xla)
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
        return [v.numpy() for v in [*parts, *(self.loss_scale.variables if self.loss_scale else ())]]

    def iterator(self, steps: list[Rows]) -> Any:
        """Return the strategy's iterator, which divides each step's global rows among the replicas, in order."""

        def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
            total, pipelines = len(steps[0].input_ids), context.num_input_pipelines
            own = total // pipelines
            mine = slice(context.input_pipeline_id * own, (context.input_pipeline_id + 1) * own)
            parts = [np.concatenate([x[mine] for x in column]) for column in zip(*steps, strict=True)]
            dataset = tf.data.Dataset.from_tensor_slices(Rows(*parts)).repeat()
            return dataset.batch(total // self.strategy.num_replicas_in_sync, drop_remainder=True)

        return iter(self.strategy.distribute_datasets_from_function(pipeline))


def train(case: dict[str, Any], strategies: dict[Any, tf.distribute.Strategy]) -> dict[str, Any]:
    """Run a case and return its losses, norms, evaluation sums and weights."""
    config, devices = settings(**case.get("config", {})), case["devices"]
    own = config[TensorFlowConfig]
    key = own.distribution_strategy, devices
    if key not in strategies:
        strategies[key], _ = make_strategy(own, devices, case.get("hosts", ()), case.get("task", -1))
    strategy = strategies[key]
    trained = Trained(config, strategy, small_shape(case.get("alike", 0.0)))
    steps = [dummy_rows(ROWS, seed) for seed in range(STEPS)]
    if "alike" in case:
        steps = [Rows(*(np.concatenate([x] * devices) for x in rows)) for rows in steps]
    iterator, losses, norms, first = trained.iterator(steps), [], [], 0
    for count in case.get("steps", [STEPS]):
        result = trained.step.run_loop(iterator, RATES[first : first + count], first)
        losses += result.losses.tolist()
        norms += result.grad_norms.tolist()
        first += count
    return {
        "replicas": strategy.num_replicas_in_sync,
        "losses": losses,
        "norms": norms,
        "sums": [float(value) for value in trained.step.evaluate_batch(next(trained.iterator(steps)))],
        "weights": np.concatenate([value.reshape(-1) for value in trained.model.values().values()]).tolist(),
    }


def train_all(devices: int, cases: dict[str, dict[str, Any]], result: Path) -> None:
    """Run all cases in a process with this number of virtual CPUs, and write {name: results}."""
    config = next(iter(cases.values())).get("config", {})
    prepare_devices(tensorflow(**config), None, devices)
    strategies: dict[Any, tf.distribute.Strategy] = {}
    result.write_text(json.dumps({name: train(case, strategies) for name, case in cases.items()}))
