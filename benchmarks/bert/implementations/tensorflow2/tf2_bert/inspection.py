"""How the recipe inspects its inputs, without an import of TensorFlow before it is needed."""

from __future__ import annotations

from typing import Any

from mlbert.config.configuration import Configuration
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import DataConfig
from mlbert.models.config import ModelConfig


def inspect(config: Configuration) -> Any:
    """Inspect the inputs; see `tf2_bert.data.inspect`."""
    from tf2_bert import data  # imports TensorFlow

    return data.inspect(config[ModelConfig], config[DataConfig], config[TensorFlowConfig])
