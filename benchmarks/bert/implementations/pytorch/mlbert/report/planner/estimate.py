"""The answer for one job: samples, times with their band, cost, energy, memory, and what limits it.

Memory of one GPU, and how many sequences fit.

What the program keeps: master weights and two moments of 4 bytes each, working weights of 2 (in 16 bits, or in FP8 as
they are and transposed), a gradient of 4; activations, dropout masks included, in proportion to tokens, layers and
hidden size; logits of masked tokens with their gradient. A graph keeps the same in a pool of its own, in place of the
ordinary one. A test compares the sum with what is counted over a whole step (`counted`): within 3
%.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from mlbert.config.bert_config import BertConfig
from mlbert.host.errors import UserError
from mlbert.mlperf import rules
from mlbert.report.planner import timing
from mlbert.report.planner.timing import BENCHMARK, GPUS, ModelShape, Parameters

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


ONE_SIDED_95 = 1.645  # standard deviations: nine of ten lie inside
SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class Prices:
    """What a GPU costs and draws."""

    dollars_per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None


@dataclass(frozen=True)
class Estimate:
    """Seconds, sequences, milliseconds of a step, dollars, kWh; bands hold nine of ten.

    Attributes:
        samples: to the target, mean of a score's runs; samples_spread: standard deviation of one run.
        rules_samples: the rules' reference point, which a score's samples are raised to.
        evaluations: up to the one that the mean run ends with.
        seconds: to train, mean; what a score of ten runs (olympic mean) is expected to be.
        score_band, run_band: of the score, and of one run.
        micro_batches: that a step has to be cut into so that its activations fit.
        limit: what would save most if it cost nothing; memory where a step has to be cut up and compute is not it.
    """

    job: timing.TrainingJob
    samples: float
    samples_spread: float
    rules_samples: float
    evaluations: int
    step: timing.StepTime
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

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self) | {"memory_gb": self.memory.total, "step_ms": self.step.total}


def estimate(
    job: timing.TrainingJob,
    shape: ModelShape,
    parameters: Parameters,
    prices: Prices,
    needed: float | None = None,
    sharers: int = 1,
) -> Estimate:
    """The estimate of a job.

    Args:
        job: with the factors of ``shape``.
        needed: samples to the target; None: those of the reference, which holds for BERT-large alone.
        sharers: GPUs that share the optimizer's state.

    Raises:
        UserError: a batch beyond the reference points, a model without samples, weights that do not fit.
    """
    point = _reference_point(job.batch)
    if needed is None and not shape.is_large:
        remedy = "Give those that this model needs to its target"
        raise UserError("plan.impossible", "--samples", "are known for BERT-large only", remedy)
    samples = timing.samples(job, parameters) if needed is None else needed
    step, evaluation = timing.step(job, parameters), timing.evaluation_seconds(job, parameters)
    seconds = timing.seconds_to_train(job, parameters, samples)
    held = of(shape.config, job.gpu, job.sequences, sharers, fp8=job.fp8 and GPUS[job.gpu].has_fp8)
    if not held.most_sequences:
        problem = f"{job.gpu} cannot hold the weights and one sequence"
        raise UserError("plan.impossible", "--gpu", problem, "Share the optimizer's state")
    micro_batches = math.ceil(job.sequences / held.most_sequences)
    if micro_batches > 1:
        held = dataclasses.replace(held, activations=held.activations / micro_batches)
    spread = samples * point.stdev_samples / point.mean_samples
    score_band, run_band = _bands(seconds, spread / samples, parameters.error_90)
    hours = job.gpus * seconds / SECONDS_AN_HOUR
    rate = job.batch / step.total * 1e3
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
        share_of_peak=rate / job.gpus * shape.flops / (GPUS[job.gpu].peak_tflops * 1e12),
        memory=held,
        micro_batches=micro_batches,
        limit=_limit(job, step, samples, evaluation, seconds, micro_batches),
        dollars=None if prices.dollars_per_gpu_hour is None else hours * prices.dollars_per_gpu_hour,
        kilowatt_hours=None if prices.watts_per_gpu is None else hours * prices.watts_per_gpu / 1e3,
    )


def _reference_point(batch: int) -> rules.ReferencePoint:
    point = rules.reference_point(batch)
    if point is None:
        largest = rules.REFERENCE_POINTS[-1].global_batch_size
        raise UserError("config.range", "--batch", f"{batch} is beyond the reference points", f"Give at most {largest}")
    return point


def _bands(seconds: float, spread: float, error: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of the score, as published scores lay around the fit; of one run, whose own chance comes on top."""
    averaged = rules.NUM_RESULT_FILES - 2
    of_run = math.hypot(error, ONE_SIDED_95 * spread * math.sqrt(1 - 1 / averaged))

    def around(half: float) -> tuple[float, float]:
        return seconds * math.exp(-half), seconds * math.exp(half)

    return around(error), around(of_run)


def _limit(
    job: timing.TrainingJob,
    step: timing.StepTime,
    samples: float,
    evaluation: float,
    seconds: float,
    micro_batches: int,
) -> str:
    """What would save most if it cost nothing; as convergence count samples that the best batch would not need."""
    fewest = min(point.mean_samples for point in rules.REFERENCE_POINTS)
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
