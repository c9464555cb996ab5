"""The model shape that a run's settings give."""

from __future__ import annotations

from mlbert.config.bert_config import BertConfig
from mlbert.models.config import ModelConfig


def model_shape(config: ModelConfig) -> BertConfig:
    """Return the model shape of BERT_CONFIG and MODEL_OPTIONS. Raises UserError if it is wrong."""
    return BertConfig.from_json(config.bert_config_file).with_options(config.model_options)
