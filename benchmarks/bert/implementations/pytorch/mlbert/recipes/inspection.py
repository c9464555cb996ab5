"""Inspect a run's inputs before any sample is read: model shape, data sets and vocabulary.

What reads data is imported when it is called, because ``--help`` needs the recipes, not the data.
"""

from __future__ import annotations

from typing import Any

from mlbert.config.configuration import Configuration
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.host.errors import UserError
from mlbert.models.config import ModelConfig
from mlbert.recipes.model_shape import model_shape


def inspect_stored(config: Configuration) -> Any:
    """Inspect stored sequences; see `mlbert.data.loading.inputs.inspect`."""
    from mlbert.data.loading import inputs

    model = config[ModelConfig]
    return inputs.inspect(
        config[DataConfig],
        model_shape(model),
        shape_file=model.bert_config_file,
        init_checkpoint=model.init_checkpoint,
    )


def inspect_text(config: Configuration) -> Any:
    """Inspect a text corpus; see `mlbert.data.loading.text_run.inspect`."""
    from mlbert.data.loading import text_run

    return text_run.inspect(
        config[DataConfig],
        config[TextConfig],
        config[CorpusConfig],
        model_shape(config[ModelConfig]),
    )


def inspect_stored_for_padding(config: Configuration) -> Any:
    """Inspect stored sequences for a model that may pad them to MAX_SEQ_LENGTH.

    Raises:
        UserError: as `inspect_stored`, or MAX_SEQ_LENGTH is more than the model's positions.
    """
    found = inspect_stored(config)
    length = config[DataConfig].max_seq_length or 0
    positions = found.shape.max_position_embeddings
    if length > positions:
        problem = f"is more than the model's {positions} positions"
        raise UserError(
            "config.conflict", f"MAX_SEQ_LENGTH={length}", problem, "Set none, or a smaller value"
        )
    return found


def inspect_task(config: Configuration) -> Any:
    """Inspect a task's files, the vocabulary and the shape; see `mlbert.recipes.task_inputs`."""
    from mlbert.recipes import task_inputs

    return task_inputs.inspect(config)
