"""Methods that are not the benchmark's learn on the same loop:
only what the recipe hands over differs.
"""

import dataclasses
import itertools
from unittest.mock import MagicMock

import numpy as np
import pytest

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.world import World
from mlbert.models.bert import BertForSequenceClassification
from mlbert.models.objectives import Classification, Regression
from mlbert.optim.adamw import AdamW
from mlbert.optim.flat import FlatParameters
from mlbert.optim.schedules import Linear
from mlbert.recipes import masked_lm_stored
from mlbert.runs.events import Events
from mlbert.training.experiment import assemble
from mlbert.training.loop import train
from mlbert.training.protocols import Method
from training_settings import configuration
from unsharded import unsharded

SHAPE = BertConfig(40, 32, 1, 2, 64, max_position_embeddings=16)
SHAPE = SHAPE.with_options("hidden_dropout_prob=0 attention_probs_dropout_prob=0")
SETTINGS = {
    "schedule": "constant",
    "gradient_accumulation_steps": 1,
    "max_steps": 200,
    "max_skipped_steps": 0,
}
SETTINGS |= {"eval_iter_start_samples": 320, "eval_iter_samples": 320}


def sentences(seed: int, count: int, is_class: bool) -> HostBatch:
    """Label sentences with their share of low token ids, or with whether it is more than half."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in generator.integers(5, 15, count).tolist():
        is_low = generator.random(length) < generator.random()
        words = np.where(is_low, generator.integers(5, 20), generator.integers(20, 40))
        rows.append(([2, *words.tolist()], length + 1, False, [], []))
    shares = np.array([np.mean(np.array(row[0][1:]) < 20) for row in rows], np.float32)
    labels = (shares > 0.5).astype(np.float32) if is_class else shares
    batch = dataclasses.replace(Ragged.from_rows(rows), labels=labels)
    return HostBatch.of(batch, np.ones(count, np.int64), np.arange(count), 16)


@pytest.mark.parametrize(
    ("objective", "target"),
    [(Classification(2, "step", "accuracy"), 0.95), (Regression("rank", "spearman"), 0.9)],
    ids=["classes", "ranks of numbers, which no sum gives"],
)
def test_a_task_is_learnt_up_to_its_target(tmp_path, objective, target):
    is_class = isinstance(objective, Classification)
    world = World()
    heard = Events()
    metrics = []
    heard.evaluation = lambda state, found, seconds: metrics.append(dict(found))
    task = MagicMock(num_examples=128, is_preparing=False)
    task.state_dict.return_value = {}
    task.next_step.side_effect = ([sentences(step, 32, is_class)] for step in itertools.count(1))
    task.__iter__.side_effect = lambda: iter(
        [sentences(0, 100, is_class), sentences(10**6, 28, is_class)]
    )
    model = BertForSequenceClassification(SHAPE, num_labels=2 if is_class else 1)
    model.initialize(3)
    flat = FlatParameters(model.ordered_parameters())
    optimizer = unsharded(
        AdamW, flat, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, max_grad_norm=None
    )
    buckets = cut_buckets(flat.offsets, 1, 1)
    parts = {
        "model": model,
        "objective": objective,
        "source": task,
        "evaluation": task,
        "flat": flat,
    }
    parts["sync"] = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, None)
    parts["schedule"] = Linear(base_lr=2e-3, warmup_steps=5, max_steps=200, decay_end=200)
    parts |= {
        "optimizer": optimizer,
        "static_shape": None,
        "precision": "torch.float32",
        "ops": "plain",
        "peak_flops": lambda: 1e12,
    }
    method = Method(**parts, identity={}, export=lambda folder, card: None)
    config = configuration(masked_lm_stored.RECIPE, **SETTINGS, target_mlm_accuracy=target)
    outcome = train(
        assemble(config, method, tmp_path, world, Lifecycle(world, MagicMock()), heard, seed=1)
    )
    assert outcome.status == "success"
    assert metrics[-1][objective.metric] > target
    assert metrics[-1]["loss"] < metrics[0]["loss"] or len(metrics) == 1
