"""Build the recipe `mlbert.recipes.classification`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.config.sections import Configuration
from mlbert.data.formats import glue
from mlbert.data.formats.order import RankSlice
from mlbert.data.formats.tasks import (
    TaskForm,
    TaskRows,
    form_of_task,
    read_evaluation,
    read_training,
)
from mlbert.data.formats.tokenizer import Tokenizer, check_model_vocabulary, load_tokenizer
from mlbert.data.loading.config import DataConfig, TaskConfig, TextConfig
from mlbert.data.loading.tasks import TaskEvalSet, TaskSource, budget_of
from mlbert.data.loading.text_run import sequence_length
from mlbert.host.errors import UserError
from mlbert.models import task_model
from mlbert.models.bert import BertForSequenceClassification
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import HuggingFaceForSequenceClassification
from mlbert.models.objectives import Classification, Regression
from mlbert.models.task_model import TaskCard
from mlbert.models.weights.load import load_weights
from mlbert.recipes import assembly
from mlbert.recipes.assembly import Compute
from mlbert.recipes.inspection import model_shape
from mlbert.training.config import EvaluationConfig
from mlbert.training.protocols import BuildContext, Method

Classifier = BertForSequenceClassification | HuggingFaceForSequenceClassification


@dataclass(frozen=True)
class TaskInputs:
    """Inputs that match each other: shape, vocabulary, training rows, evaluation rows by name,
    and the task.
    """

    shape: BertConfig
    train_data: str
    eval_data: str
    max_sequence_length: int
    sequences_per_pack: float
    tokenizer: Tokenizer
    train: TaskRows
    evaluations: Mapping[str, TaskRows]
    card: TaskCard


def _files(data: DataConfig, task_config: TaskConfig) -> tuple[TaskForm, Path, dict[str, Path]]:
    """Return the form of the task's files, the training file, and the evaluation files by name."""
    if task_config.task is not None:
        form = form_of_task(task_config.task)
        task = glue.TASKS[task_config.task]
        return form, task.train_file(data.input_dir), task.evaluation_files(data.eval_dir)
    columns = tuple(
        name.strip() for name in (task_config.text_columns or "").split(",") if name.strip()
    )
    if not columns or task_config.label_column is None:
        remedy = "Set them to the columns of the task's files, or set TASK"
        raise UserError("config.missing", "TEXT_COLUMNS", "and LABEL_COLUMN are not set", remedy)
    return (
        TaskForm(columns, task_config.label_column, task_config.num_labels),
        data.input_dir,
        {"": data.eval_dir},
    )


def inspect(config: Configuration) -> TaskInputs:
    """Read the task's files, which define the classes, and the vocabulary and shape.

    Raises UserError if something is missing or damaged, or they do not match.
    """
    data = config[DataConfig]
    text = config[TextConfig]
    model = config[ModelConfig]
    form, train_file, eval_files = _files(data, config[TaskConfig])
    train = read_training(train_file, form)
    evaluations = {
        name: read_evaluation(path, form, train.classes) for name, path in eval_files.items()
    }
    most = config[EvaluationConfig].num_eval_examples
    if most is not None:
        evaluations = {name: rows.first(most) for name, rows in evaluations.items()}
    length = sequence_length(data)
    card = TaskCard(
        text_columns=form.text_columns,
        label_column=form.label_column,
        classes=train.classes,
        max_seq_length=length,
        header=form.header,
        lenient=form.lenient,
    )
    shape = model_shape(model)
    tokenizer = load_tokenizer(text.tokenizer)
    check_model_vocabulary(
        tokenizer,
        shape.vocab_size,
        f"TOKENIZER={text.tokenizer}",
        "Use the vocabulary of INIT_CHECKPOINT",
    )
    if shape.position_embedding_type == "absolute" and length > shape.max_position_embeddings:
        reason = (
            f"is more than the {shape.max_position_embeddings} positions "
            f"of {model.bert_config_file}"
        )
        raise UserError(
            "config.conflict", f"MAX_SEQ_LENGTH={length}", reason, "Set a smaller value"
        )
    identities = ",".join(rows.identity for rows in evaluations.values())
    return TaskInputs(
        shape, train.identity, identities, length, 1.0, tokenizer, train, evaluations, card
    )


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
        config,
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
