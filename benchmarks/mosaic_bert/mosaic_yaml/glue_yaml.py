"""Convert the YAML of ``glue.py`` to jobs, each with its own YAML for
``sequence_classification.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from mlbert.data.formats.glue import MAX_SEQ_LENGTH
from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.prepare.glue_sources import HUB, SOURCES
from mlbert.host.errors import UserError
from mlbert.programs.glue_runner import DEFAULT_SEED, SEEDS, GlueJob, job_list
from mosaic_yaml.common_yaml import PATIENCE, SHARED
from mosaic_yaml.nested_yaml import Leaves

# Copied unchanged into the jobs' YAML.
_PASSED = (
    "precision",
    "tokenizer_name",
    "max_seq_len",
    "device_eval_batch_size",
    "device_train_microbatch_size",
    "console_log_interval",
    "progress_bar",
    "log_to_console",
    "python_log_level",
    PATIENCE,
    *SHARED,
    *(
        f"model.{name}"
        for name in ("name", "use_pretrained", "pretrained_model_name", "tokenizer_name")
    ),
    "model.model_config.**",
    *(f"scheduler.{name}" for name in ("name", "t_warmup", "t_max", "alpha_f")),
    *(f"optimizer.{name}" for name in ("name", "betas", "eps")),
)
_TRAINER = ("max_duration", "eval_interval", "eval_subset_num_batches")
_PER_TASK = (
    "seeds",
    *(f"trainer_kwargs.{name}" for name in (*_TRAINER, "save_num_checkpoints_to_keep")),
    "batch_size",
    "optimizer.lr",
    "optimizer.weight_decay",
)
KNOWN = (
    *_PASSED,
    "parallel",
    "base_run_name",
    "default_seed",
    "published_order",
    "search",
    "starting_checkpoint_load_path",
    "local_pretrain_checkpoint_folder",
    "save_finetune_checkpoint_prefix",
    "save_finetune_checkpoint_folder",
    "data.glue",
    "data.source",
    *(f"tasks.{task}.{name}" for task in TASKS for name in _PER_TASK),
    *(f"tasks.{task}.trainer_kwargs" for task in TASKS),
)
_OWN = (
    "parallel",
    "base_run_name",
    "default_seed",
    "published_order",
    "search",
    "starting_checkpoint_load_path",
    "tasks",
    "local_pretrain_checkpoint_folder",
    "save_finetune_checkpoint_",
    "data.",
)


class GlueYaml:
    """Typed access to a ``glue.py`` YAML. Raises UserError for illegal values.

    Args:
        leaves: of the file.
        options: what a user who wrote no YAML types for its names.
    """

    def __init__(self, leaves: Leaves, options: Mapping[str, str] = MappingProxyType({})) -> None:
        self._leaves = leaves
        self._options = options
        self.is_search = bool(leaves.flag("search", False).value)
        self.base_run_name = str(leaves.text("base_run_name", "glue").value)
        self.parallel = bool(leaves.flag("parallel", True).value)
        prefix = str(
            leaves.text("save_finetune_checkpoint_prefix", "./local-finetune-checkpoints").value
        )
        own = Path(prefix) / self.base_run_name
        self.folder = Path(leaves.optional_text("save_finetune_checkpoint_folder") or own)
        self.start = leaves.optional_text("starting_checkpoint_load_path")
        self.glue = Path(str(leaves.text("data.glue", "glue-data").value))
        self.source = str(leaves.choice("data.source", SOURCES, HUB).value)
        self.jobs = self._jobs()

    @property
    def tasks(self) -> list[str]:
        """Tasks that have jobs."""
        return list(dict.fromkeys(job.task for job in self.jobs))

    def _jobs(self) -> list[GlueJob]:
        named = list(
            dict.fromkeys(name.split(".")[1] for name in self._leaves if name.startswith("tasks."))
        )
        default = int(self._leaves.number("default_seed", DEFAULT_SEED).value)
        seeds = {}
        for task in named or TASKS:
            leaf = self._leaves.get(f"tasks.{task}.seeds")
            given = (
                (SEEDS.get(task, [default]) if not named else [default])
                if leaf is None
                else leaf.value
            )
            if not isinstance(given, list | tuple) or not all(
                type(seed) is int and seed >= 0 for seed in given
            ):
                origin = leaf.origin if leaf is not None else task
                reason = f"tasks.{task}.seeds {given!r} is not a list of seeds"
                raise UserError("config.value", origin, reason, "Write [19, 8364]")
            seeds[task] = list(dict.fromkeys(given))
        return job_list(seeds, self.is_search)

    def keeps_weights(self, job: GlueJob) -> bool:
        """Return True if a job's weights are kept after the jobs that wait for them."""
        return (
            self._leaves.number(
                f"tasks.{job.task}.trainer_kwargs.save_num_checkpoints_to_keep", 0
            ).value
            != 0
        )

    def names_for_errors(self, task: str) -> dict[str, str]:
        """Return what the user writes for the names in a job's YAML that have another name here."""
        trainer = f"tasks.{task}.trainer_kwargs"
        names = {
            "run_name": "base_run_name",
            "save_folder": "save_finetune_checkpoint_folder",
            "load_path": "starting_checkpoint_load_path",
            "global_train_batch_size": f"tasks.{task}.batch_size",
            **{name: f"tasks.{task}.{name}" for name in ("optimizer.lr", "optimizer.weight_decay")},
            **{name: f"{trainer}.{name}" for name in _TRAINER},
        }
        here = names | {name: name for name in self._options}
        return {name: self._options.get(own, own) for name, own in here.items()}

    def of_job(self, job: GlueJob, start: str | None) -> dict[str, Any]:
        """Return the YAML of a job that starts from the weights ``start``, by dotted name."""
        task = TASKS[job.task]
        leaves = self._leaves
        found = {name: leaf.value for name, leaf in leaves.items() if not name.startswith(_OWN)}
        found |= {
            "run_name": job.name(self.base_run_name),
            "seed": job.seed,
            "load_path": start,
            "save_folder": str(job.folder(self.folder)),
            "save_num_checkpoints_to_keep": 0,
            "autoresume": True,
            "data.task": job.task,
            "data.glue": str(self.glue),
            "data.source": self.source,
            "train_loader.shuffle": not leaves.flag("published_order", False).value,
            "train_loader.drop_last": False,
            "optimizer.name": leaves.text("optimizer.name", "decoupled_adamw").value,
        }
        defaults: dict[str, Any] = {
            "max_seq_len": MAX_SEQ_LENGTH,
            "optimizer.betas": [0.9, 0.98],
            "optimizer.eps": 1e-6,
            "scheduler.t_warmup": "0.06dur",
            "console_log_interval": "10ba",
        }
        of_task: dict[str, tuple[str, Any]] = {
            "global_train_batch_size": ("batch_size", task.batch),
            "optimizer.lr": ("optimizer.lr", task.learning_rate),
            "optimizer.weight_decay": ("optimizer.weight_decay", task.weight_decay),
            "max_duration": ("trainer_kwargs.max_duration", f"{task.epochs}ep"),
            "eval_interval": ("trainer_kwargs.eval_interval", f"{task.eval_steps}ba"),
            "eval_subset_num_batches": ("trainer_kwargs.eval_subset_num_batches", -1),
        }
        for name, (own, published) in of_task.items():
            leaf = leaves.get(f"tasks.{job.task}.{own}")
            found[name] = published if leaf is None or leaf.value is None else leaf.value
        if job.trial is not None:
            found["optimizer.lr"] = job.trial.learning_rate
            found["optimizer.weight_decay"] = job.trial.weight_decay
            found["max_duration"] = f"{job.trial.epochs}ep"
        return {**defaults, **found}


def as_text(flat: Mapping[str, Any]) -> str:
    """Return values by dotted name as the text of a nested YAML."""
    content: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return yaml.safe_dump(content, sort_keys=False)
