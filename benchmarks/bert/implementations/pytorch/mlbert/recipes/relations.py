"""Relations between values of different sections of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlbert.config.configuration import Configuration
from mlbert.config.section import Contradiction
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OPTIMIZERS, SCHEDULES, OptimizerConfig, ScheduleConfig
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig, PhaseConfig


class RunRelations:
    """See `mlbert.config.configuration.Relations`."""

    def contradictions(self, config: Configuration) -> Iterator[Contradiction]:
        """Yield contradictions of the batch's warm-up,
        and if the run starts from its own folder.
        """
        batch = config[DataConfig].train_batch_size
        first_batch = config.get(config.catalog.by_key["batchsize_warmup_start"])
        if isinstance(first_batch, int) and first_batch > batch:
            problem = f"is {first_batch}, more than BATCHSIZE {batch}"
            yield Contradiction("config.conflict", "BATCHSIZE_WARMUP_START", problem, "Lower it")
        rows = config[DataConfig].max_sequences_per_pack
        remedy = "Set MAX_SEQUENCES_PER_PACK=32, or remove one of them"
        if config.get(config.catalog.by_key["batchsize_warmup_tokens"]) is not None and rows == 1:
            problem = "counts the tokens of packed rows, but nothing is packed"
            yield Contradiction("config.conflict", "BATCHSIZE_WARMUP_TOKENS", problem, remedy)
        elif first_batch is not None and config.or_defaults(PhaseConfig).step_tokens and rows == 1:
            problem = "with STEP_TOKENS counts the tokens of packed rows, but nothing is packed"
            yield Contradiction("config.conflict", "BATCHSIZE_WARMUP_STEPS", problem, remedy)
        start = config[ModelConfig].init_checkpoint
        if start is not None and Path(start) == config[RunConfig].output_dir:
            remedy = "Name the checkpoint to start from"
            yield Contradiction(
                "config.conflict", "INIT_CHECKPOINT", "is the run folder LOGDIR itself", remedy
            )

    def oddities(self, config: Configuration) -> Iterator[str]:
        """Yield violations of the closed division."""
        if config[SubmissionConfig].submission_division == "closed":
            yield from _not_closed(config)

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
    if not (OPTIMIZERS[optimizer].in_closed and SCHEDULES[schedule].in_closed):
        yield (
            "the closed division requires LAMB with polynomial decay, "
            f"not {optimizer} with {schedule}"
        )
