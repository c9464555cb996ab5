"""BERT with its heads, what it is trained for, its weights in files, and the Hugging Face adapter."""

from mlbert.core.bert_config import BertConfig
from mlbert.models.bert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification

__all__ = ["BertConfig", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
