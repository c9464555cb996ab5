"""The shape of a BERT and of its relatives, read from a ``bert_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

from mlbert.host.errors import UserError, nearest
from mlbert.host.json_files import read_json
from mlbert.host.schema import Document, parse_model

VOCAB_MULTIPLE = 8


# Above the largest published models, below what a slip of the keyboard makes.
_Size = Annotated[int, Field(ge=1, le=2**18)]
_Count = Annotated[int, Field(ge=1, le=1024)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Small = Annotated[float, Field(gt=0, lt=1)]
_BOOLEANS = {"true": True, "false": False}
# What the benchmark's file does not know; written only where it differs from a plain BERT.
_OPTIONS = ("position_embedding_type", "rope_theta", "norm_position", "gated_mlp", "tie_word_embeddings")


@dataclass(frozen=True)
class BertConfig:
    """Shape and dropout of a BERT. Field names are those of ``bert_config.json``; the defaults are BERT's own.

    Attributes:
        hidden_act: "gelu", the benchmark's tanh form, or "gelu_erf", the exact form of Hugging Face checkpoints.
        position_embedding_type: "absolute", learned; or "alibi": none, but attention's scores fall with the distance
            (`alibi_slopes`), and `max_position_embeddings` bounds nothing in the model; or "rotary": ModernBERT's form,
            whose queries and keys are turned by their positions (`mlbert.ops.rotary`), which has no segment embeddings,
            gated feed-forward parts, and LayerNorm before the sublayers but not before the first attention.
        rope_theta: of "rotary", the base of its angles.
        norm_position: "post", LayerNorm after each residual sum; or "pre", before each sublayer and once at the end, as
            in Hugging Face's RoBERTa-PreLayerNorm.
        gated_mlp: the feed-forward part is (gelu(x A) * (x B)) W + b in place of gelu(x A + a) W + b, with dropout
            before W in place of behind it: MosaicBERT's form. A and B are one matrix of 2 `intermediate_size` rows.
        tie_word_embeddings: the masked-LM decoder is the table of word embeddings.
    """

    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Count
    num_attention_heads: _Count
    intermediate_size: _Size
    max_position_embeddings: _Size = 512
    type_vocab_size: _Count = 2
    hidden_act: Literal["gelu", "gelu_erf"] = "gelu"
    hidden_dropout_prob: _Share = 0.1
    attention_probs_dropout_prob: _Share = 0.1
    initializer_range: _Small = 0.02
    layer_norm_eps: _Small = 1e-12
    position_embedding_type: Literal["absolute", "alibi", "rotary"] = "absolute"
    rope_theta: Annotated[float, Field(gt=1, le=1e9)] = 10_000.0
    norm_position: Literal["post", "pre"] = "post"
    gated_mlp: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        _check(vars(self), "bert_config")
        if self.hidden_size % self.num_attention_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            reason = f"hidden_size {self.hidden_size} is not a multiple of {heads}"
            raise UserError("model.shape", "bert_config", reason, "Change one of the two")
        if self.is_rotary and not (self.norm_position == "pre" and self.gated_mlp and self.head_size % 2 == 0):
            reason = "rotary positions come with norm_position pre, gated_mlp true and heads of an even size"
            raise UserError("model.shape", "bert_config", reason, "Change the one or the other")

    @property
    def is_rotary(self) -> bool:
        """Whether the model has ModernBERT's form."""
        return self.position_embedding_type == "rotary"

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows in memory: the next multiple of 8, so that the decoder's matrix product is aligned."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def exact_gelu(self) -> bool:
        """Whether GELU is the erf form."""
        return self.hidden_act == "gelu_erf"

    @property
    def inner_rows(self) -> int:
        """Rows of the first feed-forward matrix: two matrices side by side where it is gated."""
        return (2 if self.gated_mlp else 1) * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the pre-training model, both heads included, with the vocabulary's padding."""
        size, inner, norm = self.hidden_size, self.intermediate_size, 2 * self.hidden_size
        dense, rows = size * size + size, self.padded_vocab_size
        learned = self.max_position_embeddings if self.position_embedding_type == "absolute" else 0
        segments = 0 if self.is_rotary else self.type_vocab_size
        embeddings = (rows + learned + segments) * size + norm
        feed_forward = (3 * size * inner if self.gated_mlp else 2 * size * inner + inner) + size
        layers = self.num_hidden_layers * (4 * dense + feed_forward + 2 * norm)
        # Rotary models lack the first layer's first norm and have one at the end.
        last_norm = norm if self.norm_position == "pre" and not self.is_rotary else 0
        masked_lm = dense + norm + rows + (0 if self.tie_word_embeddings else rows * size)
        return embeddings + layers + last_norm + dense + masked_lm + 2 * size + 2

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """One number a head: the bias of two tokens' score is -slope times their distance; () without ALiBi.

        2^(-8 i / n), i from 1 to n, where the number of heads n is a power of two; else those of the power of two below
        and then every second one of the power above (Press et al., arXiv 2108.12409, and its authors' code).
        """
        if self.position_embedding_type != "alibi":
            return ()

        def powers(heads: int) -> list[float]:
            return [2.0 ** (-8.0 * i / heads) for i in range(1, heads + 1)]

        below = 1 << (self.num_attention_heads.bit_length() - 1)
        return (*powers(below), *powers(2 * below)[::2][: self.num_attention_heads - below])

    @classmethod
    def from_json(cls, path: Path) -> BertConfig:
        """Reads ``bert_config.json``. Raises UserError: it cannot be read, or names the key at fault."""
        values = read_json(Path(path), "Give the bert_config.json of a BERT")
        _check(values, path)
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(error.code, path, error.problem, error.remedy) from None

    def with_options(self, text: str | None) -> BertConfig:
        """The shape with other values, ``"gated_mlp=true num_hidden_layers=6"``; None: none.

        Raises:
            UserError: a name that is no field, or is there twice; a value of the wrong type, or out of range.
        """
        subject, changes = "MODEL_OPTIONS", dict[str, object]()
        kinds = {f.name: type(getattr(self, f.name)) for f in fields(self)}
        for word in (text or "").split():
            name, equals, value = word.partition("=")
            if not equals:
                raise UserError(
                    "config.value", subject, f"{word!r} is not name=value", "Write name=value with blanks between"
                )
            if name not in kinds:
                near = nearest(name, kinds)
                hint = f"The nearest known one is {near}" if near else f"Known ones: {', '.join(kinds)}"
                raise UserError("config.unknown-name", subject, f"{name!r} is unknown", hint)
            if name in changes:
                raise UserError("config.duplicate", subject, f"{name!r} is there twice", "Leave one of them out")
            try:
                changes[name] = _BOOLEANS[value.lower()] if kinds[name] is bool else kinds[name](value)
            except (KeyError, ValueError):
                kind = {bool: "true or false", int: "an integer", float: "a number"}[kinds[name]]
                raise UserError("config.value", subject, f"{name} is {value!r}", f"Give {kind}") from None
        try:
            return replace(self, **changes)  # type: ignore[arg-type]
        except UserError as error:
            raise UserError(error.code, subject, error.problem, error.remedy) from None

    def to_json(self) -> str:
        """The configuration as JSON text with a trailing newline; options that leave a plain BERT are left out."""
        defaults = {f.name: f.default for f in fields(self)}
        values = {k: v for k, v in asdict(self).items() if k not in _OPTIONS or v != defaults[k]}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _check(values: Mapping[str, Any], subject: Path | str) -> None:
    """Raise UserError: a value is missing, wrong or unknown."""
    parse_model(_schema(), values, subject, "Compare with configs/base.json", "model.shape")


@cache
def _schema() -> type[Document]:
    """Return `BertConfig` as a model that only checks: a 0 must not become 0.0, which old runs did not record."""
    hints = get_type_hints(BertConfig, include_extras=True)
    defaults = {f.name: ... if f.default is MISSING else f.default for f in fields(BertConfig)}
    known: dict[str, Any] = {name: (hints[name], default) for name, default in defaults.items()}
    return create_model("Shape", __base__=Document, __cls_kwargs__={"extra": "forbid"}, **known)
