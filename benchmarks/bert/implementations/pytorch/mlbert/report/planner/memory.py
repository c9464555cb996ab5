"""Memory of one GPU, and how many sequences fit.

What the program keeps: master weights and two moments of 4 bytes each, working weights of 2 (in 16 bits, or in FP8 as
they are and transposed), a gradient of 4; activations, dropout masks included, in proportion to tokens, layers and
hidden size; logits of masked tokens with their gradient. A graph keeps the same in a pool of its own, in place of the
ordinary one. A test compares the sum with what is counted over a whole step (`mlbert.programs.bench.counted`): within 3
%.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlbert.config.bert_config import BertConfig
from mlbert.report.planner.parameters import GPUS
from mlbert.report.planner.shapes import BENCHMARK

# A token, layer and hidden unit, counted: with 16-bit products, and with FP8 ones.
ACTIVATION_BYTES, FP8_ACTIVATION_BYTES = 32.7, 28.6
WEIGHT_BYTES = 2
LOGIT_BYTES = 2 + 4  # a masked token and word: 16-bit logits, float32 for the loss
CONTEXT_GB = 3.0  # assumed: CUDA, libraries, buffers of the reduction, an evaluation's graph
USABLE = 0.92  # assumed: of the memory, the rest is lost between blocks


@dataclass(frozen=True)
class Memory:
    """In 10^9 bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    context: float
    most_sequences: int  # of one micro-batch; 0 where not even the weights fit

    @property
    def total(self) -> float:
        """Of one micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.context


def of(config: BertConfig, gpu: str, sequences: float, sharers: int, *, fp8: bool) -> Memory:
    """Memory of one GPU with micro-batches of ``sequences``, where ``sharers`` GPUs share the optimizer's state."""
    billion = config.num_parameters / 1e9
    tokens, masked = BENCHMARK.tokens / BENCHMARK.sequences, BENCHMARK.masked / BENCHMARK.sequences
    activation_bytes = FP8_ACTIVATION_BYTES if fp8 else ACTIVATION_BYTES
    of_layers = activation_bytes * config.hidden_size * config.num_hidden_layers * tokens
    each = (of_layers + LOGIT_BYTES * config.padded_vocab_size * masked) / 1e9
    weights, gradients, optimizer = WEIGHT_BYTES * billion, 4 * billion, 12 * billion / sharers
    free = USABLE * GPUS[gpu].memory_gb - (weights + gradients + optimizer + CONTEXT_GB)
    return Memory(weights, gradients, optimizer, each * sequences, CONTEXT_GB, max(0, int(free / each)))
