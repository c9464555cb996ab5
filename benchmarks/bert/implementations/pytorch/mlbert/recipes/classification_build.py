"""Build the recipe `mlbert.recipes.classification`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.order import RankSlice
from mlbert.data.loading.config import DataConfig, TaskConfig, TextConfig
from mlbert.data.loading.tasks import TaskEvalSet, TaskSource, budget_of
from mlbert.models import task_model
from mlbert.models.bert import BertForSequenceClassification
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import HuggingFaceForSequenceClassification
from mlbert.models.objectives import Classification, Regression
from mlbert.models.weights.load import load_weights
from mlbert.recipes import assembly
from mlbert.recipes.assembly import Compute
from mlbert.recipes.task_inputs import TaskInputs, inspect
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import BuildContext, Method

Classifier = BertForSequenceClassification | HuggingFaceForSequenceClassification


prepare = assembly.prove_ops


def build(context: BuildContext, inputs: TaskInputs) -> Method:
    """Return the method's objects. Texts are tokenized in ``open``."""
    for rows in (inputs.train, *inputs.evaluations.values()):
        for line in rows.warnings:
            context.warn(line)
    config = context.config
    world = context.world
    model, objective, evaluation = build_evaluation(context, inputs)
    compute = assembly.choose_compute(config, world.device, context.warn)
    data = config[DataConfig]
    text = config[TextConfig]
    update = assembly.build_replicated_update(config, model, world, "classification")
    share = RankSlice(
        data.train_batch_size, data.gradient_accumulation_steps, world.rank, world.world_size
    )
    source = TaskSource(
        inputs.train,
        inputs.tokenizer,
        max_seq_length=inputs.card.max_seq_length,
        share=share,
        drop_last=bool(text.drop_last),
        seed=None if text.shuffle is None else context.seed,
        warn=context.warn,
    )

    def export(folder: Path, facts: Mapping[str, object]) -> None:
        task_model.write_task_model(model, folder, facts, inputs.card, inputs.tokenizer)
        parts = list(inputs.evaluations.values())
        found = objective.latest
        task_model.write_predictions(
            folder / task_model.PREDICTIONS, parts, found[:, :2], inputs.card
        )
        task_model.draw_confusion(
            folder / task_model.CONFUSION, found[:, 0], found[:, -1], inputs.card
        )

    return assembly.make_method(
        context,
        inputs,
        compute,
        update,
        identity={"train_batch_size": data.train_batch_size},
        model=model,
        objective=objective,
        source=source,
        evaluation=evaluation,
        static_shape=budget_of(share.units // share.accumulation, inputs.card.max_seq_length),
        export=export,
    )


def make_classifier(
    config: ModelConfig,
    max_seq_length: int | None,
    shape: BertConfig,
    num_labels: int,
    compute: Compute,
) -> Classifier:
    """Return a model with ``num_labels`` outputs per sequence (1 for regression);
    see `assembly.make_masked_lm`.
    """
    if config.model_implementation == assembly.HUGGING_FACE:
        return HuggingFaceForSequenceClassification(
            shape, num_labels, compute.dtype, max_seq_length
        )
    return BertForSequenceClassification(
        shape, num_labels, compute.dtype, fp8_products=compute.products
    )


def build_evaluation(
    context: BuildContext, inputs: TaskInputs | None = None
) -> tuple[Classifier, Classification | Regression, TaskEvalSet]:
    """Return the model with starting weights, the objective and the evaluation set.

    Raises UserError if the checkpoint is missing, damaged or of another shape,
    or METRIC is not one of the task's.
    """
    config = context.config
    world = context.world
    inputs = inputs or inspect(config)
    parts = {name: len(rows) for name, rows in inputs.evaluations.items()}
    num_labels = inputs.card.num_labels
    objective: Classification | Regression
    if inputs.card.classes:
        objective = Classification(
            num_labels, "step", config[TaskConfig].metric or "accuracy", parts
        )
    else:
        objective = Regression("step", config[TaskConfig].metric or "spearman", parts)
    evaluation = TaskEvalSet(
        list(inputs.evaluations.values()),
        inputs.tokenizer,
        max_seq_length=inputs.card.max_seq_length,
        batch_size=config[EvaluationConfig].eval_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        warn=context.warn,
    )
    compute = assembly.choose_compute(config, world.device, context.warn)
    model = make_classifier(
        config[ModelConfig], inputs.card.max_seq_length, inputs.shape, num_labels, compute
    )
    _start(model, context)
    return model, objective, evaluation


def _start(model: Classifier, context: BuildContext) -> None:
    """Give the encoder the weights of INIT_CHECKPOINT, and the classifier random ones."""
    checkpoint = context.config[ModelConfig].init_checkpoint
    model.initialize(context.seed)
    model.to(context.world.device)
    if checkpoint is None:
        context.warn("warning: INIT_CHECKPOINT is none: all weights are initialized randomly")
        return
    drawn = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if name.startswith("classifier.")
    }
    missing = load_weights(model, checkpoint).missing
    with torch.no_grad():
        # The checkpoint's classifier may be of the same size, but for another task.
        for name, value in drawn.items():
            model.get_parameter(name).copy_(value)
    if any(name.startswith("bert.pooler.") for name in missing):
        context.warn(f"{checkpoint} has no pooler: it is initialized randomly")
