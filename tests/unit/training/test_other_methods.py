"""Methods that are not the benchmark's, on the same loop: what a recipe hands over, and nothing in `train` changes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.ragged import Ragged
from mlbert.data.loading.batches import HostBatch
from mlbert.data.loading.synthetic import SyntheticEvalSet, SyntheticSource
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.models.bert import BertForMaskedLM, BertForSequenceClassification
from mlbert.models.huggingface_model import HuggingFaceForMaskedLM, HuggingFaceForSequenceClassification
from mlbert.models.objectives import Classification, MaskedLM, Regression
from mlbert.optim.adamw import AdamW, DecoupledAdamW
from mlbert.optim.flat import FlatParameters
from mlbert.optim.schedules import Linear
from mlbert.recipes import masked_lm_stored
from mlbert.runs.events import Events
from mlbert.runs.progress import RunOutcome
from mlbert.training.experiment import assemble
from mlbert.training.loop import train
from mlbert.training.protocols import EvaluationSet, Method, Objective, Source
from training_settings import configuration
from user_errors import user_error

F32, BF16 = torch.float32, torch.bfloat16
DROPPING = BertConfig(40, 32, 1, 2, 64, max_position_embeddings=16)
SHAPE = DROPPING.with_options("hidden_dropout_prob=0 attention_probs_dropout_prob=0")
MOSAIC = SHAPE.with_options("position_embedding_type=alibi gated_mlp=true hidden_act=gelu_erf")
SETTINGS = {"schedule": "constant", "gradient_accumulation_steps": 1, "max_steps": 200, "max_skipped_steps": 0}
SETTINGS |= {"eval_iter_start_samples": 320, "eval_iter_samples": 320, "target_mlm_accuracy": 0.95}


class Sentences:
    """A task whose label is the share of low token ids in the sentence, or whether it is more than half."""

    num_examples = 128
    is_preparing = False

    def __init__(self, is_class: bool) -> None:
        self._is_class, self._step = is_class, 0

    def batch(self, seed: int, count: int) -> HostBatch:
        generator = np.random.default_rng(seed)
        rows = []
        for length in generator.integers(5, 15, count).tolist():
            share = generator.random()
            words = np.where(generator.random(length) < share, generator.integers(5, 20), generator.integers(20, 40))
            rows.append(([2, *words.tolist()], length + 1, False, [], []))
        shares = np.array([np.mean(np.array(row[0][1:]) < 20) for row in rows], np.float32)
        labels = (shares > 0.5).astype(np.float32) if self._is_class else shares
        batch = dataclasses.replace(Ragged.from_rows(rows), labels=labels)
        return HostBatch.of(batch, np.ones(count, np.int64), np.arange(count), 16)

    def open(self) -> None:
        pass

    finish = close = open

    def next_step(self) -> list[HostBatch]:
        self._step += 1
        return [self.batch(self._step, 32)]

    def state_dict(self, back: int = 0) -> dict[str, int]:
        return {"step": self._step - back}

    def __iter__(self) -> Iterator[HostBatch]:
        return iter([self.batch(0, 100), self.batch(10**6, 28)])


class OneStep(SyntheticSource):
    """Give the same random tokens at every step, so that they can be learnt."""

    def next_step(self) -> list[HostBatch]:
        return self.batches_of(0)


def run(
    model: Any,
    objective: Objective,
    data: tuple[Source, EvaluationSet],
    folder: Path,
    decoupled: bool = False,
    last_lines: list | None = None,
    **changes: object,
) -> tuple[RunOutcome, list[dict[str, float]]]:
    """Train as a recipe of this method would, without a log; ``last_lines`` gets what would be its last line."""
    model.initialize(3)
    flat = FlatParameters(model.ordered_parameters())
    numbers = {"betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": None}
    layout = ShardLayout.whole(flat.numel)
    optimizer = DecoupledAdamW(flat, layout, base_lr=2e-3, **numbers) if decoupled else AdamW(flat, layout, **numbers)
    world, heard, last_lines = World(), Events(), [] if last_lines is None else last_lines
    found: list[dict[str, float]] = []
    heard.evaluation = lambda state, metrics, seconds: found.append(dict(metrics))
    buckets = cut_buckets(flat.offsets, 1, 1)
    parts = {"model": model, "objective": objective, "source": data[0], "evaluation": data[1], "flat": flat}
    parts["sync"] = GradientReducer(flat.parameters, flat.grad, flat.offsets, world, buckets, None)
    parts["schedule"] = Linear(base_lr=2e-3, warmup_steps=5, max_steps=200, decay_end=200)
    parts |= {"optimizer": optimizer, "static_shape": None, "precision": "torch.float32", "ops": "plain"}
    method = Method(**parts, identity={}, export=lambda folder, card: None)
    lifecycle = Lifecycle(world, lambda status, reason: last_lines.append((status, reason)))
    config = configuration(masked_lm_stored.RECIPE, **{**SETTINGS, **changes})
    with lifecycle.guard():
        outcome = train(assemble(config, method, folder, world, lifecycle, heard, seed=1))
        method.source.close()
    assert last_lines == [(outcome.status, None)]
    return outcome, found


def test_a_run_fails_if_the_checksums_turn_out_wrong_after_its_last_step(tmp_path):
    task, lines = Sentences(is_class=True), []
    task.finish = Mock(side_effect=UserError("data.checksum", "shard", "its checksum differs"))
    model, objective = BertForSequenceClassification(SHAPE, num_labels=2), Classification(2, "step", "accuracy")
    with user_error("data.checksum", "shard", wording=False):
        run(model, objective, (task, task), tmp_path, last_lines=lines)
    assert lines == [("aborted", "UserError")]


@pytest.mark.parametrize("kind", [BertForSequenceClassification, HuggingFaceForSequenceClassification])
def test_a_classifier_learns(tmp_path, kind):
    task = Sentences(is_class=True)
    model = kind(SHAPE, num_labels=2)
    outcome, metrics = run(model, Classification(2, "step", "accuracy"), (task, task), tmp_path)
    assert outcome.status == "success"
    assert metrics[-1]["accuracy"] > 0.95 > metrics[0]["accuracy"]
    assert metrics[-1]["f1"] > 0.9
    assert metrics[-1]["matthews_correlation"] > 0.85


def test_a_regression_learns_by_rank_correlation(tmp_path):
    """Spearman's coefficient needs every sample's prediction, not sums."""
    task = Sentences(is_class=False)
    model = BertForSequenceClassification(SHAPE, num_labels=1)
    outcome, metrics = run(model, Regression("rank", "spearman"), (task, task), tmp_path, target_mlm_accuracy=0.9)
    assert outcome.status == "success"
    assert metrics[-1]["spearman"] > 0.9
    assert metrics[-1]["loss"] < metrics[0]["loss"] or len(metrics) == 1


@pytest.mark.parametrize(
    ("scope", "dtype", "baseline"),
    [("step", F32, False), ("rank", BF16, False), ("step", BF16, True), ("rank", F32, True)],
)
def test_a_mosaic_bert_and_its_baseline_train_on_masked_tokens(tmp_path, scope, baseline, dtype):
    """ALiBi, gated units, decoupled weight decay; with one rank the rank's own counts are the step's."""
    model = HuggingFaceForMaskedLM(DROPPING, dtype, pad_to=16) if baseline else BertForMaskedLM(MOSAIC, dtype)
    source = OneStep(packs_per_step=4, max_sequences_per_pack=2, seed=1, vocab_size=40, max_tokens=16)
    changes = {"max_steps": 30, "target_mlm_accuracy": None, "eval_iter_start_samples": 40, "eval_iter_samples": 100}
    data = source, SyntheticEvalSet(source)
    outcome, metrics = run(model, MaskedLM(scope), data, tmp_path, decoupled=True, **changes)
    assert outcome.state.step == 30
    assert metrics[-1]["loss"] < metrics[0]["loss"] < 1.1 * float(torch.tensor(40.0).log())
