"""Masked-LM only on stored samples: MosaicML's entries to MLPerf Training v2.1 (open division).

    benchmarks/bert/implementations/composer/run_and_time.sh -c methods

or ``mlbert train --config config.yaml``.

* model      MODEL_IMPLEMENTATION: this tree's unpadded encoder, or Hugging Face's padded one;
             no pooler, no next-sentence head
* loss       mean over all masked tokens of the step; next-sentence labels are ignored
* update     decoupled AdamW with decay on every tensor (DECAY_ALL); the gradient is not clipped
* rate       linear warmup, then a multiplier for each milestone passed; the first two updates have
             rate 0, as with Composer's schedulers (LR_FIRST_STEP=-1)
* data       samples masked at preparation, one sequence per row

The model shape sets dropout; MODEL_OPTIONS can disable it.
RECIPE=masked_lm without a TOKENIZER is this recipe.
"""

from __future__ import annotations

from mlbert.config.recipe import Recipe
from mlbert.recipes.inspection import inspect_stored_for_padding
from mlbert.recipes.sections import COMMON

RECIPE = Recipe(
    name="masked_lm_stored",
    sections=COMMON,
    inspect=inspect_stored_for_padding,
    build="mlbert.recipes.masked_lm_stored_build",
    overrides={
        "MODEL_IMPLEMENTATION": "mlbert",
        "PACKING_FACTOR": 1.0,
        "SCHEDULE": "multistep",
        "LR_FIRST_STEP": -1,
        "OPTIMIZER": "decoupled_adamw",
        "DECAY_ALL": True,
        "MAX_GRAD_NORM": None,
        "MLPERF_SUBMISSION_ORG": "unspecified",
        "MLPERF_SUBMISSION_PLATFORM": "unspecified",
        "MLPERF_DIVISION": "open",
    },
)
