"""Fine-tuning for classification or regression of a text or a pair,
from column files or for a GLUE task.

    python benchmarks/mosaic_bert/sequence_classification.py YAML load_path=WEIGHTS data.train=CSV
    python benchmarks/mosaic_bert/glue.py YAML starting_checkpoint_load_path=WEIGHTS

* weights    encoder and (if present) pooler of INIT_CHECKPOINT;
             the classifier is initialized randomly
* loss       mean cross-entropy, or squared error, over all sequences of the step
* update     decoupled AdamW, decay on every tensor, no gradient clipping
* rate       linear warmup (6 % of the steps in the YAML files), then linear decay; the first two
             updates have rate 0, as in Composer
* data       unpadded, shuffled every epoch; with SHUFFLE=none in file order, as in the published
             GLUE jobs. The classes come from the training file, which is read before the run starts
* metrics    computed over all predictions
"""

from __future__ import annotations

from mlbert.config.recipe import Recipe
from mlbert.data.loading.config import TaskConfig, TextConfig
from mlbert.recipes.inspection import inspect_task
from mlbert.recipes.sections import COMMON

RECIPE = Recipe(
    name="classification",
    sections=(*COMMON, TextConfig, TaskConfig),
    inspect=inspect_task,
    build="mlbert.recipes.classification_build",
    overrides={
        "MODEL_IMPLEMENTATION": "mlbert",
        "MAX_SEQ_LENGTH": 128,
        "SHUFFLE": "naive",
        "DROP_LAST": False,
        "DECAY_ALL": True,
        "PACKING_FACTOR": 1.0,
        "SCHEDULE": "linear",
        "LR_FIRST_STEP": -1,
        "OPTIMIZER": "decoupled_adamw",
        "OPT_LAMB_BETA_1": 0.9,
        "OPT_LAMB_BETA_2": 0.98,
        "WEIGHT_DECAY_RATE": 1e-6,
        "MAX_GRAD_NORM": None,
        "TARGET_MLM_ACCURACY": None,
        "NUM_EVAL_EXAMPLES": None,
        "EVAL_BATCH_SIZE": 128,
        "MLPERF_SUBMISSION_ORG": "none",
        "MLPERF_SUBMISSION_PLATFORM": "none",
        "MLPERF_DIVISION": "open",
    },
    required=frozenset({"MAX_SEQ_LENGTH"}),
)
