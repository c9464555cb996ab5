"""The shape of a BERT, read from the benchmark's ``bert_config.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mlbert.core.errors import UserError

VOCAB_MULTIPLE = 8


@dataclass(frozen=True)
class BertConfig:
    """Shape and dropout of a BERT. Field names are those of ``bert_config.json``.

    ``hidden_act`` is "gelu", the benchmark's tanh form, or "gelu_erf", the exact form of Hugging Face checkpoints.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UserError("bert_config", f"{name} is {getattr(self, name)!r}, not a positive integer")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                "bert_config",
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}",
            )
        if self.hidden_act not in ("gelu", "gelu_erf"):
            raise UserError("bert_config", f"hidden_act {self.hidden_act!r} is unknown", "Use gelu or gelu_erf")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError("bert_config", f"{name} is {getattr(self, name)!r}, not in [0, 1)")

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows in memory: the next multiple of 8, so that the decoder's matrix product is aligned."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @classmethod
    def from_json(cls, path: Path) -> BertConfig:
        """Reads ``bert_config.json``; an unknown or missing key is an error that names it."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                path, f"cannot be read ({error.strerror})", "Set BERT_CONFIG to a bert_config.json"
            ) from None
        except ValueError as error:
            raise UserError(path, f"is not JSON ({error})", "Set BERT_CONFIG to a bert_config.json") from None
        if not isinstance(values, dict):
            raise UserError(path, "holds no JSON object", "Set BERT_CONFIG to a bert_config.json")
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise UserError(path, f"unknown key {unknown[0]!r}", f"Known keys: {', '.join(known)}")
        required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if missing := [name for name in required if name not in values]:
            raise UserError(path, f"key {missing[0]!r} is missing", "Add it")
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(path, error.reason, error.remedy) from None
        except TypeError as error:
            raise UserError(
                path, f"has a value of the wrong type ({error})", "Compare with configs/base.json"
            ) from None

    def to_json(self) -> str:
        """The configuration as JSON text with a trailing newline."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"
