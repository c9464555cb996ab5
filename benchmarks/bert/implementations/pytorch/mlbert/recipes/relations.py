"""Relations between values of different sections of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mlbert.config.configuration import Configuration
from mlbert.config.section import Contradiction
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import SCHEDULE_SETTINGS, OptimizerConfig, ScheduleConfig
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig


class RunRelations:
    """See `mlbert.config.configuration.Relations`."""

    def contradictions(self, config: Configuration) -> Iterator[Contradiction]:
        """Yield contradictions of the batch's warm-up, and if the run starts from its own folder."""
        batch = config[DataConfig].train_batch_size
        first_batch = config.get(config.catalog.by_key["batchsize_warmup_start"])
        if isinstance(first_batch, int) and first_batch > batch:
            problem = f"is {first_batch}, more than BATCHSIZE {batch}"
            yield Contradiction("config.conflict", "BATCHSIZE_WARMUP_START", problem, "Lower it")
        start = config[ModelConfig].init_checkpoint
        if start is not None and Path(start) == config[RunConfig].output_dir:
            remedy = "Name the checkpoint to start from"
            yield Contradiction(
                "config.conflict", "INIT_CHECKPOINT", "is the run folder LOGDIR itself", remedy
            )

    def oddities(self, config: Configuration, origins: Mapping[str, str]) -> Iterator[str]:
        """Yield violations of the closed division, and settings that the schedule does not read."""
        if config[SubmissionConfig].submission_division == "closed":
            yield from _not_closed(config)
        name = config[ScheduleConfig].schedule
        every = {key for keys in SCHEDULE_SETTINGS.values() for key in keys}
        for key in sorted(every - set(SCHEDULE_SETTINGS[name])):
            setting = config.catalog.by_key[key]
            is_given = not origins[key].startswith(("recipe ", "not set"))
            if is_given and config.get(setting) is not None:
                yield f"{setting.env} is set, but SCHEDULE={name} does not read it"

    def may_change(self, config: Configuration) -> Iterator[str]:
        """Yield what the program itself may change, and what then changes only the speed."""
        if config[ComputeConfig].auto_micro_batch:
            yield "GRADIENT_STEPS"
        if config[DistributedConfig].gradient_clipping != "buckets":
            yield "BUCKET_MIB"


def _not_closed(config: Configuration) -> Iterator[str]:
    """Yield violations of the closed division; its required values are the sections' defaults."""
    target = EvaluationConfig.model_fields["target_metric"].default
    if config[EvaluationConfig].target_metric != target:
        given = config[EvaluationConfig].target_metric or "none"
        yield f"the closed division requires {target}, TARGET_MLM_ACCURACY is {given}"
    optimizer = config[OptimizerConfig].optimizer
    schedule = config[ScheduleConfig].schedule
    if (optimizer, schedule) != ("lamb", "polynomial"):
        yield (
            "the closed division requires LAMB with polynomial decay, "
            f"not {optimizer} with {schedule}"
        )
