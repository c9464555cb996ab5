"""The two sides of a race: train for a given time and report the held-out accuracy along the way.

Time is the CPU time of the side's process, which uses one thread. On a dedicated core it equals
wall time; on a busy machine other load does not count. Evaluation is not timed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mlbert.config import presets
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.ragged import Ragged
from mlbert.distributed.reduce import GradientReducer
from mlbert.distributed.sharding import ShardLayout
from mlbert.distributed.world import World
from mlbert.models.bert import BertForMaskedLM, begin_with_frequencies
from mlbert.models.objectives import MaskedLM
from mlbert.optim.config import OPTIMIZERS
from mlbert.optim.flat import FlatParameters
from mlbert.programs.pretrain_rules import (
    BETAS,
    EPSILON,
    HEAD_SIZE,
    MASK_RATE,
    SEQUENCE_LENGTH,
    WEIGHT_DECAY,
    Choice,
    SizeShape,
)
from mlbert.training.step import Step as TrainingStep
from race_text import RaceText, host_batch

EVALUATIONS = 10  # per run
# Mask rates of the models' papers, by class of transformers.
THEIR_MASK_RATES = {
    "bert": 0.15,
    "modernbert": 0.30,
}
THEIR_WARMUP = 0.06  # of the time
THEIR_ROWS = 16
# Models of the rules' layers and hidden size.
OWN_FORM = "mlbert"
LOCAL_FORM = "local"
MODERN_FORM = "modern"
OUR_FORMS = (OWN_FORM, LOCAL_FORM, MODERN_FORM)
# Shares of the time in which a preset's rate rises and falls.
PRESET_WARMUP = 0.1
PRESET_DECAY = 0.2
_MIN_RATE = 1e-9  # so that no update has rate 0

Point = dict[str, float]
Step = Callable[[float], float]  # trains one update at this fraction of the time; returns the loss


def race(step: Step, accuracy: Callable[[], float], seconds: float) -> Iterator[Point]:
    """Train for this many seconds of CPU time, and yield the points of the curve."""
    used = 0.0
    updates = 0
    next_point = seconds / EVALUATIONS
    started = time.monotonic()
    while used < seconds:
        before = time.process_time()
        loss = step(used / seconds)
        used += time.process_time() - before
        updates += 1
        if used >= min(next_point, seconds):
            next_point += seconds / EVALUATIONS
            yield {
                "seconds": round(used, 2),
                "wall": round(time.monotonic() - started, 2),
                "updates": updates,
                "loss": round(loss, 4),
                "accuracy": round(accuracy(), 5),
            }


def theirs(
    text: RaceText, kind: str, shape: SizeShape, rate: float, seed: int, dtype: torch.dtype
) -> tuple[Step, Callable[[], float]]:
    """Return the step and the evaluation of a model of `THEIR_MASK_RATES` in `transformers`,
    as an expert would write.

    It uses SDPA on full rows, logits of masked tokens only, dynamic masking, no dropout, fused
    AdamW with linear warm-up and decay over the time, gradients clipped to 1, and autocast if
    ``dtype`` is bfloat16. `torch.compile` made a step at most 2 % faster
    (records/2026-11-26_expert-step_epyc-2cpu), so it is not used.
    """
    torch.manual_seed(seed)
    model, encoder, head = _their_model(kind, shape, len(text.unigrams))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-6, fused=True)
    batches = text.batches(THEIR_ROWS, THEIR_MASK_RATES[kind], seed)

    def logits(rows: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(rows.tokens.astype(np.int64)).view(len(rows), -1)
        starts = np.repeat(rows.offsets[:-1], np.diff(rows.masked_offsets))
        where = torch.from_numpy(starts + rows.masked_positions)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = head(encoder(input_ids=ids).last_hidden_state.flatten(0, 1)[where])
        return found.float(), torch.from_numpy(rows.masked_labels.astype(np.int64))

    def step(share: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(share / THEIR_WARMUP, (1 - share) / (1 - THEIR_WARMUP))
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(*logits(next(batches)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def accuracy() -> float:
        found = [(a.argmax(-1) == b).float() for a, b in map(logits, text.evaluation())]
        return float(torch.cat(found).mean())

    return step, accuracy


def _their_model(
    kind: str, shape: SizeShape, vocabulary: int
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return a model with random weights, its encoder,
    and its head from hidden states to logits.
    """
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "attn_implementation": "sdpa",
    }
    if kind == "bert":
        bert = transformers.BertForMaskedLM(
            transformers.BertConfig(
                **sizes,
                num_attention_heads=max(2, shape.hidden // 64),
                intermediate_size=4 * shape.hidden,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        return bert, bert.bert, bert.cls
    modern = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **sizes,
            num_attention_heads=shape.hidden // HEAD_SIZE,
            intermediate_size=shape.intermediate,
            layer_types=["full_attention"] * shape.layers,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            cls_token_id=0,
            sep_token_id=0,
        )
    )
    return modern, modern.model, nn.Sequential(modern.head, modern.decoder)


@dataclass(frozen=True)
class Recipe:
    """How a model of ours trains.

    Attributes:
        config: the model.
        optimizer: name in `OPTIMIZERS`.
        learning_rate: highest rate.
        weight_decay: times the rate, per update.
        max_grad_norm: None does not clip.
        rows: of an update.
        factor: share of the time -> factor on the rate.
    """

    config: BertConfig
    optimizer: str
    learning_rate: float
    weight_decay: float
    max_grad_norm: float | None
    rows: int
    factor: Callable[[float], float]


def of_rules(choice: Choice, vocabulary: int, form: str = OWN_FORM) -> Recipe:
    """Return the recipe of the rules' settings with a schedule over the time.

    Args:
        choice: from the rules.
        vocabulary: entries.
        form: `OWN_FORM` is the rules' model; the others are of the same layers and hidden size:
            `LOCAL_FORM` has ModernBERT's local attention in two of three layers, `MODERN_FORM` is
            ModernBERT in all.
    """
    shape = choice.shape
    config = shape.config(vocabulary)
    published = presets.find("modernbert-base", "--preset").shape
    if form == LOCAL_FORM:
        config = replace(
            config,
            local_attention=published.local_attention,
            global_attn_every_n_layers=published.global_attn_every_n_layers,
        )
    if form == MODERN_FORM:
        config = replace(
            published,
            vocab_size=vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // published.head_size,
            intermediate_size=shape.intermediate,
            rope_theta=presets.SHORT_ROPE_THETA,
        )
    warmup = choice.warmup / choice.updates
    decay = choice.decay / choice.updates
    return Recipe(
        config,
        choice.optimizer,
        choice.learning_rate,
        WEIGHT_DECAY,
        1.0,
        choice.sequences,
        lambda share: min(1.0, share / warmup, (1 - share) / decay),
    )


def of_preset(name: str, vocabulary: int, rate: float, rows: int) -> Recipe:
    """Return the recipe of a preset: its first phase, and in the last fifth of the time its decay
    phase.
    """
    preset = presets.find(name, "--preset")
    config = replace(preset.shape, vocab_size=vocabulary, rope_theta=presets.SHORT_ROPE_THETA)

    def factor(share: float) -> float:
        if share < 1 - PRESET_DECAY:
            return min(1.0, share / PRESET_WARMUP)
        return 1 - math.sqrt((share - 1 + PRESET_DECAY) / PRESET_DECAY)

    return Recipe(config, "stableadamw", rate, preset.weight_decay / rate, None, rows, factor)


def ours(
    text: RaceText, recipe: Recipe, seed: int, dtype: torch.dtype
) -> tuple[Step, Callable[[], float]]:
    """Return the step and the evaluation of our model."""
    model = BertForMaskedLM(recipe.config, dtype)
    model.initialize(seed)
    if recipe.config.starts_from_text:
        begin_with_frequencies(model, text.unigrams)
    flat = FlatParameters(model.ordered_parameters())
    numbers: dict[str, Any] = {"betas": BETAS, "eps": EPSILON, "weight_decay": recipe.weight_decay}
    update_rule = OPTIMIZERS.load(recipe.optimizer)
    optimizer = update_rule(
        flat, ShardLayout.whole(flat.numel), max_grad_norm=recipe.max_grad_norm, **numbers
    )
    reducer = GradientReducer(flat.parameters, flat.grad, flat.offsets, World(), [], None)
    objective = MaskedLM("step")
    update = TrainingStep(
        model, objective, flat, reducer, optimizer, over_ranks=lambda amax: amax, say=print
    )
    batches = text.batches(recipe.rows, MASK_RATE, seed)
    steps = itertools.count()

    def step(share: float) -> float:
        rate = recipe.learning_rate * recipe.factor(share)
        batch = host_batch(next(batches))
        divisors = objective.divisors(objective.counts(batch))
        return float(update([batch], seed, next(steps), divisors, max(rate, _MIN_RATE)).loss_sum)

    @torch.no_grad()
    def accuracy() -> float:
        sums = torch.stack(
            [objective.sums(model, host_batch(rows).to("cpu")) for rows in text.evaluation()]
        ).sum(0)
        return float(sums[0] / sums[2])

    return step, accuracy
