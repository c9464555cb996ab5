"""A short run on texts that are packed into micro-batches, with ModernBERT's optimizer.

`mosaic_texts.make_texts` writes the texts, and the caller the model's shape.
"""

from pathlib import Path

from mlbert.config.recipe import MASKED_LM
from mlbert.config.resolution import Resolved
from mlbert.recipes import masked_lm_text
from mlbert.recipes.sections import resolve

PACKED_LENGTH = 24  # tokens of a row
_NEVER = 10**15  # samples


def packed_text_run(folder: Path, out: str, **changes: object) -> Resolved:
    """Return the configuration of a run into ``folder/out``, with changes by key."""
    values = {
        "recipe": MASKED_LM,
        "precision": "fp32",
        "bert_config_file": folder / "bert_config.json",
        "input_dir": folder / "data/train_small",
        "eval_dir": folder / "data/val",
        "tokenizer": str(folder / "vocab.txt"),
        "output_dir": folder / out,
        "max_seq_length": PACKED_LENGTH,
        "long_texts": "split",
        "max_sequences_per_pack": 32,
        "masking_rate": 0.3,
        "seed": 1,
        "optimizer": "decoupled_stableadamw",
        "learning_rate": 0.01,
        "opt_lamb_beta_1": 0.9,
        "opt_lamb_beta_2": 0.98,
        "schedule": "constant",
        "lr_first_step": 0,
        "max_samples_termination": _NEVER,
        "eval_iter_start_samples": _NEVER,
        "eval_iter_samples": _NEVER,
        "target_mlm_accuracy": None,
        "log_freq": 1,
        "cpu_threads": 1,
        **changes,
    }
    layer = {name: (value, "test") for name, value in values.items()}
    return resolve(masked_lm_text.RECIPE, {}, given=layer)
