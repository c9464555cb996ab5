"""ModernBERT's model in YAML, ``model.name: flex_bert``:
its ``model_config`` as options of a shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mlbert.host.errors import UserError, nearest
from mlbert.models.weights.flexbert import KEYS, shape_of_flexbert
from mosaic_yaml.nested_yaml import YamlValue

NAME = "flex_bert"
# How the research repository computes the same numbers: without an effect here.
IGNORED = (
    "activation_function",
    "allow_embedding_resizing",
    "compile_model",
    "deterministic_fa2",
    "loss_function",
    "loss_kwargs",
    "masked_prediction",
    "model_type",
    "pad_logits",
    "pad_token_id",
    "padding",
    "unpad_embeddings",
    "use_fa2",
)


def model_options(given: YamlValue) -> str:
    """Return MODEL_OPTIONS of the ModernBERT that a ``model_config`` describes.

    Raises:
        UserError: an unknown name, or a value that our model does not have; names the key.
    """
    values: Mapping[str, object] = given.value
    for name in values:
        if name in KEYS or name in IGNORED:
            continue
        near = nearest(name, sorted(KEYS))
        remedy = "Remove it" if near is None else f"Did you mean {near}?"
        reason = f"model.model_config.{name} is an unknown name"
        raise UserError("config.unknown-name", given.origin, reason, remedy)
    try:
        shape = shape_of_flexbert(values, given.origin)
    except UserError as error:
        remedy = "Change model.model_config to a ModernBERT's"
        raise UserError(error.code, given.origin, error.problem, remedy) from None
    options = {name: value for name, value in asdict(shape).items() if value is not None}
    return " ".join(f"{name}={value}" for name, value in options.items())
