"""All sections and settings, and what resolves them:
the one place that sees every package's settings.

Importing it needs no PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mlbert.config import arguments, resolution, sources, words
from mlbert.config.configuration import Catalog
from mlbert.config.section import Setting
from mlbert.config.shell import LaunchConfig
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import (
    BatchGrowthConfig,
    CorpusConfig,
    DataConfig,
    TaskConfig,
    TextConfig,
)
from mlbert.distributed.config import DistributedConfig
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.recipes.relations import RunRelations
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig, PhaseConfig

# Sections that every recipe reads.
COMMON = (
    RunConfig,
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    OptimizerConfig,
    DistributedConfig,
    ComputeConfig,
    EvaluationConfig,
    SubmissionConfig,
)
SECTIONS = (
    *COMMON,
    TextConfig,
    CorpusConfig,
    BatchGrowthConfig,
    PhaseConfig,
    TaskConfig,
    TensorFlowConfig,
)
CATALOG = Catalog(SECTIONS, LaunchConfig, RunRelations())

# What `mlbert.config` offers, with this catalog.
resolve = functools.partial(resolution.resolve, CATALOG)
peek = functools.partial(resolution.peek, CATALOG)
split_arguments = functools.partial(arguments.split_arguments, CATALOG)
check_exports = functools.partial(sources.check_exports, CATALOG)
read_yaml = functools.partial(sources.read_yaml, CATALOG)
unknown_name = functools.partial(words.unknown_name, CATALOG)


def settings_by_key() -> Mapping[str, Setting]:
    """Return every setting that a run may have, by key."""
    return CATALOG.by_key


def settings_by_env() -> Mapping[str, Setting]:
    """Return every legal export by name; those that only the launchers read are last."""
    return CATALOG.by_env
