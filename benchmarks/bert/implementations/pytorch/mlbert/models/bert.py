"""BERT models with their heads, on the flat token stream of `Batch`.

The encoder is `mlbert.models.encoder`.

Models return logits; objectives (`mlbert.models.objectives`) compute losses and metrics from them.
Parameter names are those of Hugging Face's classes with the same names. The vocabulary is padded to
a multiple of 8, and the masked-LM head runs on masked tokens only.

Legend: S sequences, T tokens, M masked tokens, R requested rows, D hidden, H head size,
V padded vocabulary, L labels.

Initialization of rotary models: a new model first learns word frequencies, then stays on that
plateau until some head attends to the neighbors of a masked word. We start past the plateau. A
query bias a and a key bias a rotated back by d positions give tokens i and j, whatever they are,
the score

    sum over angles t of  a_t^2 cos((j - i - d) t) / sqrt(H)

which is highest at j = i + d. The biases are trained like any other. The weights a_t^2 fall with
the angle: the highest angle makes the maximum narrow, and the others keep it from repeating some
words further on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert.config import flops
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.models.encoder import NUM_SITES, SITE_CLASSIFIER, BertModel, Dense, Keys
from mlbert.ops import api as ops
from mlbert.ops.fp8_scaling import Products

# Tokens from a token to the one that a head of the first layer attends to at first, one a head.
# Further heads are initialized as usual.
DISTANCES = (-1, 1, -2, 2, -3, 3)
_HEIGHT = 8.0  # of the scores' maximum, for a model of the head size and rope_theta below
_DECAY = 1.2  # exponent by which the weights fall with the angle
_TUNED_HEAD_SIZE = 32
_TUNED_ROPE_THETA = 10_000.0


def neighbor_biases(config: BertConfig) -> tuple[Tensor, Tensor]:
    """Return the initial biases of the first layer's query and key, float32 [D] each."""
    size = config.head_size
    half = config.head_size // 2
    angles = config.rope_theta ** -(torch.arange(half) / half)
    density = (
        (size / _TUNED_HEAD_SIZE)
        * torch.log(torch.tensor(_TUNED_ROPE_THETA))
        / torch.log(torch.tensor(config.rope_theta))
    )
    weights = (_HEIGHT / density * angles**_DECAY * size**0.5).sqrt()
    query, key = torch.zeros(2, config.num_attention_heads, size)
    for head, distance in enumerate(DISTANCES[: config.num_attention_heads]):
        query[head, :half] = weights
        key[head, :half] = weights * (distance * angles).cos()
        key[head, half:] = -weights * (distance * angles).sin()
    return query.flatten(), key.flatten()


@torch.no_grad()
def begin_with_frequencies(model: nn.Module, counts: Sequence[float] | np.ndarray) -> None:
    """Set the decoder's bias to the log frequencies of the words, up to a constant.

    Args:
        model: with a masked-LM head.
        counts: occurrences of each vocabulary entry; 1 is added to each.
    """
    seen = torch.as_tensor(counts, dtype=torch.float64) + 1.0
    parameters = dict(model.named_parameters())
    if "cls.predictions.bias" in parameters:
        bias = parameters["cls.predictions.bias"]
    else:
        bias = parameters["cls.predictions.decoder.bias"]
    bias[: len(seen)] = (seen.log() - seen.log().mean()).float()


class PreTrainingLogits(NamedTuple):
    """Vocabulary logits of the masked tokens, [M, V], and logits of "sentence B is random",
    [S, 2].
    """

    masked: Tensor
    next_sentence: Tensor


class MaskedLogits(NamedTuple):
    """Vocabulary logits of the masked tokens, [M, V]."""

    masked: Tensor


class SequenceLogits(NamedTuple):
    """Label logits of each sequence, [S, L]."""

    labels: Tensor


class TokenLogits(NamedTuple):
    """Label logits of the tokens at the batch's ``masked_positions``, [M, L]."""

    labels: Tensor


