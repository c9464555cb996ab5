"""Masked-LM only on text: MosaicBERT, or a model trained on your own text.

    python benchmarks/mosaic_bert/main.py yamls/main/mosaic-bert-base-uncased.yaml

* model      MODEL_IMPLEMENTATION: this tree's unpadded encoder, or Hugging Face's padded one;
             no pooler, no next-sentence head
* loss       mean over all masked tokens of the step
* update     decoupled AdamW with decay on every tensor (DECAY_ALL); the gradient is not clipped
* rate       SCHEDULE; the first two updates have rate 0,
             as with Composer's schedulers (LR_FIRST_STEP=-1)
* data       texts, tokenized ahead of use, cut into sequences,
             and masked again at MASKING_RATE at every read; with MAX_SEQUENCES_PER_PACK above 1
             micro-batches are filled up to their tokens; BATCHSIZE_WARMUP_* lets the batch grow
* phases     INIT_OPTIMIZER starts with the optimizer state of another run, STEP_TOKENS counts the
             schedule in tokens

The model shape sets dropout; MODEL_OPTIONS can disable it.
RECIPE=masked_lm with a TOKENIZER is this recipe.
"""

from __future__ import annotations

from mlbert.config.recipe import Recipe
from mlbert.data.loading.config import BatchGrowthConfig, CorpusConfig, TextConfig
from mlbert.recipes.inspection import inspect_text
from mlbert.recipes.sections import COMMON
from mlbert.training.config import PhaseConfig

RECIPE = Recipe(
    name="masked_lm_text",
    sections=(*COMMON, TextConfig, CorpusConfig, BatchGrowthConfig, PhaseConfig),
    inspect=inspect_text,
    build="mlbert.recipes.masked_lm_text_build",
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
    required=frozenset({"MAX_SEQ_LENGTH"}),
)
