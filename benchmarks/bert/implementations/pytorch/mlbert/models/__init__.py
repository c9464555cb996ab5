"""BERT with its pre-training heads, and the Hugging Face adapter."""

from mlbert.models.bert import BertForPreTraining, DropoutState, PreTrainingOutput
from mlbert.models.config import BertConfig

__all__ = ["BertConfig", "BertForPreTraining", "DropoutState", "PreTrainingOutput"]