class AnyBert(Protocol):
    """A model with Hugging Face's parameter names: one of ours, or theirs
    (`mlbert.models.huggingface_model`).

    Attributes:
        config: shape.
        architecture: name of the Hugging Face class with these parameters.
    """

    config: BertConfig

    @property
    def architecture(self) -> str: ...

    def initialize(self, seed: int) -> None:
        """Initialize the weights."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As in `nn.Module`."""

    def ordered_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters in flat-buffer order."""

    def to(self, device: torch.device) -> Any:
        """As in `nn.Module`."""


def _transform(config: BertConfig) -> Dense:
    """Return the linear layer and LayerNorm before the masked-LM decoder."""
    size = config.hidden_size
    return Dense(config, size, size, norm="post", bias=config.classifier_bias)


class _Predictions(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if config.tie_word_embeddings:
            self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))
        self.transform = _transform(config)
        if not config.tie_word_embeddings:
            self.decoder = nn.Linear(config.hidden_size, config.padded_vocab_size)


class _Heads(nn.Module):
    def __init__(self, config: BertConfig, next_sentence: bool) -> None:
        super().__init__()
        self.predictions = _Predictions(config)
        if next_sentence:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _Pooling(nn.Module):
    """A classifier's share of the masked-LM head, under the same names."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = nn.Module()
        self.predictions.transform = _transform(config)


