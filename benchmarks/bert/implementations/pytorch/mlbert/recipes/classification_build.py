"""Build the recipe `mlbert.recipes.classification`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.order import RankSlice
from mlbert.data.formats.tasks import LabelKind, TaskForm
from mlbert.data.loading.config import DataConfig, TaskConfig, TextConfig
from mlbert.data.loading.tasks import TaskEvalSet, TaskSource, budget_of, most_labels
from mlbert.host.errors import UserError
from mlbert.models import task_model
from mlbert.models.bert import BertForSequenceClassification, BertForTokenClassification
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import HuggingFaceForSequenceClassification
from mlbert.models.label_lists import LabelSets, WordTags
from mlbert.models.objectives import Classification, Regression
from mlbert.recipes import assembly, auto_precision
from mlbert.recipes.assembly import Compute
from mlbert.recipes.task_inputs import TaskInputs, inspect
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import BuildContext, Method

Classifier = (
    BertForSequenceClassification
    | HuggingFaceForSequenceClassification
    | BertForTokenClassification
)
TaskObjective = Classification | Regression | LabelSets | WordTags


choose_precision = auto_precision.choose_precision
prepare = assembly.prove_ops


def build(context: BuildContext, inputs: TaskInputs) -> Method:
    """Return the method's objects. Texts are tokenized in ``open``."""
    for rows in (inputs.train, *inputs.evaluations.values()):
        for line in rows.warnings:
            context.warn(line)
    config = context.config
    world = context.world
    model, objective, evaluation = build_evaluation(context, inputs)
    compute = assembly.choose_compute(context)
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
        if isinstance(objective, Regression):
            _to_original_unit(model, objective)
        task_model.write_task_model(model, folder, facts, inputs.card, inputs.tokenizer)
        _write_predictions(folder, objective, inputs)

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
        static_shape=budget_of(
            share.units // share.accumulation,
            inputs.card.max_seq_length,
            most_labels([inputs.train]),
        ),
        export=export,
    )


@torch.no_grad()
def _to_original_unit(model: Classifier, objective: Regression) -> None:
    """Let the classifier compute the number, and no longer its standardized form."""
    weight = model.get_parameter("classifier.weight")
    bias = model.get_parameter("classifier.bias")
    weight.mul_(objective.deviation)
    bias.mul_(objective.deviation).add_(objective.mean)


def _write_predictions(folder: Path, objective: TaskObjective, inputs: TaskInputs) -> None:
    """Write the last evaluation's predictions, and a figure of those with one label."""
    card = inputs.card
    parts = list(inputs.evaluations.values())
    rows = objective.latest
    found: list[task_model.Predicted]
    if isinstance(objective, WordTags):
        tags = iter(objective.predicted(rows))
        found = []
        for part in parts:
            of_part = [next(tags) for _ in range(len(part))]
            found += task_model.all_words(part, of_part, inputs.tokenizer, card.max_seq_length)
        task_model.write_predictions(folder / task_model.TAGGED_PREDICTIONS, parts, found, card)
        return
    if isinstance(objective, LabelSets):
        found = [*objective.probabilities(rows).tolist()]
    elif card.classes:
        found = [(card.classes[int(row[0])], float(row[1])) for row in rows]
    else:
        found = [float(row[0]) for row in rows]
    task_model.write_predictions(folder / task_model.PREDICTIONS, parts, found, card)
    if card.kind == "one":
        task_model.draw_confusion(folder / task_model.CONFUSION, rows[:, 0], rows[:, -1], card)


def make_classifier(
    config: ModelConfig,
    max_seq_length: int | None,
    shape: BertConfig,
    num_labels: int,
    compute: Compute,
    kind: LabelKind = "one",
) -> Classifier:
    """Return a model with ``num_labels`` outputs per sequence (1 for regression), or per word;
    see `assembly.make_masked_lm`.
    """
    if kind == "tags":
        return BertForTokenClassification(
            shape, num_labels, compute.dtype, fp8_products=compute.products
        )
    if config.model_implementation == assembly.HUGGING_FACE:
        return HuggingFaceForSequenceClassification(
            shape, num_labels, compute.dtype, max_seq_length
        )
    return BertForSequenceClassification(
        shape, num_labels, compute.dtype, fp8_products=compute.products
    )


