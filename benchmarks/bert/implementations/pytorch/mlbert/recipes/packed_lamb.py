"""Packed LAMB: the MLPerf benchmark's method on packed samples.

    source config_<system>.sh && sbatch -N ${DGXNNODES} -t ${WALLTIME} run.sub

or ``launch/run_and_time.sh``.

Up to MAX_SEQUENCES_PER_PACK sequences share a row of max_seq_length tokens; attention stays within
a sequence. LAMB with bias correction, gradient clipping to global norm 1.0 (GRADIENT_CLIPPING sets
when), no weight decay or trust ratio for biases and LayerNorm, and polynomial learning-rate decay
counted from step 0. The loss is the mean over all masked tokens of the step plus the mean over all
its sequences, so it does not depend on ranks or accumulation steps.

On the benchmark's data (BERT-large, from the phase-1 checkpoint) the target is a masked-LM accuracy
of 0.720, which the reference reaches after about 2.4 million samples at batch 448. For the demo
configuration (text shipped with Python, 2 CPU cores), see the README for target and time.
"""

from __future__ import annotations

from mlbert.config.recipe import Recipe
from mlbert.recipes.inspection import inspect_stored
from mlbert.recipes.sections import COMMON

RECIPE = Recipe(
    name="packed_lamb",
    sections=COMMON,
    inspect=inspect_stored,
    build="mlbert.recipes.packed_lamb_build",
    overrides={"MAX_SEQUENCES_PER_PACK": 3},
    not_read=frozenset({"MODEL_IMPLEMENTATION"}),
)
