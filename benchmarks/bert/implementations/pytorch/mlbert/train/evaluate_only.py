"""The accuracy of the starting weights: the check that a checkpoint was converted and loaded rightly.

    source config_<system>.sh && mlbert train --evaluate-only

The benchmark's phase-1 checkpoint (``model.ckpt-28252``) on its 10,000 evaluation samples must give a masked-LM
accuracy of 0.34085. Another number means other weights, other data, another ``bert_config.json`` or a wrong
conversion. Needs INIT_CHECKPOINT, BERT_CONFIG and EVALDIR; the training set is not touched, no MLPerf log is written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console

from mlbert import ops
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.world import World
from mlbert.models import BertConfig, BertForPreTraining
from mlbert.models.load import load_weights
from mlbert.ops.precision import compute_dtype
from mlbert.store.open import describe
from mlbert.train.evaluate import EvaluationSet, evaluate
from mlbert.train.experiment import threads_per_rank

# Masked-LM accuracy of the benchmark's phase-1 checkpoint on the benchmark's evaluation samples.
BENCHMARK_INITIAL_ACCURACY = 0.34085

OpenEvaluationSet = Callable[[TrainConfig, BertConfig, World, int], EvaluationSet]


def evaluate_only(config: TrainConfig, evaluation_set: OpenEvaluationSet, world: World, console: Console) -> float:
    """Evaluates the starting weights once with the evaluator of training; prints and returns the accuracy.

    ``evaluation_set`` is the recipe's. Raises UserError for missing weights or data that do not fit the model.
    """
    if config.init_checkpoint is None:
        raise UserError("INIT_CHECKPOINT", "is none, there is nothing to evaluate", "Set it to the starting weights")
    shape = BertConfig.from_json(config.bert_config_file)
    _check_data(config, shape)
    world.start()
    torch.set_num_threads(threads_per_rank(config, world))
    ops.select(config.ops, world.device)
    model = BertForPreTraining(shape, compute_dtype(config.precision, world.device))
    seed = config.seed or 0
    model.initialize(seed)
    report = load_weights(model, config.init_checkpoint)
    for name in report.missing:
        console.print(f"warning: {config.init_checkpoint} has no {name}", markup=False, highlight=False)
    model.to(world.device)
    samples = evaluation_set(config, shape, world, seed)
    samples.open()
    accuracy, loss = evaluate(model, samples, world)
    console.print(
        f"initial masked-LM accuracy {accuracy:.5f}, loss {loss:.5f}, {samples.num_examples} samples "
        f"(the benchmark's checkpoint on its evaluation samples: {BENCHMARK_INITIAL_ACCURACY})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    world.stop()
    return accuracy


def _check_data(config: TrainConfig, shape: BertConfig) -> None:
    if config.synthetic_data:
        return
    eval_set = describe(config.eval_dir)
    if eval_set.vocab_size not in (None, shape.vocab_size):
        reason = f"has a vocabulary of {eval_set.vocab_size}, {config.bert_config_file} says {shape.vocab_size}"
        raise UserError(config.eval_dir, reason, "Set BERT_CONFIG to the configuration of this vocabulary")
    if eval_set.max_seq_length > shape.max_position_embeddings:
        positions = shape.max_position_embeddings
        reason = f"has sequences of {eval_set.max_seq_length} tokens, the model has {positions} positions"
        raise UserError(config.eval_dir, reason, "Set BERT_CONFIG to the configuration of the checkpoint")
