"""All sections and settings of the tree, and a run's resolved configuration: one instance of each of its sections."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar

from mlbert.config.section import Section, Setting, settings_of
from mlbert.config.shell import LaunchConfig
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import CorpusConfig, DataConfig, TaskConfig, TextConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig, ScheduleConfig
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig

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
SECTIONS = (*COMMON, TextConfig, CorpusConfig, TaskConfig, TensorFlowConfig)

Kind = TypeVar("Kind", bound=Section)


class Configuration:
    """The sections of a run, by type: ``configuration[OptimizerConfig].beta1``."""

    def __init__(self, sections: Iterable[Section]) -> None:
        self._sections = {type(section): section for section in sections}

    def __getitem__(self, kind: type[Kind]) -> Kind:
        """Return a section; KeyError if the run's recipe does not have it."""
        section = self._sections[kind]
        assert isinstance(section, kind)
        return section

    def get(self, setting: Setting) -> object:
        """Return the value of a setting; None if the recipe does not have its section."""
        section = self._sections.get(setting.section)
        return None if section is None else getattr(section, setting.field)

    def fixed_on_resume(self) -> dict[str, object]:
        """Return environment name to value for settings that a resumed run must not change.

        Data, model shape and batch are compared by content, not by a setting. Limits, evaluations, paths, speed
        settings and the length of the schedule may change.
        """
        fixed = {
            one.env: self.get(one) for one in settings_by_key().values() if one.fixed_on_resume
        }
        if self[ComputeConfig].auto_micro_batch:
            del fixed["GRADIENT_STEPS"]
        if self[DistributedConfig].gradient_clipping != "buckets":
            del fixed["BUCKET_MIB"]  # then it changes only the speed
        return fixed

    def replace(self, section: Section) -> Configuration:
        """Return a copy with this section replacing the one of its type."""
        return Configuration({**self._sections, type(section): section}.values())

    @property
    def sections(self) -> Iterable[Section]:
        """All sections."""
        return self._sections.values()


@cache
def settings_by_key() -> Mapping[str, Setting]:
    """Return every setting that a run may have, by key."""
    found = {one.key: one for section in SECTIONS for one in settings_of(section)}
    assert len(found) == sum(len(settings_of(section)) for section in SECTIONS), (
        "two settings have the same key"
    )
    return types.MappingProxyType(found)


@cache
def settings_by_env() -> Mapping[str, Setting]:
    """Return every legal export by name; those that only the launchers read are last."""
    return types.MappingProxyType(
        {one.env: one for one in (*settings_by_key().values(), *settings_of(LaunchConfig))}
    )
