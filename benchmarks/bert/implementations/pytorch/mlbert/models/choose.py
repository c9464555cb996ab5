"""The model of a run, ours or Hugging Face's, as MODEL_IMPLEMENTATION asks for."""

from __future__ import annotations

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForMaskedLM, BertForSequenceClassification
from mlbert.models.config import ModelConfig
from mlbert.models.huggingface_model import HuggingFaceForMaskedLM, HuggingFaceForSequenceClassification
from mlbert.models.start import HUGGING_FACE, Compute


def make_masked_lm(
    config: ModelConfig, max_seq_length: int | None, shape: BertConfig, compute: Compute
) -> BertForMaskedLM | HuggingFaceForMaskedLM:
    """A masked-LM model without weights; Hugging Face's pads all sequences to MAX_SEQ_LENGTH, or where there is none
    to the batch's longest. Raises UserError as `mlbert.models.huggingface_model.HuggingFaceModel`."""
    if config.model_implementation == HUGGING_FACE:
        return HuggingFaceForMaskedLM(shape, compute.dtype, max_seq_length)
    return BertForMaskedLM(shape, compute.dtype, fp8_products=compute.products)


def make_classifier(
    config: ModelConfig, max_seq_length: int | None, shape: BertConfig, num_labels: int, compute: Compute
) -> BertForSequenceClassification | HuggingFaceForSequenceClassification:
    """A model of ``num_labels`` outputs a sequence, 1 for regression; otherwise as `make_masked_lm`."""
    if config.model_implementation == HUGGING_FACE:
        return HuggingFaceForSequenceClassification(shape, num_labels, compute.dtype, max_seq_length)
    return BertForSequenceClassification(shape, num_labels, compute.dtype, fp8_products=compute.products)
