"""Train BERT with the parts of this package in a plain loop:
python plain_loop.py TRAIN_FOLDER EVAL_FOLDER

One process, no launcher, no log: read this before mlbert/training/loop.py, which adds ranks,
graphs, checkpoints and events around the same calls. With the same settings, `mlbert train` has the
same losses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.open import describe
from mlbert.data.formats.order import contiguous
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.pretraining import EvalSet
from mlbert.distributed.sharding import ShardLayout
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.optim.schedules import Polynomial

STEPS = 200
WARMUP_STEPS = 20
LEARNING_RATE = 0.01
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.98)
EPSILON = 1e-6
MAX_GRAD_NORM = 1.0
PACKS_PER_STEP = 4
MICRO_BATCHES = 2  # a step's packs are split into these
SEQUENCES_PER_PACK = 3  # at most
EVAL_PACKS = 16  # per batch
EVAL_SEQUENCES = 32


def train(
    train_folder: Path, eval_folder: Path, shape: BertConfig, steps: int = STEPS, seed: int = 1
) -> tuple[list[float], float]:
    """Train from random weights.

    Args:
        train_folder, eval_folder: prepared sets (`mlbert prepare instances`).
        shape: of the model.
        steps: number of updates.
        seed: of the weights, the order of the data and the dropout masks.

    Returns:
        The loss of each step, and the accuracy of the masked tokens of the evaluation set.
    """
    # The data: a source returns the micro-batches of one step after the other,
    # an endless shuffled stream.
    source = PackedSource(
        train_folder,
        packs_per_step=PACKS_PER_STEP,
        accumulation=MICRO_BATCHES,
        max_sequences_per_pack=SEQUENCES_PER_PACK,
        seed=seed,
        partition=contiguous,
    )
    source.open()

    # The model, and what to minimize: the losses of masked tokens and of the next sentence.
    model = BertForPreTraining(shape, torch.float32)
    model.initialize(seed)
    objective = PreTraining(scope="step")

    # All parameters become views of one long buffer, and their gradients of another.
    flat = FlatParameters(model.ordered_parameters())
    optimizer = Lamb(
        flat,
        ShardLayout.whole(flat.numel),
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )
    schedule = Polynomial(
        base_lr=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        max_steps=steps,
        decay_end=steps,
        power=1.0,
    )

    losses = []
    for step in range(steps):
        batches = source.next_step()
        # Divide by the counts of the full step, so
        # that the loss does not depend on the micro-batches.
        counts = [objective.counts(batch) for batch in batches]
        totals = [sum(column) for column in zip(*counts, strict=True)]
        divisors = [torch.tensor(divisor) for divisor in objective.divisors(totals)]
        # A counter-based generator draws the dropout masks: these keys select them.
        keys = model.dropout_keys(seed, step).tolist()

        flat.zero_grad()
        step_loss = 0.0
        for batch in batches:
            loss = objective.loss(model, batch.to(torch.device("cpu")), keys, divisors)
            loss.backward()
            step_loss += float(loss.detach())
        optimizer.step(schedule(step))
        model.weights_changed()
        losses.append(step_loss)

    return losses, evaluate(model, objective, eval_folder)


def evaluate(model: BertForPreTraining, objective: PreTraining, folder: Path) -> float:
    """Return the share of masked tokens whose most probable token is right."""
    samples = EvalSet(folder, EVAL_SEQUENCES, EVAL_PACKS, max_sequences_per_pack=SEQUENCES_PER_PACK)
    samples.open()
    totals = torch.zeros(len(objective.sum_names), dtype=torch.float64)
    with torch.no_grad():
        for batch in samples:
            totals += objective.sums(model, batch.to(torch.device("cpu")))
    return objective.metrics(totals.tolist(), None)[objective.metric]


def main() -> None:
    """Train a small model on the folders named on the command line."""
    train_folder = Path(sys.argv[1])
    eval_folder = Path(sys.argv[2])
    vocab_size = describe(train_folder).vocab_size
    assert vocab_size is not None, "the set does not record its vocabulary"
    shape = BertConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=describe(train_folder).max_seq_length,
    )
    losses, accuracy = train(train_folder, eval_folder, shape)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, masked-token accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
