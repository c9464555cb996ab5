"""Check relations between values of different sections; a section's own methods check those within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mlbert.config.section import Contradiction
from mlbert.config.sections import Configuration, settings_by_key
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.optim.config import SCHEDULE_SETTINGS, OptimizerConfig, ScheduleConfig
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig


def contradictions(config: Configuration) -> Iterator[Contradiction]:
    """Yield every contradiction between values."""
    for section in config.sections:
        yield from section.contradictions()
    start = config[ModelConfig].init_checkpoint
    if start is not None and Path(start) == config[RunConfig].output_dir:
        remedy = "Name the checkpoint to start from"
        yield Contradiction(
            "config.conflict", "INIT_CHECKPOINT", "is the run folder LOGDIR itself", remedy
        )


def oddities(config: Configuration, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence about each value that is legal but looks like a mistake.

    Args:
        config: the run's configuration.
        origins: where each value came from, by key.
    """
    for section in config.sections:
        yield from section.oddities()
    if config[SubmissionConfig].submission_division == "closed":
        yield from _not_closed(config)
    name = config[ScheduleConfig].schedule
    for key in sorted(
        {key for keys in SCHEDULE_SETTINGS.values() for key in keys} - set(SCHEDULE_SETTINGS[name])
    ):
        setting = settings_by_key()[key]
        if config.get(setting) is not None and not origins[key].startswith(("recipe ", "not set")):
            yield f"{setting.env} is set, but SCHEDULE={name} does not read it"


def _not_closed(config: Configuration) -> Iterator[str]:
    """Yield violations of the closed division; its required values are the defaults of the sections."""
    target = EvaluationConfig.model_fields["target_metric"].default
    if config[EvaluationConfig].target_metric != target:
        given = config[EvaluationConfig].target_metric or "none"
        yield f"the closed division requires {target}, TARGET_MLM_ACCURACY is {given}"
    optimizer = config[OptimizerConfig].optimizer
    schedule = config[ScheduleConfig].schedule
    if (optimizer, schedule) != ("lamb", "polynomial"):
        yield f"the closed division requires LAMB with polynomial decay, not {optimizer} with {schedule}"
