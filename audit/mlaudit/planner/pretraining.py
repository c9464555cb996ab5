"""Estimate the pre-training of a published model on a number of tokens: ``mlbert plan --recipe``.

    rate   = published tokens/s of one H100 x (time of a sequence on an H100 / on the GPU)
             x (FLOPs of a token at 1,024 tokens / at this length)
    time   = steps x (tokens of a step / rate of all GPUs + exposed network time)

The times of a sequence are those of the fit to MLPerf's results (`timing`), with 16-bit products.
A recipe without a published rate has that of the closest one by FLOPs of a token, scaled by them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from mlaudit.planner import timing
from mlaudit.planner.cost import JOULES_A_KWH, Prices
from mlaudit.planner.gpus import GPUS
from mlaudit.planner.request import band, duration
from mlaudit.planner.timing import WITHOUT_FP8, Parameters, TrainingJob
from mlaudit.report.tables import ReportTable
from mlbert.config import presets
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BACKWARD_FACTOR, BatchWork, masked_lm
from mlbert.config.presets import MASKING_RATE, ROW_TOKENS, Preset

PUBLISHED_ON = "h100-sxm"
BYTES_A_TOKEN = 4  # of text, approximately
SHORT_ID_BYTES = 2  # a prepared token, if the vocabulary has at most `MOST_SHORT` entries
LONG_ID_BYTES = 4
MOST_SHORT = 65_536
CHECKPOINT_BYTES = 12  # a parameter: float32 weight and two moments
KEPT_CHECKPOINTS = 3  # the two newest, and that of the phase's end
WEIGHT_FILES = 2  # of the finished model, in float32


@dataclass(frozen=True)
class PretrainingEstimate:
    """Estimate of one phase; the band contains 90 %.

    Attributes:
        recipe: name of the published model.
        tokens: of the phase, without padding; its steps and their tokens follow.
        rate: tokens/s of one GPU without the network, and what it rests on.
        network_seconds: exposed time of the reduction between nodes, in a step.
        seconds: of training, without evaluations and preparation.
        seconds_band: equal ends if the rate was measured.
        joules: None if no power is known; ``watts`` is that of one GPU.
        watts_is_limit: the power is the board's limit, so the energy is at most this.
        token_bytes: of the prepared text, if no text is read twice.
        checkpoint_bytes: of all checkpoints and the finished model.
    """

    recipe: str
    gpu: str
    gpus: int
    tokens: int
    length: int
    steps: int
    step_tokens: int
    rate: float
    basis: str
    network_seconds: float
    seconds: float
    seconds_band: tuple[float, float]
    dollars: float | None
    joules: float | None
    watts: float | None
    watts_is_limit: bool
    token_bytes: int
    checkpoint_bytes: int

    def as_dict(self) -> dict[str, object]:
        """Return JSON-able values."""
        return dataclasses.asdict(self)


def estimate(
    recipe: str,
    tokens: int,
    length: int,
    job: TrainingJob,
    parameters: Parameters,
    prices: Prices,
    measured_rate: float | None = None,
) -> PretrainingEstimate:
    """Estimate one phase.

    Args:
        recipe: name of a preset.
        tokens: of the phase, without padding.
        length: tokens of a sequence.
        job: GPUs and nodes; its batch and work are not read.
        parameters, prices: as for a benchmark run.
        measured_rate: tokens/s of one GPU on this length, in place of the published one.

    Raises:
        UserError: there is no such recipe.
    """
    preset = presets.find(recipe, "--recipe")
    shape = preset.shape
    step_tokens = preset.step_tokens
    steps = max(1, math.ceil(tokens / step_tokens))
    error = 0.0
    if measured_rate is None:
        rate, basis, error = _rate(preset, length, job, parameters)
    else:
        rate = measured_rate
        basis = "your own measurement"
    gradient = timing.of(shape).gradient
    network = timing.step(dataclasses.replace(job, gradient=gradient), parameters).network / 1e3
    seconds = tokens / step_tokens * (step_tokens / (rate * job.gpus) + network)
    seconds_band = (seconds * math.exp(-error), seconds * math.exp(error))
    limit = None if job.name else GPUS[job.gpu].board_watts
    watts = limit if prices.watts_per_gpu is None else prices.watts_per_gpu
    id_bytes = SHORT_ID_BYTES if shape.vocab_size <= MOST_SHORT else LONG_ID_BYTES
    state = KEPT_CHECKPOINTS * CHECKPOINT_BYTES + WEIGHT_FILES * 4
    return PretrainingEstimate(
        recipe=recipe,
        gpu=job.label,
        gpus=job.gpus,
        tokens=tokens,
        length=length,
        steps=steps,
        step_tokens=step_tokens,
        rate=rate,
        basis=basis,
        network_seconds=network,
        seconds=seconds,
        seconds_band=seconds_band,
        dollars=prices.dollars(job.gpus, seconds),
        joules=None if watts is None else job.gpus * seconds * watts,
        watts=watts,
        watts_is_limit=prices.watts_per_gpu is None,
        token_bytes=id_bytes * tokens,
        checkpoint_bytes=state * shape.num_parameters,
    )


def flops_a_token(shape: BertConfig, length: int) -> float:
    """Return the FLOPs of forward and backward for a token in full sequences of a length."""
    window = shape.local_attention // 2
    hidden = max(length - 1 - window, 0)
    work = BatchWork(
        tokens=length,
        squared_lengths=length * length,
        masked=round(MASKING_RATE * length),
        sequences=1,
        local_pairs=length * length - hidden * (hidden + 1),
    )
    return BACKWARD_FACTOR * masked_lm(shape, work) / length


def _rate(
    preset: Preset, length: int, job: TrainingJob, parameters: Parameters
) -> tuple[float, str, float]:
    """Return tokens/s of one GPU, what the number rests on, and the half width of its band."""
    known = preset
    errors = [parameters.error_90]
    work = flops_a_token(preset.shape, ROW_TOKENS)
    if not preset.h100_rate:
        known = _closest(work)
        errors.append(0.0 if known.shape == preset.shape else parameters.unseen_error_90)
    basis = f"{known.h100_rate:,} tokens/s published for {known.name} on an H100"
    at_1024 = known.h100_rate * flops_a_token(known.shape, ROW_TOKENS) / work
    rate = at_1024 * work / flops_a_token(preset.shape, length)
    if length != ROW_TOKENS or known.shape != preset.shape:
        basis += ", scaled by the FLOPs of a token"
    if job.gpu != PUBLISHED_ON or job.name:
        rate *= _sequence_ms(PUBLISHED_ON, parameters) / _sequence_ms(job.gpu, parameters)
        rate *= job.speed
        basis += "; relative speed of the GPUs from MLPerf's BERT results"
        errors.append(parameters.unseen_error_90)
    return rate, basis, math.hypot(*errors)


def _closest(work: float) -> Preset:
    """Return the recipe with a published rate that is closest in FLOPs of a token."""
    every = [presets.find(name, "--recipe") for name in presets.names()]
    known = [preset for preset in every if preset.h100_rate]

    def distance(preset: Preset) -> float:
        return abs(math.log(flops_a_token(preset.shape, ROW_TOKENS) / work))

    return min(known, key=distance)


def _sequence_ms(gpu: str, parameters: Parameters) -> float:
    """Return the fitted time of the benchmark's sequence with 16-bit products."""
    factor = WITHOUT_FP8 if GPUS[gpu].has_fp8 else 1.0
    return parameters.sequence_ms[gpu] * factor


