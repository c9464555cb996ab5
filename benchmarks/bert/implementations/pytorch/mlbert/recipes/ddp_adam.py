"""DDP with Adam for large batches: each rank's gradient is clipped bucket by bucket during
backward.

    DGXSYSTEM=<system> INPUT_DIR=... EVAL_DIR=... CHECKPOINTDIR_PHASE1=... ./run_multinode.sh
    source config_<system>.sh && sbatch -N ${DGXNNODES} -t ${WALLTIME} run.sub

The method of Samsung's submissions to MLPerf Training v2.0 and v2.1 (open division),
from their public description:

* loss       mean over this rank's masked tokens plus mean over its sequences;
             the ranks' gradients are averaged
* gradient   GRADIENT_CLIPPING=buckets: each full bucket is clipped to MAX_GRAD_NORM / sqrt(buckets)
             and its all-reduce starts at once (`mlbert.distributed.bucket_clipping`), without a
             pass over the full gradient or a wait
* update     Adam with decoupled weight decay, none for biases and LayerNorm
* rate       linear warmup that starts before step 0,
             then linear decay to END_LR at LR_DECAY_END; updates count from 1
* data       unpacked sequences; each rank's batch has BIN_COUNTS sequences from each length bin,
             and EXCHANGE_PADDING redistributes them so that ranks have about equally many tokens
             (`mlbert.data.formats.order`)
"""

from __future__ import annotations

from mlbert.config.recipe import Recipe
from mlbert.recipes.inspection import inspect_stored
from mlbert.recipes.sections import COMMON

RECIPE = Recipe(
    name="ddp_adam",
    sections=COMMON,
    inspect=inspect_stored,
    build="mlbert.recipes.ddp_adam_build",
    overrides={
        "EXCHANGE_PADDING": "group",
        "SCHEDULE": "linear",
        "LR_FIRST_STEP": 1,
        "OPTIMIZER": "adamw",
        "OPT_EPSILON": 1e-9,
        "GRADIENT_CLIPPING": "buckets",
    },
    not_read=frozenset({"MODEL_IMPLEMENTATION"}),
)