def build_evaluation(
    context: BuildContext, inputs: TaskInputs | None = None
) -> tuple[Classifier, TaskObjective, TaskEvalSet]:
    """Return the model with starting weights, the objective and the evaluation set.

    Raises UserError if the checkpoint is missing, damaged or of another shape,
    or METRIC is not one of the task's.
    """
    config = context.config
    world = context.world
    inputs = inputs or inspect(config)
    num_labels = inputs.card.num_labels
    objective = _make_objective(config[TaskConfig], inputs)
    evaluation = TaskEvalSet(
        list(inputs.evaluations.values()),
        inputs.tokenizer,
        max_seq_length=inputs.card.max_seq_length,
        batch_size=config[EvaluationConfig].eval_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        warn=context.warn,
    )
    compute = assembly.choose_compute(context)
    model = make_classifier(
        config[ModelConfig],
        inputs.card.max_seq_length,
        inputs.shape,
        num_labels,
        compute,
        inputs.card.kind,
    )
    _start(model, context)
    if config[TaskConfig].standardize and isinstance(objective, Regression):
        torch.nn.init.zeros_(model.get_parameter("classifier.weight"))  # the mean, at first
    return model, objective, evaluation


def check_class_weights(form: TaskForm) -> None:
    """Raise UserError if a task has not one class a row, so that classes cannot be weighted."""
    if form.kind == "one" and form.num_labels != 1:
        return
    kinds = {"one": "a number", "set": "several classes", "tags": "a tag for each word"}
    reason = f"needs a task with one class a row, and here the label is {kinds[form.kind]}"
    raise UserError("config.conflict", "CLASS_WEIGHTS=balanced", reason, "Remove it")


def _make_objective(config: TaskConfig, inputs: TaskInputs) -> TaskObjective:
    card = inputs.card
    if config.class_weights == "balanced":
        check_class_weights(card.form)
    parts = {name: len(rows) for name, rows in inputs.evaluations.items()}
    if card.kind == "tags":
        most_words = most_labels(list(inputs.evaluations.values()))
        return WordTags(card.classes, "step", config.metric, most_words, parts)
    if card.kind == "set":
        return LabelSets(card.num_labels, "step", config.metric or "micro_f1", parts)
    labels = inputs.train.labels
    assert labels is not None
    if card.classes:
        weights = None
        if config.class_weights == "balanced":
            weights = balanced_weights(labels, card.num_labels)
        metric = config.metric or "accuracy"
        return Classification(card.num_labels, "step", metric, parts, weights)
    mean = 0.0
    deviation = 1.0
    if config.standardize:
        mean = float(labels.mean(dtype=np.float64))
        deviation = float(labels.std(dtype=np.float64)) or 1.0
    return Regression("step", config.metric or "spearman", parts, mean, deviation)


def balanced_weights(labels: np.ndarray, num_classes: int) -> list[float]:
    """Return the weight of each class: the rows of an equal share over its own rows. Their mean
    over the rows is 1. A class without rows has weight 1.

    Args:
        labels: class indices, float32 [N].
        num_classes: L.
    """
    counts = np.bincount(labels.astype(np.int64), minlength=num_classes)
    weights = np.where(counts > 0, len(labels) / (num_classes * np.maximum(counts, 1)), 1.0)
    return [float(weight) for weight in weights]


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
    report = assembly.load_on_rank_0(model, checkpoint, context.world)
    with torch.no_grad():
        # The checkpoint's classifier may be of the same size, but for another task.
        for name, value in drawn.items():
            model.get_parameter(name).copy_(value)
    if report and any(name.startswith("bert.pooler.") for name in report.missing):
        context.warn(f"{checkpoint} has no pooler: it is initialized randomly")
