"""Google's MLPerf v0.7 recipe in TensorFlow 2.

LAMB or AdamW with polynomial decay from step 0. Each replica clips the gradient of each micro-batch
before it is accumulated and summed. The values are the flag defaults of the published
`run_pretraining.py`; flags that use other units than the settings are in `tf2_bert.flags`.
"""

from __future__ import annotations

from mlbert.config.recipe import Recipe
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.recipes.sections import COMMON
from tf2_bert.inspection import inspect

RECIPE = Recipe(
    name="tensorflow2",
    sections=(*COMMON, TensorFlowConfig),
    inspect=inspect,
    build="tf2_bert.experiment",
    overrides={
        "PACKING_FACTOR": 1.0,
        "OPTIMIZER": "adamw",
        "OPTIMIZER_IMPLEMENTATION": "plain",
        "OPT_LAMB_BETA_1": 0.9,
        "OPT_LAMB_BETA_2": 0.999,
        "WEIGHT_DECAY_RATE": 0.01,
        "GRADIENT_CLIPPING": "before",
        "TARGET_MLM_ACCURACY": 0.712,
        "PRECISION": "fp32",
        "LOSS_SCALE": 32768.0,
        "MAX_SKIPPED_STEPS": 1000,
        "MLPERF_SUBMISSION_ORG": "unnamed",
        "MLPERF_SUBMISSION_PLATFORM": "unnamed",
        "MLPERF_DIVISION": "open",
    },
    not_read=frozenset(
        {
            "RUN_NAME",
            "WANDB_PROJECT",
            "MLFLOW_EXPERIMENT",
            "DATA_READER",
            "EVAL_ITER_STEPS",
            "EXCHANGE_PADDING",
            "MODEL_IMPLEMENTATION",
            "DECAY_ALL",
            "OPTIMIZER_IMPLEMENTATION",
            "GRADIENT_REDUCTION",
            "BUCKET_MIB",
            "SHARDED_OPTIMIZER",
            "WEIGHTS_ALLGATHER",
            "JOIN_TIMEOUT",
            "READ_TIMEOUT",
            "FP8_FAST_ACCUMULATION",
            "OPS",
            "CUDA_GRAPH_MODE",
            "AUTO_MICRO_BATCH",
        }
    ),
)
