"""Packed LAMB: the MLPerf benchmark's method on packed samples.

    source config_<system>.sh && sbatch -N ${DGXNNODES} -t ${WALLTIME} run.sub      (or launch/run_and_time.sh)

Up to MAX_SEQUENCES_PER_PACK sequences share a row of max_seq_length tokens; attention never crosses a sequence. LAMB
with bias correction, the gradient clipped to global norm 1.0 (GRADIENT_CLIPPING: when), no decay and no trust ratio
for biases and LayerNorm, polynomial decay counted from step 0. The loss is the mean over all masked tokens of the step
plus the mean over all its sequences, so that ranks and accumulation steps do not change it.

On the benchmark's data (BERT-large, from the phase-1 checkpoint) the goal is masked-LM accuracy 0.720, which the
reference reaches after about 2.4 million samples at batch 448. On the text that Python carries (demo configuration,
2 CPU cores) see the README for the target and the time.
"""

from __future__ import annotations

from typing import Any

from mlbert.config.recipe import Recipe
from mlbert.config.sections import COMMON, Configuration
from mlbert.data.loading.config import DataConfig
from mlbert.models.config import ModelConfig


def inspect(config: Configuration) -> Any:
    """Look at the inputs; see `mlbert.data.loading.inputs.inspect`."""
    from mlbert.data.loading import inputs  # reads data sets: not needed for --help

    return inputs.inspect(config[ModelConfig], config[DataConfig])


RECIPE = Recipe(
    name="packed_lamb",
    sections=COMMON,
    inspect=inspect,
    build="mlbert.recipes.packed_lamb_build",
    overrides={"MAX_SEQUENCES_PER_PACK": 3},
    not_read=frozenset({"MODEL_IMPLEMENTATION"}),
)
