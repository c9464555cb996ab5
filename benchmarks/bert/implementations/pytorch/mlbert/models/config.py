"""Settings of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mlbert.config.section import Section, fixed_setting, setting


class ModelConfig(Section):
    """The model: shape, implementation and starting weights."""

    bert_config_file: Path = setting("BERT_CONFIG", "Model shape, a bert_config.json.")
    model_options: str | None = setting(
        "MODEL_OPTIONS",
        "Values that override BERT_CONFIG: name=value, separated by spaces.",
        default=None,
    )
    model_implementation: Literal["mlbert", "huggingface"] | None = fixed_setting(
        "MODEL_IMPLEMENTATION",
        "mlbert: our unpadded model; huggingface: Hugging Face's padded model of the same shape.",
        default=None,
    )
    init_checkpoint: str | None = setting(
        "INIT_CHECKPOINT",
        "model.safetensors, its folder, a run or its checkpoint, or a .pt of NVIDIA or Composer, "
        "or the address of one "
        "of these (https://, s3://); none: random.",
        default=None,
    )
