"""Write the YAML of ``glue.py`` for a model: its shape, and the fine-tuning settings that were
published for models of its form.

================  ==================================================================================
ModernBERT        the best hyper-parameters of its paper for each task, and early stopping; the head
                  and the pooling of the checkpoint
all others        those of MosaicML's published jobs; a tanh pooler of the first token
================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.glue import MAX_SEQ_LENGTH
from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.prepare.glue_sources import HUB
from mlbert.host.errors import UserError
from mlbert.models.weights.modernbert import with_known_pooling
from mlbert.programs.glue_published import (
    MODERNBERT_BATCHES,
    PATIENCE,
    SEARCH_SOURCE,
    SETTINGS_SOURCE,
    modernbert_trials,
)
from mlbert.programs.glue_runner import DEFAULT_SEED, FIRST, MOST_SEEDS, SEEDS

# What a user of --from types for the names in the YAML.
OPTIONS = {
    "starting_checkpoint_load_path": "--from",
    "data.glue": "--data",
    "save_finetune_checkpoint_folder": "--out",
    "base_run_name": "--out",
}
GLUE_YAML = "glue.yaml"
TOKENIZER = "tokenizer"  # folder
_LENGTH_MULTIPLE = 8  # tokens
_MOSAIC_SETTINGS = "MosaicML's published jobs"
# Our names -> those of transformers.
_ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu"}


@dataclass(frozen=True)
class Asked:
    """Options of one call.

    Attributes:
        start: model to start from.
        data: folder of GLUE's files.
        out: folder of the jobs.
        tasks: to run.
        num_seeds: runs of each task; None: as many as published.
        is_search: search over the hyper-parameters of ModernBERT's paper.
    """

    start: Path
    data: Path
    out: Path
    tasks: Sequence[str]
    num_seeds: int | None
    is_search: bool


def chosen_tasks(text: str | None) -> list[str]:
    """Return the tasks that are named with commas between, all if None.

    Raises UserError for an unknown one.
    """
    if text is None:
        return list(TASKS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [""]:
        if name not in TASKS:
            reason = f"{name!r} is not a task of GLUE"
            raise UserError("config.choice", "--tasks", reason, "Use some of the tasks", TASKS)
    return list(dict.fromkeys(names))


def settings_source(shape: BertConfig, is_search: bool) -> str:
    """Return the origin of the fine-tuning settings, for people."""
    if is_search:
        return f"a search over the grid of {SEARCH_SOURCE}"
    return SETTINGS_SOURCE if shape.is_rotary else _MOSAIC_SETTINGS


def glue_yaml_text(asked: Asked, shape: BertConfig) -> str:
    """Return the YAML of the jobs that are asked for, of a model of this shape."""
    # Batches are padded to a multiple, which must not be longer than the table of positions.
    positions = shape.max_position_embeddings // _LENGTH_MULTIPLE * _LENGTH_MULTIPLE
    content: dict[str, Any] = {
        "base_run_name": "glue",
        "default_seed": DEFAULT_SEED,
        "precision": "amp_bf16",
        "tokenizer_name": str(asked.out / TOKENIZER),
        "max_seq_len": min(MAX_SEQ_LENGTH, positions),
        "data": {"glue": str(asked.data), "source": HUB},
        "starting_checkpoint_load_path": str(asked.start.resolve()),
        "save_finetune_checkpoint_folder": str(asked.out),
        "model": {"name": "mosaic_bert", "model_config": _model_config(shape)},
        "search": asked.is_search,
        "scheduler": {
            "name": "linear_decay_with_warmup",
            "t_warmup": "0.06dur",
            "alpha_f": 0.0,
        },
        "tasks": {task: _task(task, asked, shape) for task in asked.tasks},
    }
    if shape.is_rotary or asked.is_search:
        content["callbacks"] = {"early_stopper": {"patience": PATIENCE}}
    source = settings_source(shape, asked.is_search)
    return f"# Fine-tuning settings: {source}\n{yaml.safe_dump(content, sort_keys=False)}"


def _model_config(shape: BertConfig) -> dict[str, Any]:
    """Return all values of a classifier's shape, by their names in ``model.model_config``."""
    values = asdict(with_known_pooling(shape))
    values["hidden_act"] = _ACTIVATIONS[shape.hidden_act]
    return {name: value for name, value in values.items() if value is not None}


def _task(task: str, asked: Asked, shape: BertConfig) -> dict[str, Any]:
    seeds = SEEDS.get(task, (DEFAULT_SEED,))
    if asked.num_seeds is not None:
        seeds = MOST_SEEDS[: asked.num_seeds]
    elif asked.is_search:
        seeds = (DEFAULT_SEED,)
    trainer: dict[str, Any] = {"save_num_checkpoints_to_keep": int(task == FIRST)}
    content: dict[str, Any] = {"seeds": list(seeds), "trainer_kwargs": trainer}
    if shape.is_rotary:
        trial = modernbert_trials(shape)[task]
        content["optimizer"] = {"lr": trial.learning_rate, "weight_decay": trial.weight_decay}
        content["batch_size"] = MODERNBERT_BATCHES.get(task, TASKS[task].batch)
        trainer["max_duration"] = f"{trial.epochs}ep"
    return content
