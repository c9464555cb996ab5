"""The families of models in transformers: which are read, and what to use in place of others.

docs/models.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlbert.host.errors import UserError
from mlbert.host.json_files import shown

# model_type in config.json -> the family's name, and what to use in its place.
INSTEAD: Mapping[str, tuple[str, str]] = {
    "distilbert": ("DistilBERT", "the BERT that it was distilled from, or a small BERT or Ettin"),
    "deberta": ("DeBERTa", "a ModernBERT, or RoBERTa of the same size"),
    "deberta-v2": ("DeBERTa", "a ModernBERT, or RoBERTa of the same size"),
    "electra": ("ELECTRA", "a BERT or ModernBERT of the same size"),
    "albert": ("ALBERT", "a BERT or ModernBERT"),
    "eurobert": ("EuroBERT", "mmBERT, a ModernBERT for many languages, or XLM-RoBERTa"),
    "neobert": ("NeoBERT", "ModernBERT-base or large"),
    "nomic_bert": ("NomicBERT", "ModernBERT-base"),
    "mpnet": ("MPNet", "RoBERTa or a ModernBERT"),
    "longformer": ("Longformer", "a ModernBERT, which reads 8,192 tokens"),
    "big_bird": ("BigBird", "a ModernBERT, which reads 8,192 tokens"),
}
_ENCODERS = "a BERT, ModernBERT, RoBERTa or XLM-RoBERTa"
_OF_DECODERS = ("ForCausalLM", "LMHeadModel")
_OF_TRANSLATORS = "ForConditionalGeneration"


def other_family(values: Mapping[str, object], path: str) -> UserError:
    """Return the error about a model that is not read: what it is, and what to use.

    Args:
        values: of its config.json.
        path: of that file.
    """
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type.lower() in INSTEAD:
        family, instead = INSTEAD[model_type.lower()]
        reason = f"describes a {family}, which is not supported"
        remedy = f"Use {instead}; or train this one with transformers"
        return UserError("model.unsupported", path, reason, remedy)
    architectures = values.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if any(name.endswith(_OF_DECODERS) for name in names):
        reason = f"describes a decoder ({names[0]}), which predicts the next word"
        return UserError("model.unsupported", path, reason, f"Use an encoder: {_ENCODERS}")
    if any(name.endswith(_OF_TRANSLATORS) for name in names):
        reason = f"describes an encoder with a decoder ({names[0]})"
        return UserError("model.unsupported", path, reason, f"Use an encoder alone: {_ENCODERS}")
    reason = f"model_type is {shown(model_type)}, which is not supported"
    remedy = f"Use an encoder of one of these families: {_ENCODERS}; or use transformers"
    return UserError("model.unsupported", path, reason, remedy)
