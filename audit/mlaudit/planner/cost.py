"""Estimate one job: samples, times with bands, cost, energy, memory, and the limiting factor.

Memory per GPU, in bytes per parameter: master weights and two moments of 4 each, working weights of
2 (in 16 bits, or in FP8 plain and transposed), and a gradient of 4. Activations, including dropout
masks, are proportional to tokens, layers and hidden size. Masked tokens add logits and their
gradient. A CUDA graph keeps the same in its own pool instead of the ordinary one. A test compares
the sum with the bytes counted over a whole step (`counted`): within 3 %.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from mlaudit import rules
from mlaudit.planner import timing
from mlaudit.planner.gpus import GPUS
from mlaudit.planner.timing import (
    BENCHMARK,
    ModelShape,
    Parameters,
    StepTime,
    TrainingJob,
)
from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError

# Counted per token, layer and hidden unit: with 16-bit products, and with FP8 ones.
ACTIVATION_BYTES = 32.7
FP8_ACTIVATION_BYTES = 28.6
WEIGHT_BYTES = 2
LOGIT_BYTES = 2 + 4  # per masked token and vocabulary entry: 16-bit logits, float32 for the loss
CONTEXT_GB = 3.0  # assumed: CUDA, libraries, reduction buffers, the evaluation's graph
USABLE = 0.92  # assumed fraction of the memory; the rest is lost to fragmentation
ONE_SIDED_95 = 1.645  # standard deviations: 90 % lie within
SECONDS_AN_HOUR = 3600
JOULES_A_KWH = 3.6e6


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU in 10^9 bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    context: float
    most_sequences: int  # per micro-batch; 0 if not even the weights fit

    @property
    def total(self) -> float:
        """Total for one micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.context


def of(config: BertConfig, gpu: str, sequences: float, sharers: int, *, fp8: bool) -> Memory:
    """Return the memory of a GPU with micro-batches of ``sequences`` and optimizer state sharded
    over ``sharers``.
    """
    billion = config.num_parameters / 1e9
    tokens = BENCHMARK.tokens / BENCHMARK.sequences
    masked = BENCHMARK.masked / BENCHMARK.sequences
    activation_bytes = FP8_ACTIVATION_BYTES if fp8 else ACTIVATION_BYTES
    of_layers = activation_bytes * config.hidden_size * config.num_hidden_layers * tokens
    each = (of_layers + LOGIT_BYTES * config.padded_vocab_size * masked) / 1e9
    weights = WEIGHT_BYTES * billion
    gradients = 4 * billion
    optimizer = 12 * billion / sharers
    free = USABLE * GPUS[gpu].memory_gb - (weights + gradients + optimizer + CONTEXT_GB)
    return Memory(
        weights, gradients, optimizer, each * sequences, CONTEXT_GB, max(0, int(free / each))
    )


@dataclass(frozen=True)
class Prices:
    """Price and power of a GPU, and kg of CO2 per kWh."""

    dollars_per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    co2_per_kwh: float | None = None

    def dollars(self, gpus: float, seconds: float) -> float | None:
        """Return the price of this many GPUs for a time, or None without a rate."""
        rate = self.dollars_per_gpu_hour
        return None if rate is None else gpus * seconds / SECONDS_AN_HOUR * rate

    def co2_kg(self, joules: float | None) -> float | None:
        """Return the kg of CO2 that this energy causes, or None if it or the rate is unknown."""
        return (
            None
            if joules is None or self.co2_per_kwh is None
            else joules / JOULES_A_KWH * self.co2_per_kwh
        )


@dataclass(frozen=True)
class Estimate:
    """Estimate of a job, in seconds, sequences, milliseconds per step, dollars, kWh and kg.

    Bands contain 90 %.

    Attributes:
        samples: mean samples to the target of a score's runs.
        samples_spread: standard deviation of the samples of one run.
        rules_samples: the rules' reference point, to which a score's samples are raised.
        evaluations: evaluations of the mean run.
        seconds: expected time to train, as in a score of ten runs (olympic mean).
        score_band, run_band: bands of the score and of one run.
        micro_batches: micro-batches per step so that the activations fit.
        limit: the part that would save most if it were free; or memory, if a step must be split and
            compute is not the largest part.
    """

    job: TrainingJob
    samples: float
    samples_spread: float
    rules_samples: float
    evaluations: int
    step: StepTime
    evaluation_seconds: float
    seconds: float
    score_band: tuple[float, float]
    run_band: tuple[float, float]
    sequences_per_second: float
    share_of_peak: float
    memory: Memory
    micro_batches: int
    limit: str
    dollars: float | None
    kilowatt_hours: float | None
    co2_kg: float | None

    def as_dict(self) -> dict[str, object]:
        """Return JSON-able values."""
        return dataclasses.asdict(self) | {
            "memory_gb": self.memory.total,
            "step_ms": self.step.total,
        }


