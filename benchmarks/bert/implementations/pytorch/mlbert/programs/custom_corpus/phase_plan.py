"""Plan one phase of pre-training: rates, batch and durations in tokens from a published recipe.

    stage1    short rows, warm-up, then a constant rate
    extend    long rows, a larger rotary base, a lower constant rate
    decay     1 - sqrt from the rate of the phase before to 0

Durations count tokens without padding. A constant phase can be made longer afterwards; a decay
branches off any checkpoint of one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlbert.config import presets
from mlbert.config.bert_config import BertConfig
from mlbert.config.presets import Preset
from mlbert.config.resolution import Resolved
from mlbert.host.errors import UserError
from mlbert.programs.custom_corpus.corpus_plan import BYTES_A_TOKEN, resolve_on_text
from mlbert.programs.custom_corpus.own_folder import OwnFolder
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE

STAGE1 = "stage1"
EXTEND = "extend"
DECAY = "decay"
PHASES = (STAGE1, EXTEND, DECAY)
# Each phase reads the text in another order.
ORDER_SEEDS = {STAGE1: 1, EXTEND: 2, DECAY: 3}
# Most of a phase's tokens for the warm-up of the rate, and for the growth of the batch.
MOST_WARMUP = 0.1
CPU_MICRO_TOKENS = 8192  # tokens that a processor computes at a time
# Sequences in a row, on average over a micro-batch: shorter ones leave space.
LEAST_TOKENS = 32  # of a sequence
SEQUENCES_IN_ROW = 32  # at least so many fit
MOST_SEQUENCES_IN_ROW = 512
EVALUATIONS = 8  # of a phase
SAVES = 50  # checkpoints of a phase, of which the newest are kept
LOG_STEPS = 10  # between metric lines, at most
# Text in tokens, and the entries of a new vocabulary up to it.
VOCABULARIES = ((20_000_000, 4096), (200_000_000, 16384))


@dataclass(frozen=True)
class PhasePlan:
    """Decisions of the first call of a phase.

    Attributes:
        preset: name of the published model.
        phase: one of `PHASES`.
        length: tokens of a row.
        rows: of a full step.
        warmup_tokens: over which the rate rises.
        growth_tokens: over which the batch grows from ``first_rows``.
        learning_rate: of the constant phase, and before the decay.
        vocab_size: most entries of a new vocabulary.
        shape: values of bert_config.json; vocab_size is later set to the tokenizer's.
        parent: checkpoint or model that the phase starts from; None: random weights.
        with_optimizer: start with the optimizer state of the parent.
    """

    preset: str
    phase: str
    length: int
    rows: int
    first_rows: int
    warmup_tokens: int
    growth_tokens: int
    learning_rate: float
    vocab_size: int
    shape: Mapping[str, Any]
    parent: str | None
    with_optimizer: bool

    @property
    def step_tokens(self) -> int:
        """Tokens of a full step."""
        return self.rows * self.length

    def steps(self, tokens: int) -> int:
        """Return the full steps that take at least this many tokens."""
        return max(1, math.ceil(tokens / self.step_tokens))

    @property
    def has_growth(self) -> bool:
        """True if the batch grows."""
        return self.growth_tokens > 0 and self.first_rows < self.rows


@dataclass(frozen=True)
class PhaseRequest:
    """What the user asks for, of a phase.

    Attributes:
        preset: None: that of the phase before.
        phase: one of `PHASES`.
        tokens: length of the phase in tokens without padding.
        length: tokens of a row; None: the phase's.
        rows: of a step; None: as many as have the tokens of a step of the phase before, or of the
            published one.
        warmup_tokens: None: the published ones, at most `MOST_WARMUP` of ``tokens``.
    """

    preset: str | None
    phase: str
    tokens: int
    length: int | None
    rows: int | None
    warmup_tokens: int | None


@dataclass(frozen=True)
class Parent:
    """What a phase starts from.

    Attributes:
        start: checkpoint or model.
        shape: of the model.
        plan: of the phase before; None if the model is not one of this command's.
    """

    start: str
    shape: BertConfig
    plan: PhasePlan | None


def plan_phase(request: PhaseRequest, num_bytes: int, parent: Parent | None) -> PhasePlan:
    """Choose the settings of a phase for a text of ``num_bytes``.

    Raises UserError if the phase needs a preset, or weights to start from, or if these do not have
    as many positions as a row.
    """
    before = None if parent is None else parent.plan
    name = request.preset or (before.preset if before else None)
    if name is None:
        reason = "needs the recipe of a published model"
        raise UserError("config.missing", "--tokens", reason, "Give --preset modernbert-base")
    preset = presets.find(name, "--preset")
    if parent is None and request.phase != STAGE1:
        reason = "needs a model to start from"
        remedy = "Give the previous phase's folder with --from"
        raise UserError("config.missing", f"--phase {request.phase}", reason, remedy)
    length = _length(request, before)
    if parent is not None:
        _check_positions(length, parent)
    step_tokens = before.step_tokens if before else preset.step_tokens
    rows = request.rows or max(1, step_tokens // length)
    is_first = request.phase == STAGE1
    most = int(MOST_WARMUP * request.tokens)
    warmup = request.warmup_tokens
    if warmup is None:
        warmup = min(preset.warmup_tokens, most) if is_first else 0
    first_rows = max(1, rows * preset.first_rows // preset.rows) if is_first else rows
    vocab_size = _vocab_size(preset, num_bytes)
    return PhasePlan(
        preset=name,
        phase=request.phase,
        length=length,
        rows=rows,
        first_rows=first_rows,
        warmup_tokens=warmup,
        growth_tokens=min(preset.growth_tokens, most) if is_first else 0,
        learning_rate=_learning_rate(preset, request.phase, before),
        vocab_size=vocab_size,
        shape=json.loads(_shape(preset, request.phase, parent, vocab_size).to_json()),
        parent=None if parent is None else parent.start,
        with_optimizer=before is not None,
    )


def _length(request: PhaseRequest, before: PhasePlan | None) -> int:
    if request.length is not None:
        return request.length
    if request.phase == DECAY and before is not None:
        return before.length
    return presets.ROW_TOKENS if request.phase == STAGE1 else presets.EXTENDED_TOKENS


def _check_positions(length: int, parent: Parent) -> None:
    positions = parent.shape.max_position_embeddings
    if parent.shape.position_embedding_type == "absolute" and length > positions:
        reason = f"is more than the {positions} positions of {parent.start}"
        remedy = f"Give --length {positions} or less"
        raise UserError("config.conflict", f"--length {length}", reason, remedy)


def _learning_rate(preset: Preset, phase: str, before: PhasePlan | None) -> float:
    if phase == STAGE1:
        return preset.learning_rate
    if phase == DECAY and before is not None:
        return before.learning_rate
    return preset.extend_rate


def _shape(preset: Preset, phase: str, parent: Parent | None, vocab_size: int) -> BertConfig:
    if parent is None:
        return replace(preset.shape, vocab_size=vocab_size, rope_theta=presets.SHORT_ROPE_THETA)
    if phase == EXTEND and parent.shape.is_rotary:
        theta = max(parent.shape.rope_theta, presets.LONG_ROPE_THETA)
        return replace(parent.shape, rope_theta=theta)
    return parent.shape


def _vocab_size(preset: Preset, num_bytes: int) -> int:
    tokens = num_bytes // BYTES_A_TOKEN
    fitting = next((size for most, size in VOCABULARIES if tokens < most), preset.shape.vocab_size)
    return min(fitting, preset.shape.vocab_size)


def check_ranks(plan: PhasePlan, ranks: int) -> None:
    """Raise UserError unless the rows of a step are as many on each rank."""
    if plan.rows % ranks == 0:
        return
    fitting = max(ranks, plan.rows // ranks * ranks)
    reason = (
        f"is not a multiple of {ranks}: each of the {ranks} ranks takes an equal share of the rows"
    )
    remedy = f"Give --batch {fitting}, or start another number of ranks"
    raise UserError("config.conflict", f"--batch {plan.rows}", reason, remedy)


def resolve_phase(
    folder: OwnFolder,
    plan: PhasePlan,
    tokens: int,
    sequences: int,
    resume: bool,
    ranks: int,
    data: Mapping[str, Any],
) -> Resolved:
    """Return the checked configuration of a phase on prepared text.

    Args:
        folder: of the phase.
        plan: of its first call.
        tokens: total length of the phase, including earlier calls.
        sequences: size of the training set.
        resume: resume from the newest checkpoint of the phase, in place of the parent's.
        ranks: that train together, and share the rows of each step.
        data: settings of data that is not the folder's prepared text.

    Raises UserError if the text has fewer sequences than a step.
    """
    if sequences < plan.rows:
        reason = f"has {sequences} sequences of {plan.length} tokens, and a step has {plan.rows}"
        remedy = f"Give more text, or --batch {sequences} or less and another --out"
        raise UserError("data.too-small", "the text", reason, remedy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = presets.find(plan.preset, "--preset")
    steps = plan.steps(tokens)
    check_ranks(plan, ranks)
    rows = plan.rows // ranks
    is_first_call = not resume
    values: dict[str, Any] = {
        "precision": "auto",
        "init_checkpoint": plan.parent if is_first_call else None,
        "init_optimizer": plan.parent if is_first_call and plan.with_optimizer else None,
        "extend_context": plan.phase == EXTEND,
        "max_seq_length": plan.length,
        "max_sequences_per_pack": _sequences_in_row(plan.length),
        "train_batch_size": rows,
        "gradient_accumulation_steps": _parts(rows, plan.length, preset, device),
        "auto_micro_batch": device.type == "cuda",
        "masking_rate": presets.MASKING_RATE,
        "eval_masking_rate": EVAL_MASK_RATE,
        "shuffle_seed": ORDER_SEEDS[plan.phase],
        "seed": ORDER_SEEDS[plan.phase],
        "optimizer": presets.OPTIMIZER,
        "learning_rate": plan.learning_rate,
        "opt_lamb_beta_1": presets.BETAS[0],
        "opt_lamb_beta_2": presets.BETAS[1],
        "opt_epsilon": presets.EPSILON,
        "weight_decay_rate": preset.weight_decay,
        "decay_all": False,
        "max_grad_norm": None,
        "step_tokens": plan.step_tokens,
        "max_steps": steps,
        "warmup_steps": round(plan.warmup_tokens / plan.step_tokens),
        "lr_first_step": 0,
        "schedule": "constant",
        "eval_iter_steps": max(1, steps // EVALUATIONS),
        "eval_batch_size": max(1, CPU_MICRO_TOKENS // plan.length),
        "save_checkpoint_steps": max(1, steps // SAVES),
        "log_freq": min(LOG_STEPS, max(1, steps // 100)),
    }
    if plan.phase == DECAY:
        values |= {"schedule": "wsd_sqrt", "lr_decay_steps": steps, "end_lr": 0.0}
    if plan.has_growth:
        values["batchsize_warmup_start"] = max(1, plan.first_rows // ranks)
        values["batchsize_warmup_steps"] = plan.steps(plan.growth_tokens)
    return resolve_on_text(folder, {**values, **data}, resume)


def _sequences_in_row(length: int) -> int:
    return min(max(SEQUENCES_IN_ROW, length // LEAST_TOKENS), MOST_SEQUENCES_IN_ROW)


def easier_batch(plan: PhasePlan, ranks: int) -> int | None:
    """Return a smaller batch that is divided into fuller micro-batches; None if the plan's are full
    enough. A prime number of rows has micro-batches of one row.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = presets.find(plan.preset, "--preset")
    rows = plan.rows // ranks
    fewest = _fewest_parts(rows, plan.length, preset, device)
    if _parts(rows, plan.length, preset, device) < 2 * fewest:
        return None
    return ranks * fewest * (rows // fewest)


def _fewest_parts(rows: int, length: int, preset: Preset, device: torch.device) -> int:
    """Return how many micro-batches that fit the device a rank's rows need."""
    most = CPU_MICRO_TOKENS
    if device.type == "cuda":
        most = preset.micro_rows * presets.ROW_TOKENS
    return max(1, math.ceil(rows * length / max(most, length)))


def _parts(rows: int, length: int, preset: Preset, device: torch.device) -> int:
    """Return into how many micro-batches a rank's rows are divided: equal ones that fit the
    device.
    """
    parts = _fewest_parts(rows, length, preset, device)
    while rows % parts:
        parts += 1
    return parts
