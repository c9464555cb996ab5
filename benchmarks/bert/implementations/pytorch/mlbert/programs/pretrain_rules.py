"""Rules for a masked-LM model on one's own text: from the text's size, the time and the machine to a run's settings.

Pure arithmetic. A run gets as many tokens as fit its time; the shape and the vocabulary follow from the text and that
number, batch, rate and schedule from the shape and the number of updates. Precision, which belongs to the processor, is
`mlbert.ops.precision.small_model_precision`; the start of the weights is `mlbert.models.bert`.

Measured (records/2026-11-22_pretrain_epyc-2cpu, minutes on one core) were 2 layers x 128 and 4 x 256 with 16 sequences
an update, rates of 3e-3 (better than 6e-3) and 2e-3, and this initialisation, mask rate and schedule, for a vocabulary
of 4,096. What is said of longer runs and larger sizes extrapolates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlbert.config.bert_config import BertConfig

SIZES = {"tiny": (2, 128), "small": (4, 256), "base": (12, 768)}  # layers, hidden size
FLOPS_A_CORE = 40e9  # where no speed was measured: a guess at what one core trains with
MASK_RATE, EVAL_MASK_RATE = 0.30, 0.15
INITIALIZER_RANGE = 0.05
WARMUP, DECAY = 0.02, 0.5  # of the updates
SEQUENCE_LENGTH = 128
HEAD_SIZE = 32

TokensPerSecond = Callable[["SizeShape"], float] | float


@dataclass(frozen=True)
class SizeShape:
    """A model's sizes: ModernBERT's form with global attention, RoPE, gated units and norms before the sublayers."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int

    @property
    def flops_a_token(self) -> float:
        """FLOPs of forward and backward of one token, a share of `MASK_RATE` predicted."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        head = MASK_RATE * (self.hidden**2 + self.hidden * self.vocabulary)
        return 6 * (self.layers * layer + head)


@dataclass(frozen=True)
class Choice:
    """The settings of a run.

    Attributes:
        shape: of the model.
        sequence_length: tokens.
        sequences: in one update's batch.
        learning_rate: of the plateau.
        updates: in the time.
        warmup, decay: updates before and after the plateau.
        mask_rate, eval_mask_rate: share of tokens to predict in training and in evaluation.
        betas, weight_decay, epsilon: of AdamW.
        initializer_range: deviation of the matrices that are drawn.
        epochs: passes over the text.
    """

    shape: SizeShape
    sequence_length: int
    sequences: int
    learning_rate: float
    updates: int
    warmup: int
    decay: int
    mask_rate: float
    eval_mask_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    initializer_range: float
    epochs: float

    def config(self, vocab_size: int) -> BertConfig:
        """The model's shape, with the vocabulary that was made of the text: it may be smaller than was asked for."""
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=self.shape.hidden,
            num_hidden_layers=self.shape.layers,
            num_attention_heads=self.shape.heads,
            intermediate_size=self.shape.intermediate,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=self.initializer_range,
            layer_norm_eps=1e-5,
            position_embedding_type="rotary",
            norm_position="pre",
            gated_mlp=True,
        )


def choose(
    corpus_tokens: int, seconds: float, size: str = "auto", cores: int = 1, tokens_per_second: TokensPerSecond = 0.0
) -> Choice:
    """Settings for a text of so many tokens and a run of so many seconds.

    Args:
        corpus_tokens: of the training text, about; bytes / 4 where they were not counted.
        seconds: of training.
        size: a name of `SIZES`, or "auto": the largest that sees its own number of parameters 10 times in tokens.
        cores: that compute.
        tokens_per_second: measured, a number or a function of the shape; 0: guessed from the cores.
    """
    shapes = {name: _shape(corpus_tokens, *numbers) for name, numbers in SIZES.items()}
    speeds = {name: _speed(shape, cores, tokens_per_second) for name, shape in shapes.items()}
    if size == "auto":
        fitting = [name for name in SIZES if seconds * speeds[name] >= 10 * _parameters(shapes[name])]
        size = fitting[-1] if fitting else "tiny"
    shape = shapes[size]
    tokens = seconds * speeds[size]
    sequences = _sequences(tokens)
    updates = max(1, round(tokens / (sequences * SEQUENCE_LENGTH)))
    return Choice(
        shape=shape,
        sequence_length=SEQUENCE_LENGTH,
        sequences=sequences,
        learning_rate=_learning_rate(shape),
        updates=updates,
        warmup=max(1, round(WARMUP * updates)),
        decay=max(1, round(DECAY * updates)),
        mask_rate=MASK_RATE,
        eval_mask_rate=EVAL_MASK_RATE,
        betas=(0.9, 0.98),
        epsilon=1e-6,
        weight_decay=0.01,
        initializer_range=INITIALIZER_RANGE,
        epochs=tokens / max(1, corpus_tokens),
    )


def _shape(corpus_tokens: int, layers: int, hidden: int) -> SizeShape:
    vocabulary = 4096 if corpus_tokens < 20_000_000 or hidden < 256 else 8192 if hidden < 768 else 16384
    intermediate = 8 * hidden // 3 // 64 * 64  # two thirds of BERT's, as a gated unit has three matrices
    return SizeShape(layers, hidden, hidden // HEAD_SIZE, intermediate, vocabulary)


def _speed(shape: SizeShape, cores: int, measured: TokensPerSecond) -> float:
    if callable(measured):
        return measured(shape)
    return measured or cores * FLOPS_A_CORE / shape.flops_a_token


def _parameters(shape: SizeShape) -> int:
    return shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)


def _sequences(tokens: float) -> int:
    """About 3,000 updates and more: 2,048 tokens an update, and more only for long runs."""
    wanted = tokens / 10_000 / SEQUENCE_LENGTH
    return max(16, min(256, 1 << max(0, round(wanted)).bit_length()))


def _learning_rate(shape: SizeShape) -> float:
    return 3e-3 * (128 / shape.hidden) ** 0.5
