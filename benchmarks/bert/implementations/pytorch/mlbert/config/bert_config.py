"""The shape of BERT-like models, read from a ``bert_config.json``."""

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
from mlbert.host.provenance import shipped
from mlbert.host.schema import Document, parse_model
from mlbert.host.texts import parse_number

# Above the largest published models, but low enough to catch typing errors.
_Size = Annotated[int, Field(ge=1, le=2**18)]
_Count = Annotated[int, Field(ge=1, le=1024)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Small = Annotated[float, Field(gt=0, lt=1)]
_Theta = Annotated[float, Field(gt=1, le=1e9)]
_BOOLEANS = {"true": True, "false": False}
# Missing in the benchmark's file; written only if they differ from a plain BERT.
_OPTIONS = (
    "position_embedding_type",
    "position_offset",
    "rope_theta",
    "norm_position",
    "gated_mlp",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "gated_bias",
    "norm_bias",
    "classifier_bias",
    "local_attention",
    "global_attn_every_n_layers",
    "local_rope_theta",
    "rope_frequencies",
    "embedding_dropout_prob",
    "attention_output_dropout_prob",
    "initializer",
    "initializer_cutoff_factor",
    "classifier_pooling",
    "vocab_size_multiple",
)
# Options that only rotary models have.
_ROTARY_OPTIONS = (
    "attention_bias",
    "mlp_bias",
    "gated_bias",
    "norm_bias",
    "classifier_bias",
    "local_attention",
    "global_attn_every_n_layers",
    "local_rope_theta",
    "rope_frequencies",
    "embedding_dropout_prob",
    "attention_output_dropout_prob",
    "initializer",
    "classifier_pooling",
)


@dataclass(frozen=True)
class BertConfig:
    """Shape and dropout of a BERT.

    Field names are those of ``bert_config.json``; the defaults are BERT's.

    Attributes:
        hidden_act: "gelu" (the benchmark's tanh form)
            or "gelu_erf" (the exact form of Hugging Face checkpoints).
        position_embedding_type: "absolute": learned. "alibi": no embeddings; attention scores fall
            with distance (`alibi_slopes`), and `max_position_embeddings` limits nothing in the
            model. "rotary": ModernBERT, which rotates queries and keys by position
            (`mlbert.ops.rotary`) and has no segment embeddings, a gated MLP, and LayerNorm before
            each sublayer except the first attention.
        position_offset: rows of the table of learned positions before that of the first token, in
            Hugging Face's RoBERTa. No token looks them up, and our models do not have them;
            `max_position_embeddings` does not count them.
        rope_theta: base of the rotary angles, of layers with global attention.
        norm_position: "post": LayerNorm after each residual sum. "pre": before each sublayer and
            once at the end, as in Hugging Face's RoBERTa-PreLayerNorm.
        gated_mlp: use MosaicBERT's feed-forward (gelu(x A) * (x B)) W + b instead of gelu(x A + a)
            W + b, with dropout before W instead of after it. A and B are one matrix of 2
            `intermediate_size` rows.
        tie_word_embeddings: share the word embeddings with the masked-LM decoder.
        attention_bias, mlp_bias, norm_bias, classifier_bias: whether the linear layers of
            attention, the output of the gated MLP, all LayerNorms, and the head's linear layer have
            biases.
        gated_bias: whether the first matrix of the gated MLP also has a bias, as a ModernBERT with
            ``mlp_bias`` has. New models do not have it.
        local_attention: tokens of the window of local layers: a query sees half as many keys on
            each side, and its own position. 0: no layer is local.
        global_attn_every_n_layers: distance of global layers, the first of which is the first
            layer; 0: all are local.
        local_rope_theta: base of the rotary angles of local layers.
        rope_frequencies: how angles are rounded. "product": position times theta^(-2 i / H), as in
            Hugging Face's models. "quotient": position divided by theta^(2 i / H), as models of our
            own text were trained.
        embedding_dropout_prob, attention_output_dropout_prob: dropout after the embeddings and
            after attention's output layer; None: `hidden_dropout_prob`.
        initializer: "flat": one deviation for all matrices, and the first layer starts with
            attention to neighbors (`mlbert.models.bert`). "megatron": `initializer_range` divided
            by sqrt(2 layers) for matrices whose output is added to a residual, and for the head.
        initializer_cutoff_factor: deviations at which normal distributions are truncated.
        classifier_pooling: what a sequence classifier reads. "tanh": the first token, through a
            linear layer and tanh. "cls", "mean": the first token or the mean of all, through the
            masked-LM head's linear layer, GELU and LayerNorm, as in Hugging Face's ModernBERT.
        vocab_size_multiple: the vocabulary's rows in memory are rounded up to a multiple of this.
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
    position_offset: Annotated[int, Field(ge=0, le=1024)] = 0
    rope_theta: _Theta = 10_000.0
    norm_position: Literal["post", "pre"] = "post"
    gated_mlp: bool = False
    tie_word_embeddings: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True
    gated_bias: bool = False
    norm_bias: bool = True
    classifier_bias: bool = True
    local_attention: Annotated[int, Field(ge=0, le=2**18)] = 0
    global_attn_every_n_layers: Annotated[int, Field(ge=0, le=1024)] = 1
    local_rope_theta: _Theta = 10_000.0
    rope_frequencies: Literal["quotient", "product"] = "quotient"
    embedding_dropout_prob: _Share | None = None
    attention_output_dropout_prob: _Share | None = None
    initializer: Literal["flat", "megatron"] = "flat"
    initializer_cutoff_factor: Annotated[float, Field(gt=0, le=10)] = 2.0
    classifier_pooling: Literal["tanh", "cls", "mean"] = "tanh"
    vocab_size_multiple: _Size = 8

    def __post_init__(self) -> None:
        _check(vars(self), "bert_config")
        if self.hidden_size % self.num_attention_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            reason = f"hidden_size {self.hidden_size} is not a multiple of {heads}"
            raise UserError("model.shape", "bert_config", reason, "Change one of the two")
        if self.is_rotary and not (
            self.norm_position == "pre" and self.gated_mlp and self.head_size % 2 == 0
        ):
            reason = (
                "rotary positions require norm_position pre, gated_mlp true and an even head size"
            )
            raise UserError("model.shape", "bert_config", reason, "Change one or the other")
        if not self.is_rotary:
            for name in _ROTARY_OPTIONS:
                if getattr(self, name) != _defaults()[name]:
                    reason = f"{name} {getattr(self, name)} is only for rotary positions"
                    raise UserError("model.shape", "bert_config", reason, "Change one or the other")
        if self.position_offset and self.position_embedding_type != "absolute":
            reason = f"position_offset {self.position_offset} is only for absolute positions"
            raise UserError("model.shape", "bert_config", reason, "Change one or the other")
        if (self.local_attention > 0) == (self.global_attn_every_n_layers == 1):
            reason = (
                f"local_attention {self.local_attention} contradicts "
                f"global_attn_every_n_layers {self.global_attn_every_n_layers}"
            )
            remedy = (
                "Set local_attention to 0 if all layers are global, else to the window's tokens"
            )
            raise UserError("model.shape", "bert_config", reason, remedy)

        if self.gated_bias and not self.mlp_bias:
            reason = "gated_bias true requires mlp_bias true"
            raise UserError("model.shape", "bert_config", reason, "Change one or the other")

    @property
    def is_rotary(self) -> bool:
        """True for ModernBERT models."""
        return self.position_embedding_type == "rotary"

    @property
    def starts_from_text(self) -> bool:
        """True for rotary models of our own form, which begin with word frequencies and attention
        to neighbors."""
        return self.is_rotary and self.initializer == "flat"

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows in memory, a multiple of 8 by default so that the decoder's matrix
        product is aligned."""
        return -(-self.vocab_size // self.vocab_size_multiple) * self.vocab_size_multiple

    @property
    def embedding_dropout(self) -> float:
        """Probability of dropout after the embeddings."""
        if self.embedding_dropout_prob is None:
            return self.hidden_dropout_prob
        return self.embedding_dropout_prob

    @property
    def attention_output_dropout(self) -> float:
        """Probability of dropout after attention's output layer."""
        if self.attention_output_dropout_prob is None:
            return self.hidden_dropout_prob
        return self.attention_output_dropout_prob

    @property
    def local_window(self) -> int | None:
        """Keys that a query of a local layer sees on each side; None if no layer is local."""
        return self.local_attention // 2 if self.local_attention else None

    @property
    def num_local_layers(self) -> int:
        """Number of layers with local attention."""
        return sum(self.is_local(layer) for layer in range(self.num_hidden_layers))

    def is_local(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has local attention."""
        every = self.global_attn_every_n_layers
        return every == 0 or layer % every > 0

    @property
    def exact_gelu(self) -> bool:
        """True if GELU is the exact erf form."""
        return self.hidden_act == "gelu_erf"

    @property
    def inner_rows(self) -> int:
        """Rows of the first feed-forward matrix; a gated MLP has two matrices stacked in one."""
        return (2 if self.gated_mlp else 1) * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the pre-training model,
        including both heads and the vocabulary's padding.
        """
        size = self.hidden_size
        inner = self.intermediate_size
        norm = size + (size if self.norm_bias else 0)
        attention = 4 * size * size + (4 * size if self.attention_bias else 0)
        feed_forward = 3 * size * inner if self.gated_mlp else 2 * size * inner + inner
        feed_forward += size if self.mlp_bias else 0
        rows = self.padded_vocab_size
        learned = self.max_position_embeddings if self.position_embedding_type == "absolute" else 0
        segments = 0 if self.is_rotary else self.type_vocab_size
        embeddings = (rows + learned + segments) * size + norm
        layers = self.num_hidden_layers * (attention + feed_forward + 2 * norm)
        # Rotary models skip the first layer's first norm and have a final one instead.
        last_norm = norm if self.norm_position == "pre" and not self.is_rotary else 0
        transform = size * size + (size if self.classifier_bias else 0) + norm
        decoder = rows + (0 if self.tie_word_embeddings else rows * size)
        pooler = size * size + size
        next_sentence = 2 * size + 2
        return embeddings + layers + last_norm + transform + decoder + pooler + next_sentence

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """Slope per head: the bias of two tokens' score is -slope times their distance.

        () without ALiBi.

        For n heads, n a power of two: 2^(-8 i / n), i from 1 to n. Otherwise: the slopes of the
        next lower power of two, then every second slope of the next higher one (Press et al., arXiv
        2108.12409, and its authors' code).
        """
        if self.position_embedding_type != "alibi":
            return ()

        def powers(heads: int) -> list[float]:
            return [2.0 ** (-8.0 * i / heads) for i in range(1, heads + 1)]

        below = 1 << (self.num_attention_heads.bit_length() - 1)
        return (*powers(below), *powers(2 * below)[::2][: self.num_attention_heads - below])

    @classmethod
    def from_json(cls, path: Path) -> BertConfig:
        """Read ``bert_config.json``.

        Raises UserError naming the wrong key if it is unreadable or invalid.
        """
        values = read_json(Path(path), "Give the bert_config.json of a BERT")
        _check(values, path)
        try:
            return cls(**values)
        except UserError as error:
            raise error.about(path) from None

    def with_options(self, text: str | None) -> BertConfig:
        """Return a copy with other values, such as ``"gated_mlp=true num_hidden_layers=6"``;
        None changes nothing.

        Raises:
            UserError: an unknown or repeated name, or a value of the wrong type or out of range.
        """
        subject = "MODEL_OPTIONS"
        changes = dict[str, object]()
        # Options that may be None are numbers.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        kinds = {name: float if value is None else type(value) for name, value in values.items()}
        for word in (text or "").split():
            name, equals, value = word.partition("=")
            if not equals:
                reason = f"{word!r} is not name=value"
                raise UserError(
                    "config.value", subject, reason, "Write name=value, separated by spaces"
                )
            if name not in kinds:
                near = nearest(name, kinds)
                reason = f"{name!r} is unknown"
                if near:
                    hint = f"Did you mean {near}?"
                    raise UserError("config.unknown-name", subject, reason, hint)
                raise UserError("config.unknown-name", subject, reason, "Use a valid one", kinds)
            if name in changes:
                raise UserError(
                    "config.duplicate", subject, f"{name!r} is given twice", "Remove one of them"
                )
            if value.lower() == "none" and _defaults()[name] is None:
                changes[name] = None
                continue
            try:
                changes[name] = _parsed(value, kinds[name])
            except (KeyError, ValueError):
                kind = {bool: "true or false", int: "an integer", float: "a number"}[kinds[name]]
                raise UserError(
                    "config.value", subject, f"{name} is {value!r}", f"Give {kind}"
                ) from None
        try:
            return replace(self, **changes)  # type: ignore[arg-type]
        except UserError as error:
            raise error.about(subject) from None

    def to_json(self) -> str:
        """Return JSON text with a trailing newline,
        omitting options that have a plain BERT's value.
        """
        defaults = _defaults()
        values = {k: v for k, v in asdict(self).items() if k not in _OPTIONS or v != defaults[k]}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"


@cache
def _defaults() -> dict[str, object]:
    return {field.name: field.default for field in fields(BertConfig)}


def _parsed(text: str, kind: type) -> object:
    if kind is bool:
        return _BOOLEANS[text.lower()]
    return parse_number(text, kind) if kind in (int, float) else text


def _check(values: Mapping[str, Any], subject: Path | str) -> None:
    """Raise UserError if a value is missing, wrong or unknown."""
    parse_model(
        _schema(),
        values,
        subject,
        f"Compare with {shipped('configs') / 'base.json'}",
        "model.shape",
    )


@cache
def _schema() -> type[Document]:
    """Return `BertConfig` as a model that only validates:
    0 must not become 0.0, which old runs did not record.
    """
    hints = get_type_hints(BertConfig, include_extras=True)
    defaults = {f.name: ... if f.default is MISSING else f.default for f in fields(BertConfig)}
    known: dict[str, Any] = {name: (hints[name], default) for name, default in defaults.items()}
    return create_model("Shape", __base__=Document, __cls_kwargs__={"extra": "forbid"}, **known)
