"""BERT with its two pre-training heads on the flat token stream of `Batch`; the encoder is `mlbert.models.encoder`.

Legend: S sequences, T tokens, M masked tokens, R rows asked for, D hidden, V padded vocabulary.

The decoder is tied to the word embeddings, the vocabulary padded to a multiple of 8. Parameter names are those of
Hugging Face's ``BertForPreTraining``. The masked-LM head runs on masked tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert import ops
from mlbert.core.bert_config import BertConfig
from mlbert.feed.batch import Batch
from mlbert.models.encoder import BertModel, Dropout
from mlbert.ops import fp8

# The reference divides the summed masked-LM loss by (sum of weights + 1e-5).
MLM_DIVISOR_EPS = 1e-5


def loss_divisors(num_masked: int, num_samples: int) -> tuple[float, float]:
    """What `PreTrainingOutput.loss` divides by, when the step holds these many masked tokens and sequences."""
    return num_masked + MLM_DIVISOR_EPS, float(num_samples)


@dataclass(frozen=True)
class PreTrainingOutput:
    """Sums over one micro-batch, so that any split of a step's batch adds up to the same numbers.

    Attributes:
        mlm_loss_sum: float32 scalar, cross-entropy summed over the M masked tokens.
        nsp_loss_sum: float32 scalar, cross-entropy summed over the S sequences.
        num_correct: int64 scalar, masked tokens whose most probable token is the label.
    """

    mlm_loss_sum: Tensor
    nsp_loss_sum: Tensor
    num_correct: Tensor

    def loss(self, num_masked: int, num_samples: int) -> Tensor:
        """The benchmark's loss when the whole optimizer step holds these many masked tokens and sequences."""
        masked, samples = loss_divisors(num_masked, num_samples)
        # Tensors, though numbers would do: on a GPU a division by a number multiplies by its reciprocal instead.
        return self.loss_by(torch.full_like(self.mlm_loss_sum, masked), torch.full_like(self.nsp_loss_sum, samples))

    def loss_by(self, masked_divisor: Tensor, sample_divisor: Tensor) -> Tensor:
        """The same with the `loss_divisors` as scalars on the device, of the losses' types."""
        return self.mlm_loss_sum / masked_divisor + self.nsp_loss_sum / sample_divisor


class _Transform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class _Predictions(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))
        self.transform = _Transform(config)


class _Heads(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _Predictions(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


@torch.no_grad()
def initialize_parameter(name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Draws one parameter in place; its name tells the kind: LayerNorm gain, bias, or a matrix of deviation ``std``."""
    if name.endswith("LayerNorm.weight"):
        parameter.fill_(1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        nn.init.trunc_normal_(parameter, 0.0, std, -2 * std, 2 * std, generator=generator)


class BertForPreTraining(nn.Module):
    """BERT with masked-LM and next-sentence heads.

    Args:
        config: shape.
        dtype: precision of the encoder's and heads' matrix products and activations (float32 or bfloat16); parameters
            and losses are float32.
        sparse_last_layer: do the last layer's per-token work only for masked tokens and [CLS]. The losses are the same.
        fp8_products: which products of the encoder's linear layers run in FP8; sizes must be multiples of 16.
    """

    def __init__(
        self,
        config: BertConfig,
        dtype: torch.dtype = torch.float32,
        sparse_last_layer: bool = True,
        fp8_products: fp8.Products | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.sparse_last_layer = config, dtype, sparse_last_layer
        self.bert = BertModel(config, dtype, fp8_products)
        self.cls = _Heads(config)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws the weights as the reference does: normal cut at two deviations, zero biases, unit LayerNorm gains.

        Rows of the vocabulary's padding are zero, so that they never matter.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            initialize_parameter(name, parameter, self.config.initializer_range, generator)
        self.bert.embeddings.word_embeddings.weight[self.config.vocab_size :].zero_()

    def ordered_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters in flat-buffer order: query, key and value lie side by side, weights first."""
        names = dict(self.named_parameters())
        ordered: dict[str, nn.Parameter] = {}
        for name, parameter in names.items():
            if ".attention.self.query.weight" in name:
                stem = name.removesuffix("query.weight")
                for kind in ("weight", "bias"):
                    for part in ("query", "key", "value"):
                        ordered[f"{stem}{part}.{kind}"] = names[f"{stem}{part}.{kind}"]
            elif ".attention.self." not in name:
                ordered[name] = parameter
        return list(ordered.items())

    def forward(self, batch: Batch, dropout: Dropout | None = None) -> PreTrainingOutput:
        """Losses and hits of one micro-batch; ``dropout`` None means evaluation."""
        masked_MD, first_SD = self._head_inputs(batch, dropout)
        logits_MV = self.masked_logits(masked_MD)
        mlm_loss_sum, num_correct = ops.masked_cross_entropy(logits_MV, batch.masked_labels, self.config.vocab_size)
        nsp_logits = self.next_sentence_logits(first_SD).float()
        nsp_loss_sum = F.cross_entropy(nsp_logits, batch.next_sentence_labels, reduction="sum")
        return PreTrainingOutput(mlm_loss_sum, nsp_loss_sum, num_correct)

    def _head_inputs(self, batch: Batch, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
        """Hidden states of the masked tokens [M, D] and of each sequence's [CLS] [S, D]."""
        # Sequences without tokens, which fill a batch up, may begin behind the last token.
        first = batch.cu_seqlens[:-1].long().clamp(max=batch.num_tokens - 1)
        rows = torch.cat([batch.masked_positions, first])
        if self.sparse_last_layer:
            hidden = self.bert(batch, dropout, rows)
        else:
            hidden = self.bert(batch, dropout, None).index_select(0, rows)
        return hidden[: batch.num_masked], hidden[batch.num_masked :]

    def masked_logits(self, hidden_MD: Tensor) -> Tensor:
        """Vocabulary logits [M, V] of hidden states, in the compute precision."""
        transform = self.cls.predictions.transform
        inner = ops.linear_gelu(
            hidden_MD,
            transform.dense.weight,
            transform.dense.bias,
            self.config.hidden_act == "gelu_erf",
        )
        norm = transform.LayerNorm
        inner = ops.layer_norm_dropout(inner, norm.weight, norm.bias, norm.eps, 0.0, 0, None)
        decoder = self.bert.embeddings.word_embeddings.weight.to(self.dtype)
        return F.linear(inner, decoder, self.cls.predictions.bias.to(self.dtype))

    def next_sentence_logits(self, first_SD: Tensor) -> Tensor:
        """Logits [S, 2] from each sequence's [CLS] state."""
        pooler = self.bert.pooler.dense
        pooled = torch.tanh(F.linear(first_SD, pooler.weight.to(self.dtype), pooler.bias.to(self.dtype)))
        head = self.cls.seq_relationship
        return F.linear(pooled, head.weight.to(self.dtype), head.bias.to(self.dtype))