def answers(found: PretrainingEstimate) -> ReportTable:
    """Return the answers, one row each."""
    low, high = found.seconds_band
    rows = [
        (
            "job",
            f"{found.tokens:,} tokens of {found.recipe} at {found.length:,} tokens, on "
            f"{found.gpus} {found.gpu}",
        ),
        ("steps", f"{found.steps:,} of {found.step_tokens:,} tokens"),
        ("speed", f"{found.rate:,.0f} tokens/s per GPU"),
        ("rests on", found.basis),
        ("time", duration(found.seconds)),
        ("90 % interval", band((low, high)) if low < high else "none: the speed is measured"),
        ("loader", f"must deliver {found.tokens / found.seconds:,.0f} tokens/s"),
        ("cost", _cost(found)),
        ("energy", _energy(found)),
        (
            "disk",
            f"{found.token_bytes / 1e9:,.1f} GB of prepared tokens if none is read twice "
            f"(about {BYTES_A_TOKEN * found.tokens / 1e9:,.0f} GB of text), "
            f"{found.checkpoint_bytes / 1e9:,.1f} GB of checkpoints and model",
        ),
    ]
    return ReportTable(["", "estimate"], rows, texts=2, is_long=True)


def _cost(found: PretrainingEstimate) -> str:
    if found.dollars is None:
        return "unknown: give --dollars-per-hour"
    return f"{found.dollars:,.2f} dollars"


def _energy(found: PretrainingEstimate) -> str:
    if found.joules is None or found.watts is None:
        return "unknown: give --watts-per-gpu"
    amount = f"{found.joules:.3g} J ({found.joules / JOULES_A_KWH:,.0f} kWh)"
    if found.watts_is_limit:
        return f"at most {amount}, at the GPU's limit of {found.watts:g} W, without the host"
    return f"{amount} at {found.watts:g} W per GPU"