def estimate(
    job: TrainingJob,
    shape: ModelShape,
    parameters: Parameters,
    prices: Prices,
    needed: float | None = None,
    sharers: int = 1,
) -> Estimate:
    """Estimate a job.

    Args:
        job: the job, with the factors of ``shape``.
        needed: samples to the target; None uses the reference's, which apply only to BERT-large.
        sharers: GPUs that share the optimizer state.

    Raises:
        UserError: the batch is beyond the reference points, samples are unknown,
            or the weights do not fit.
    """
    point = timing.reference_point(job.batch)
    if needed is None and not shape.is_large:
        remedy = "Give the samples that this model needs to reach its target"
        raise UserError("plan.impossible", "--samples", "is known only for BERT-large", remedy)
    samples = timing.samples(job, parameters) if needed is None else needed
    step = timing.step(job, parameters)
    evaluation = timing.evaluation_seconds(job, parameters)
    seconds = timing.seconds_to_train(job, parameters, samples)
    held = of(shape.config, job.gpu, job.sequences, sharers, fp8=job.fp8 and GPUS[job.gpu].has_fp8)
    if not held.most_sequences:
        problem = f"{job.gpu} cannot hold the weights and one sequence"
        raise UserError("plan.impossible", "--gpu", problem, "Shard the optimizer state")
    micro_batches = math.ceil(job.sequences / held.most_sequences)
    if micro_batches > 1:
        held = dataclasses.replace(held, activations=held.activations / micro_batches)
    spread = samples * point.stdev_samples / point.mean_samples
    error = parameters.error_90 if job.has_results else parameters.unseen_error_90
    score_band, run_band = _bands(seconds, spread / samples, error)
    joules = None if prices.watts_per_gpu is None else job.gpus * seconds * prices.watts_per_gpu
    rate = job.batch / step.total * 1e3
    peak = GPUS[job.gpu].peak_tflops * 1e12 * job.speed
    return Estimate(
        job=job,
        samples=samples,
        samples_spread=spread,
        rules_samples=point.mean_samples,
        evaluations=math.ceil(samples / rules.eval_interval(job.batch)),
        step=step,
        evaluation_seconds=evaluation,
        seconds=seconds,
        score_band=score_band,
        run_band=run_band,
        sequences_per_second=rate,
        share_of_peak=rate / job.gpus * shape.flops / peak,
        memory=held,
        micro_batches=micro_batches,
        limit=_limit(job, step, samples, evaluation, seconds, micro_batches),
        dollars=prices.dollars(job.gpus, seconds),
        kilowatt_hours=None if joules is None else joules / JOULES_A_KWH,
        co2_kg=prices.co2_kg(joules),
    )


def _bands(
    seconds: float, spread: float, error: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bands of a score (from the scatter of published scores) and of one run,
    which varies more.
    """
    averaged = rules.NUM_RESULT_FILES - 2
    of_run = math.hypot(error, ONE_SIDED_95 * spread * math.sqrt(1 - 1 / averaged))
    score, run = ((seconds * math.exp(-half), seconds * math.exp(half)) for half in (error, of_run))
    return score, run


def _limit(
    job: TrainingJob,
    step: StepTime,
    samples: float,
    evaluation: float,
    seconds: float,
    micro_batches: int,
) -> str:
    """Return the part that would save most if it were free;
    convergence counts samples above the best batch's.
    """
    fewest = min(point.mean_samples for point in rules.reference_points())
    steps = samples / job.batch / 1e3
    parts = {
        "compute": steps * step.compute,
        "load imbalance": steps * step.imbalance,
        "constant part of a step": steps * step.constant,
        "network": steps * step.network,
        "evaluation": samples / rules.eval_interval(job.batch) * evaluation,
        "convergence": seconds * max(0.0, 1 - fewest / samples),
    }
    largest = max(parts, key=lambda name: parts[name])
    return "memory" if micro_batches > 1 and largest != "compute" else largest