@torch.no_grad()
def initialize_parameter(
    name: str, parameter: Tensor, config: BertConfig, generator: torch.Generator
) -> None:
    """Initialize one parameter in place, by its name: LayerNorm gain 1, bias 0, matrix truncated
    normal."""
    if name.endswith("LayerNorm.weight"):
        parameter.fill_(1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        std = _deviation(name, config)
        limit = config.initializer_cutoff_factor * std
        nn.init.trunc_normal_(parameter, 0.0, std, -limit, limit, generator=generator)


def _deviation(name: str, config: BertConfig) -> float:
    """Return the deviation of a matrix at initialization.

    "megatron" is Hugging Face's and the research repository's ModernBERT: a smaller one, by the
    number of residual sums, for what is added to a residual and for the masked-LM head, and 1 /
    sqrt(D) for a classifier.
    """
    if config.initializer == "flat":
        return config.initializer_range
    if name == "classifier.weight":
        return config.hidden_size**-0.5
    if name.endswith(".output.dense.weight") or name.startswith("cls.predictions."):
        return config.initializer_range / math.sqrt(2.0 * config.num_hidden_layers)
    return config.initializer_range


class BertBase(nn.Module):
    """BERT without heads: the base class of the models.

    Args:
        config: shape.
        dtype: precision of the encoder's and heads' products and activations (float32, bfloat16 or
            float16); parameters are float32.
        sparse_last_layer: run the last layer's per-token work only for the tokens that the heads
            read. The logits do not change.
        fp8_products: the products of the encoder's linear layers that run in FP8;
            sizes must be multiples of 16.
    """

    POOLED: ClassVar[bool] = True  # whether a head reads [CLS] through the pooler

    def __init__(
        self,
        config: BertConfig,
        dtype: torch.dtype = torch.float32,
        sparse_last_layer: bool = True,
        fp8_products: Products | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.sparse_last_layer = sparse_last_layer
        self.bert = BertModel(config, dtype, fp8_products, self._is_pooled())
        self._add_heads()

    def _is_pooled(self) -> bool:
        """Return whether a head reads [CLS] through the pooler."""
        return self.POOLED

    def _add_heads(self) -> None:
        """Add the parameters of the heads."""

    @property
    def architecture(self) -> str:
        """Return the name of the Hugging Face class with these parameters."""
        return type(self).__name__

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize like the reference: normal truncated at two deviations, zero biases,
        unit LayerNorm gains.

        Rows of the vocabulary's padding are zero, so that they have no effect. In a rotary model of
        our own form, heads of the first layer start with attention to neighbors (see the module
        docstring).
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            initialize_parameter(name, parameter, self.config, generator)
            if name.endswith(("word_embeddings.weight", "decoder.weight")):
                parameter[self.config.vocab_size :].zero_()
        if self.config.starts_from_text and self.config.attention_bias:
            first = self.bert.encoder.layers[0].attention.self
            query_bias, key_bias = neighbor_biases(self.config)
            first.query.bias.copy_(query_bias)
            first.key.bias.copy_(key_bias)

    def ordered_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters in flat-buffer order:
        query, key and value are adjacent, weights first.
        """
        names = dict(self.named_parameters())
        ordered: dict[str, nn.Parameter] = {}
        for name, parameter in names.items():
            if ".attention.self.query.weight" in name:
                stem = name.removesuffix("query.weight")
                kinds = ["weight", "bias"] if self.config.attention_bias else ["weight"]
                for kind in kinds:
                    for part in ("query", "key", "value"):
                        ordered[f"{stem}{part}.{kind}"] = names[f"{stem}{part}.{kind}"]
            elif ".attention.self." not in name:
                ordered[name] = parameter
        return list(ordered.items())

    def dropout_keys(self, seed: int, step: int) -> Tensor:
        """Return the dropout keys of one optimizer step:
        int32 [layers + 1, NUM_SITES] on the host; see `Keys`.
        """
        return ops.dropout_keys(seed, step, self.config.num_hidden_layers + 1, NUM_SITES)

    def training_flops(self, batch: flops.Counted) -> int:
        """Return the FLOPs of forward and backward of a batch,
        counted as in `mlbert.config.flops`.
        """
        work = flops.BatchWork.of(batch, self.config.local_window)
        return flops.BACKWARD_FACTOR * self._forward_flops(work)

    def capture_obstacle(self, device: torch.device, max_seqlen: int) -> str | None:
        """Return why the selected ops cannot run forward and backward in a CUDA graph, or None if
        they can. Sequences have at most ``max_seqlen`` tokens.
        """
        alibi = self.config.position_embedding_type == "alibi"
        return ops.capture_obstacle(
            device, self.dtype, self.config.head_size, alibi, max_seqlen, self.config.local_window
        )

    def weights_changed(self) -> None:
        """Mark the FP8 copies of the weights as outdated, on the host.

        They are rebuilt when next needed.
        """
        self.bert.linears.weights_changed()

    def refresh(self) -> None:
        """Rebuild outdated FP8 copies now, so that a CUDA graph only reads them."""
        self.bert.refresh()

    def end_step(self, over_ranks_max: Callable[[Tensor], Any]) -> None:
        """Add the step's magnitudes to the history after an update.

        ``over_ranks_max``: in-place all-reduce MAX.
        """
        self.bert.linears.end_step(over_ranks_max)

    def forget_step(self) -> None:
        """Discard the magnitudes recorded by a pass that was not a training step."""
        self.bert.linears.forget_step()

    @property
    def is_calibrated(self) -> bool:
        """Return False while FP8 scales are unknown:
        a pass then measures each tensor before it quantizes it.
        """
        return self.bert.linears.is_calibrated

    @is_calibrated.setter
    def is_calibrated(self, value: bool) -> None:
        self.bert.linears.is_calibrated = value

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Treat the model as calibrated during warm-up or capture passes,
        and restore its state afterwards.
        """
        linears = self.bert.linears
        saved = {name: buffer.clone() for name, buffer in self.named_buffers()}
        calibrated = linears.is_calibrated
        linears.is_calibrated = True
        try:
            yield
        finally:
            for name, buffer in self.named_buffers():
                buffer.copy_(saved[name])
            linears.weights_changed()
            linears.is_calibrated = calibrated

    def derived_state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint saves with the weights, by name:
        live tensors, valid between steps.
        """
        return self.bert.linears.derived_state()

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy in the result of `derived_state`. State saved with another precision is ignored."""
        self.bert.linears.load_derived_state(state)

    def _forward_flops(self, work: flops.BatchWork) -> int:
        raise NotImplementedError

    def _hidden(self, batch: Batch, keys: Keys | None, rows: Tensor) -> Tensor:
        """Return the last hidden states of these rows, [R, D]."""
        if self.sparse_last_layer:
            return self.bert(batch, keys, rows)
        return self.bert(batch, keys, None).index_select(0, rows)

    def _linear(self, x: Tensor, part: nn.Linear) -> Tensor:
        return F.linear(x, part.weight.to(self.dtype), part.bias.to(self.dtype))

    def _pooled(self, first_SD: Tensor) -> Tensor:
        dense = self.bert.pooler.dense
        return torch.tanh(ops.linear(first_SD, dense.weight, dense.bias))

    def _transformed(self, hidden_RD: Tensor, transform: Dense) -> Tensor:
        """Return LayerNorm(gelu(x W^T + b)), [R, D], the first part of the masked-LM head."""
        dense = transform.dense
        norm = transform.LayerNorm
        if self.config.classifier_bias:
            inner = ops.linear_gelu(hidden_RD, dense.weight, dense.bias, self.config.exact_gelu)
        else:
            approximate = "none" if self.config.exact_gelu else "tanh"
            inner = F.gelu(ops.linear(hidden_RD, dense.weight), approximate=approximate)
        return ops.layer_norm_dropout(inner, norm.weight, norm.bias, norm.eps, 0.0, 0, None)

    def _masked_logits(self, hidden_MD: Tensor, predictions: _Predictions) -> Tensor:
        """Return vocabulary logits [M, V] of hidden states, in the compute precision."""
        inner = self._transformed(hidden_MD, predictions.transform)
        if not self.config.tie_word_embeddings:
            return ops.linear(inner, predictions.decoder.weight, predictions.decoder.bias)
        words = self.bert.embeddings.word_embeddings.weight
        return ops.linear(inner, words, predictions.bias, has_other_users=True)


class BertForPreTraining(BertBase):
    """BERT with masked-LM and next-sentence heads."""

    def _add_heads(self) -> None:
        self.cls = _Heads(self.config, next_sentence=True)

    def forward(self, batch: Batch, keys: Keys | None) -> PreTrainingLogits:
        """Return the logits of both heads; ``keys`` None means evaluation."""
        hidden = self._hidden(batch, keys, torch.cat([batch.masked_positions, first_tokens(batch)]))
        masked_MD = hidden[: batch.num_masked]
        first_SD = hidden[batch.num_masked :]
        masked = self._masked_logits(masked_MD, self.cls.predictions)
        return PreTrainingLogits(
            masked, self._linear(self._pooled(first_SD), self.cls.seq_relationship)
        )

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.forward_flops(self.config, work)


class BertForMaskedLM(BertBase):
    """BERT with only the masked-LM head, without pooler.

    Every masked token counts in the loss and in the metrics, including those with label id 0, as in
    Hugging Face's model. MosaicBERT's loss ignores id 0, but its metrics count it.
    """

    POOLED = False

    def _add_heads(self) -> None:
        self.cls = _Heads(self.config, next_sentence=False)

    def forward(self, batch: Batch, keys: Keys | None) -> MaskedLogits:
        """Return the logits of the masked tokens; ``keys`` None means evaluation."""
        hidden_MD = self._hidden(batch, keys, batch.masked_positions)
        return MaskedLogits(self._masked_logits(hidden_MD, self.cls.predictions))

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.masked_lm(self.config, work)


class _BertClassifier(BertBase):
    """BERT with a linear classifier of ``num_labels`` outputs."""

    cls: _Pooling  # if the classifier reads the masked-LM head's first part

    def __init__(
        self,
        config: BertConfig,
        num_labels: int,
        dtype: torch.dtype = torch.float32,
        fp8_products: Products | None = None,
    ) -> None:
        super().__init__(config, dtype, fp8_products=fp8_products)
        self.num_labels = num_labels
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def _classified(self, x_RD: Tensor, batch: Batch, keys: Keys | None, tokens: Tensor) -> Tensor:
        """Return the classifier's logits of R rows, [R, L], after dropout in training.

        Args:
            x_RD: what the classifier reads.
            batch: of the pass.
            keys: dropout keys; None means evaluation.
            tokens: int64 [R], the token that each row's dropout mask belongs to.
        """
        if keys is not None:
            rows = batch.dropout_rows.index_select(0, tokens)
            probability = self.config.hidden_dropout_prob
            x_RD = ops.apply_dropout(x_RD, probability, keys[0][SITE_CLASSIFIER], rows)
        return self._linear(x_RD, self.classifier)

    def _after_head(self, hidden_RD: Tensor) -> Tensor:
        """Return the masked-LM head's linear layer, GELU and LayerNorm of hidden states, [R, D]."""
        return self._transformed(hidden_RD, cast(Dense, self.cls.predictions.transform))


class BertForSequenceClassification(_BertClassifier):
    """BERT with a linear classifier of ``num_labels`` outputs (1 for regression), after pooling and
    dropout.

    The pooling is that of `BertConfig.classifier_pooling`.
    """

    def _is_pooled(self) -> bool:
        return self.config.classifier_pooling == "tanh"

    def _add_heads(self) -> None:
        if not self._is_pooled():
            self.cls = _Pooling(self.config)

    def forward(self, batch: Batch, keys: Keys | None) -> SequenceLogits:
        """Return the logits of each sequence; ``keys`` None means evaluation."""
        first = first_tokens(batch)
        if self.config.classifier_pooling == "mean":
            hidden_SD = sequence_means(self.bert(batch, keys, None), batch)
        else:
            hidden_SD = self._hidden(batch, keys, first)
        if self._is_pooled():
            pooled_SD = self._pooled(hidden_SD)
        else:
            pooled_SD = self._after_head(hidden_SD)
        return SequenceLogits(self._classified(pooled_SD, batch, keys, first))

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.classifier(self.config, work, self.num_labels)


class BertForTokenClassification(_BertClassifier):
    """BERT with a linear classifier of ``num_labels`` outputs for each token at the batch's
    ``masked_positions``, after dropout.

    A rotary model has the masked-LM head's linear layer, GELU and LayerNorm before it, as Hugging
    Face's ModernBERT.
    """

    POOLED = False

    def _add_heads(self) -> None:
        if self.config.is_rotary:
            self.cls = _Pooling(self.config)

    def forward(self, batch: Batch, keys: Keys | None) -> TokenLogits:
        """Return the logits of the chosen tokens; ``keys`` None means evaluation."""
        positions = batch.masked_positions
        hidden_MD = self._hidden(batch, keys, positions)
        if self.config.is_rotary:
            hidden_MD = self._after_head(hidden_MD)
        return TokenLogits(self._classified(hidden_MD, batch, keys, positions))

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.token_classifier(self.config, work, self.num_labels)


def sequence_means(hidden_TD: Tensor, batch: Batch) -> Tensor:
    """Return the mean of each sequence's rows, [S, D]; 0 for an empty sequence. Tokens after the
    last are ignored."""
    ends = batch.cu_seqlens[1:].long()
    places = torch.arange(batch.num_tokens, device=ends.device)
    sequences = torch.searchsorted(ends, places, right=True)
    sums = hidden_TD.new_zeros(batch.num_samples + 1, hidden_TD.shape[1], dtype=torch.float32)
    sums = sums.index_add(0, sequences, hidden_TD.float())[:-1]
    lengths = batch.cu_seqlens.diff().clamp(min=1)
    return (sums / lengths[:, None]).to(hidden_TD.dtype)


def first_tokens(batch: Batch) -> Tensor:
    """Return the index of each sequence's [CLS], int64 [S].

    Empty sequences may start past the end, so clamp.
    """
    return batch.cu_seqlens[:-1].long().clamp(max=batch.num_tokens - 1)
