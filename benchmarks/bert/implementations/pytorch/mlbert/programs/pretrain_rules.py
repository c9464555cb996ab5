"""Rules that turn text size, training time and machine into settings for a masked-LM model on
custom text.

Pure arithmetic. A run gets as many tokens as fit its time. Model shape and vocabulary follow from
the text and that number; batch, learning rate and schedule follow from the shape and the number of
updates. Precision is timed before the run: see `mlbert.recipes.auto_precision`. For weight
initialization see `mlbert.models.bert`.

Measured (records/2026-11-22_pretrain_epyc-2cpu, 2026-11-24_muon_epyc-2cpu and
2026-11-26_race_epyc-2cpu, minutes on one core): 2 layers x 128, 4 x 256 and 6 x 384 with 16
sequences per update, the learning rates of both optimizers, and this initialization, mask rate and
schedule, for a vocabulary of 4,096. Longer runs and larger sizes are extrapolated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError

# layers, hidden size.
SIZES = {"tiny": (2, 128), "small": (4, 256), "medium": (6, 384), "base": (12, 768)}
FLOPS_A_CORE = 40e9  # if no speed was measured: a guess for training on one core
MASK_RATE = 0.30  # fraction of tokens to predict in training
EVAL_MASK_RATE = 0.15  # fraction of tokens to predict in evaluation
# At a hidden size of 128; power of 128 / size.
LEARNING_RATES = {"muon": (1e-2, 1.0), "stableadamw": (3e-3, 0.5)}
BETAS = (0.9, 0.98)
EPSILON = 1e-6
WEIGHT_DECAY = 0.01
INITIALIZER_RANGE = 0.05  # standard deviation of randomly initialized matrices
WARMUP = 0.02  # fraction of the updates
DECAY = 0.5  # fraction of the updates
SEQUENCE_LENGTH = 128  # tokens
LEAST_SEQUENCES = 16  # per update
LEAST_UPDATES = 30  # of a size that the user chooses
HEAD_SIZE = 32


@dataclass(frozen=True)
class SizeShape:
    """Model dimensions: ModernBERT with global attention, RoPE, a gated MLP and pre-LayerNorm."""

    layers: int
    hidden: int
    vocabulary: int

    @property
    def intermediate(self) -> int:
        """Inner size of the MLP: two thirds of BERT's, because a gated MLP has three matrices."""
        return 8 * self.hidden // 3 // 64 * 64

    @property
    def parameters(self) -> int:
        """Parameters of the layers' matrices."""
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate)

    @property
    def flops_a_token(self) -> float:
        """Forward and backward FLOPs per token, with a fraction `MASK_RATE` of the tokens
        predicted.
        """
        return 6 * (self.parameters + MASK_RATE * (self.hidden**2 + self.hidden * self.vocabulary))

    def config(self, vocab_size: int) -> BertConfig:
        """Return the model's config with the vocabulary's actual size,
        which can be smaller than requested.
        """
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // HEAD_SIZE,
            intermediate_size=self.intermediate,
            max_position_embeddings=SEQUENCE_LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=INITIALIZER_RANGE,
            layer_norm_eps=1e-5,
            position_embedding_type="rotary",
            norm_position="pre",
            gated_mlp=True,
        )


@dataclass(frozen=True)
class Choice:
    """The settings of a run that depend on its text, time and machine.

    Attributes:
        shape: model dimensions.
        sequences: sequences per update.
        optimizer: Muon where its products at most double the work, else StableAdamW.
        learning_rate: learning rate of the plateau.
        updates: updates that fit in the time.
        warmup, decay: updates before and after the plateau.
    """

    shape: SizeShape
    sequences: int
    optimizer: str
    learning_rate: float
    updates: int
    warmup: int
    decay: int


def choose(
    corpus_tokens: int, seconds: float, size: str = "auto", flops_per_second: float = FLOPS_A_CORE
) -> Choice:
    """Choose settings for a text and a training time.

    Args:
        corpus_tokens: approximate tokens of the training text; bytes / 4 if not counted.
        seconds: training time.
        size: a name in `SIZES`, or "auto": the largest model that sees 10 tokens per parameter.
        flops_per_second: speed of training.

    Raises UserError: the time is too short for the size.
    """
    shapes = {name: _shape(corpus_tokens, *numbers) for name, numbers in SIZES.items()}
    tokens = {
        name: seconds * (flops_per_second / shape.flops_a_token) for name, shape in shapes.items()
    }
    needed = LEAST_UPDATES * LEAST_SEQUENCES * SEQUENCE_LENGTH
    if size not in ("auto", "tiny") and tokens[size] < needed:
        fitting = next(name for name in reversed(SIZES) if tokens[name] >= needed or name == "tiny")
        reason = f"cannot do {LEAST_UPDATES} steps in this time on this machine"
        remedy = (
            f"Use --size {fitting}, or --minutes {math.ceil(seconds * needed / tokens[size] / 60)}"
        )
        raise UserError("config.range", f"--size {size}", reason, remedy)
    if size == "auto":
        size = next(
            (name for name in reversed(SIZES) if tokens[name] >= 10 * shapes[name].parameters),
            "tiny",
        )
    # 2,048 tokens per update, and more only in long runs (over 3,000 updates).
    target = tokens[size] / 10_000 / SEQUENCE_LENGTH
    sequences = max(LEAST_SEQUENCES, min(256, 1 << max(0, round(target)).bit_length()))
    # Muon's products cost about 5 x hidden / (tokens per update) of the training's own.
    # At 0.94 of it Muon wins.
    optimizer = "muon" if 5 * shapes[size].hidden <= sequences * SEQUENCE_LENGTH else "stableadamw"
    updates = max(1, round(tokens[size] / (sequences * SEQUENCE_LENGTH)))
    return Choice(
        shape=shapes[size],
        sequences=sequences,
        optimizer=optimizer,
        learning_rate=learning_rate(optimizer, shapes[size].hidden),
        updates=updates,
        warmup=max(1, round(WARMUP * updates)),
        decay=max(1, round(DECAY * updates)),
    )


def learning_rate(optimizer: str, hidden: int) -> float:
    """Return the plateau's learning rate of an optimizer of `LEARNING_RATES` for a hidden size."""
    rate, power = LEARNING_RATES[optimizer]
    return rate * (128 / hidden) ** power


def _shape(corpus_tokens: int, layers: int, hidden: int) -> SizeShape:
    vocabulary = (
        4096 if corpus_tokens < 20_000_000 or hidden < 256 else 8192 if hidden < 768 else 16384
    )
    return SizeShape(layers, hidden, vocabulary)
