"""Rules that turn text size, training time and machine into settings for a masked-LM model on custom text.

Pure arithmetic. A run gets as many tokens as fit its time. Model shape and vocabulary follow from the text and that
number; batch, learning rate and schedule follow from the shape and the number of updates. Precision depends on the
processor: see `mlbert.ops.precision.small_model_precision`. For weight initialization see `mlbert.models.bert`.

Measured (records/2026-11-22_pretrain_epyc-2cpu, minutes on one core): 2 layers x 128 and 4 x 256 with 16 sequences per
update, learning rates of 3e-3 (better than 6e-3) and 2e-3, and this initialization, mask rate and schedule, for a
vocabulary of 4,096. Longer runs and larger sizes are extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlbert.config.bert_config import BertConfig

SIZES = {"tiny": (2, 128), "small": (4, 256), "base": (12, 768)}  # layers, hidden size
FLOPS_A_CORE = 40e9  # if no speed was measured: a guess for training on one core
MASK_RATE, EVAL_MASK_RATE = 0.30, 0.15
INITIALIZER_RANGE = 0.05
WARMUP, DECAY = 0.02, 0.5  # fractions of the updates
SEQUENCE_LENGTH = 128
HEAD_SIZE = 32

TokensPerSecond = Callable[["SizeShape"], float] | float


@dataclass(frozen=True)
class SizeShape:
    """Model dimensions: ModernBERT with global attention, RoPE, a gated MLP and pre-LayerNorm."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int

    @property
    def flops_a_token(self) -> float:
        """Forward and backward FLOPs per token, with a fraction `MASK_RATE` of the tokens predicted."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        head = MASK_RATE * (self.hidden**2 + self.hidden * self.vocabulary)
        return 6 * (self.layers * layer + head)


@dataclass(frozen=True)
class Choice:
    """The settings of a run.

    Attributes:
            shape: model dimensions.
        sequence_length: tokens.
            sequences: sequences per update.
            learning_rate: learning rate of the plateau.
            updates: updates that fit in the time.
        warmup, decay: updates before and after the plateau.
            mask_rate, eval_mask_rate: fraction of tokens to predict in training and in evaluation.
            betas, weight_decay, epsilon: AdamW's parameters.
            initializer_range: standard deviation of randomly initialized matrices.
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
        """Return the model's config with the vocabulary's actual size, which can be smaller than requested."""
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
    """Choose settings for a text and a training time.

    Args:
            corpus_tokens: approximate tokens of the training text; bytes / 4 if not counted.
            seconds: training time.
            size: a name in `SIZES`, or "auto": the largest model that sees 10 tokens per parameter.
            cores: cores used for training.
            tokens_per_second: measured speed, a number or a function of the shape; 0 estimates it from the cores.
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
    intermediate = 8 * hidden // 3 // 64 * 64  # two thirds of BERT's, because a gated MLP has three matrices
    return SizeShape(layers, hidden, hidden // HEAD_SIZE, intermediate, vocabulary)


def _speed(shape: SizeShape, cores: int, measured: TokensPerSecond) -> float:
    if callable(measured):
        return measured(shape)
    return measured or cores * FLOPS_A_CORE / shape.flops_a_token


def _parameters(shape: SizeShape) -> int:
    return shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)


def _sequences(tokens: float) -> int:
    """Return the sequences per update: 2,048 tokens per update, and more only in long runs (over 3,000 updates)."""
    target = tokens / 10_000 / SEQUENCE_LENGTH
    return max(16, min(256, 1 << max(0, round(target)).bit_length()))


def _learning_rate(shape: SizeShape) -> float:
    return 3e-3 * (128 / shape.hidden) ** 0.5
