"""The inputs of the recipe `mlbert.recipes.classification`,
which defines its classes by its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.config.configuration import Configuration
from mlbert.data.formats import glue_tasks
from mlbert.data.formats.tagged_words import read_task
from mlbert.data.formats.tasks import TaskForm, TaskRows, form_of_task
from mlbert.data.formats.tokenizer import Tokenizer, check_model_vocabulary, load_tokenizer
from mlbert.data.loading.config import DataConfig, TaskConfig, TextConfig
from mlbert.data.loading.text_run import sequence_length
from mlbert.host.errors import UserError
from mlbert.models.config import ModelConfig
from mlbert.models.task_model import TaskCard
from mlbert.recipes.model_shape import model_shape
from mlbert.training.config import EvaluationConfig


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
        task = glue_tasks.TASKS[task_config.task]
        return form, task.train_file(data.input_dir), task.evaluation_files(data.eval_dir)
    columns = tuple(
        name.strip() for name in (task_config.text_columns or "").split(",") if name.strip()
    )
    if not columns or task_config.label_column is None:
        remedy = "Set them to the columns of the task's files, or set TASK"
        raise UserError("config.missing", "TEXT_COLUMNS", "and LABEL_COLUMN are not set", remedy)
    return (
        TaskForm(
            columns,
            task_config.label_column,
            task_config.num_labels,
            kind=task_config.label_kind,
            skip_bad=task_config.skip_bad,
        ),
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
    train = read_task(train_file, form)
    evaluations = {name: read_task(path, form, train.classes) for name, path in eval_files.items()}
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
        kind=form.kind,
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
