"""BERT with its pre-training heads, its step as a graph, and the Hugging Face adapter."""

from mlbert.core.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining, PreTrainingOutput
from mlbert.models.encoder import Dropout, DropoutKeys, DropoutState
from mlbert.models.graphed_step import GraphedStep, GraphMode

__all__ = [
    "BertConfig",
    "BertForPreTraining",
    "Dropout",
    "DropoutKeys",
    "DropoutState",
    "GraphMode",
    "GraphedStep",
    "PreTrainingOutput",
]
