"""What a resolved configuration amounts to, before anything runs: batch, evaluations, samples and time to expect.

Arithmetic on settings and on the rules only; nothing here looks at data or at a device. What cannot be known (the speed
of a machine, where an own target is reached) is said to be unknown.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.config.sources import parse_config_name
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.host.errors import UserError
from mlbert.mlperf import rules
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.optim.config import SCHEDULE_SETTINGS, ScheduleConfig
from mlbert.training.config import EvaluationConfig, RunConfig

_WALLTIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_BYTES = {"fp32": 4, "bf16": 2, "e5m2": 1}
_MOST_STEPS_OVER = 1.05  # a batch may be a little off its nominal size: packs are not all equally full


@dataclass(frozen=True)
class RunPlan:
    """Lines to print and warnings, each one sentence or less than a line."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def make_plan(
    data: DataConfig,
    model: ModelConfig,
    schedule: ScheduleConfig,
    distributed: DistributedConfig,
    evaluation: EvaluationConfig,
    run: RunConfig,
    submission: SubmissionConfig,
    world_size: int,
    environ: Mapping[str, str],
    samples_per_second: float | None = None,
) -> RunPlan:
    """The plan of one run, and of a job's NEXP runs.

    Args:
        data, model, schedule, distributed, evaluation, run, submission: the run's settings.
        world_size: ranks.
        environ: exports of launchers: DGXNNODES, DGXNGPU, NEXP, WALLTIME, CONFIG_FILE.
        samples_per_second: training speed of all ranks together, as measured; ``None`` when unknown.
    """
    batch = rules.global_batch_size(data.train_batch_size, world_size, data.average_packing_rate)
    limit = min(schedule.max_steps * batch, run.max_samples_termination)
    point = rules.reference_point(batch)
    end = _decay_samples(schedule, batch)
    expected, why = _expected_samples(evaluation, point, end, limit)
    warmup = f"warm-up of {schedule.num_warmup_steps} from step {schedule.start_warmup_step}"
    lines = [
        f"global_batch_size {batch} = BATCHSIZE {data.train_batch_size} x {world_size} ranks "
        f"x PACKING_FACTOR {data.average_packing_rate:g}",
        f"schedule: {schedule.max_steps} steps of about {batch} samples, "
        f"{warmup if schedule.num_warmup_steps else 'no warm-up'}; training ends after {limit:,} samples at the latest",
        f"evaluation: first after {evaluation.eval_iter_start_samples:,} samples, "
        f"then every {evaluation.eval_iter_samples:,}, on {_number_or_all(evaluation.num_eval_examples)}; "
        f"closed division: every {rules.eval_interval(batch):,}, on {rules.NUM_EVAL_SAMPLES:,}",
        f"reference convergence point: {_point_words(batch, point)}",
        f"expected samples: {_expected_words(evaluation, expected, why)}",
        *_decay_lines(schedule, evaluation, end),
        f"communication: {_communication_words(model, distributed, world_size, environ)}",
    ]
    time_lines, time_warnings = _time(run, environ, expected, limit, samples_per_second)
    closed = _closed_warnings(data, model, evaluation, batch, limit, point)
    warnings = [
        *_shape_warnings(data, world_size, environ),
        *_schedule_warnings(schedule, evaluation, batch, limit),
        *(closed if submission.submission_division == "closed" else []),
        *time_warnings,
    ]
    return RunPlan((*lines, *time_lines), tuple(warnings))


def planned_world_size(environ: Mapping[str, str]) -> int | None:
    """DGXNNODES x DGXNGPU of a sourced config; ``None`` without one."""
    counts = [environ.get(name, "") for name in ("DGXNNODES", "DGXNGPU")]
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        return None
    return int(counts[0]) * int(counts[1])


def walltime_minutes(text: str) -> float:
    """Minutes of a time limit in one of sbatch's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        UserError: another form.
    """
    match = _WALLTIME.fullmatch(text.strip())
    if match is None:
        raise UserError(
            "config.value", "WALLTIME", f"'{text}' is no time limit of sbatch", "Give minutes, or H:M:S, or D-H:M:S"
        )
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*given, 0, 0][:3]
        return days * 1440 + hours * 60 + minutes + seconds / 60
    hours, minutes, seconds = ([0, *given, 0], [0, *given], given)[len(given) - 1]
    return hours * 60 + minutes + seconds / 60


def _expected_samples(
    evaluation: EvaluationConfig, point: rules.ReferencePoint | None, end: int | None, limit: int
) -> tuple[int | None, str]:
    """The evaluation at which the target is to be expected, and why there.

    The first at or after the reference's mean; where there is none, or training ends before it, the last one before the
    schedule's end; None where neither is known.
    """
    if evaluation.target_metric != rules.TARGET_MLM_ACCURACY:
        return None, ""
    if point is not None and (end is None or point.mean_samples <= limit):
        beyond = max(0.0, point.mean_samples - evaluation.eval_iter_start_samples)
        evaluations = math.ceil(beyond / evaluation.eval_iter_samples)
        why = "that follows the reference's average"
    elif end is not None and end >= evaluation.eval_iter_start_samples:
        evaluations = _evaluations(evaluation, end) - 1
        why = "that is the last before the schedule's end"
    else:
        return None, ""
    return evaluation.eval_iter_start_samples + evaluations * evaluation.eval_iter_samples, why


def _evaluations(evaluation: EvaluationConfig, samples: int) -> int:
    """How many there are up to so many samples."""
    return max(0, (samples - evaluation.eval_iter_start_samples) // evaluation.eval_iter_samples + 1)


def _decay_samples(config: ScheduleConfig, batch: int) -> int | None:
    """Samples until the decay ends, where LR_DECAY_END says that it ends before the training does."""
    end = config.lr_decay_end
    if end is None or "lr_decay_end" not in SCHEDULE_SETTINGS[config.schedule] or end >= config.max_steps:
        return None
    return end * batch


def _point_words(batch: int, point: rules.ReferencePoint | None) -> str:
    known = [known.global_batch_size for known in rules.REFERENCE_POINTS if known.pruned]
    if point is None:
        return f"none at batch {batch}; the largest is at {known[-1]}"
    if batch in known:
        where = f"recorded at batch {batch}"
    elif batch < known[0]:
        where = f"that of batch {known[0]}, the smallest"
    else:
        above = bisect.bisect(known, batch)
        where = f"between batch {known[above - 1]} and {known[above]}"
    return f"{where}: {point.mean_samples:,.0f} samples on average, at least {point.min_mean_samples:,.0f}"


def _number_or_all(number: int | None) -> str:
    return "all" if number is None else f"{number:,}"


def _expected_words(evaluation: EvaluationConfig, expected: int | None, why: str) -> str:
    if expected is None and evaluation.target_metric != rules.TARGET_MLM_ACCURACY:
        wanted, target = rules.TARGET_MLM_ACCURACY, evaluation.target_metric
        return f"unknown; the reference tells them for accuracy {wanted:g}, TARGET_MLM_ACCURACY is {target or 'none'}"
    if expected is None:
        return "unknown; there is no reference point"
    return f"{expected:,}, the evaluation (number {_evaluations(evaluation, expected)}) {why}"


def _decay_lines(schedule: ScheduleConfig, evaluation: EvaluationConfig, end: int | None) -> list[str]:
    if end is None:
        return []
    counts = (
        f"{schedule.lr_decay_end} steps / {_evaluations(evaluation, end)} evaluations / about {end / 1e6:.2f} M samples"
    )
    return [f"schedule's end: {counts} ({end:,})"]


def _communication_words(
    model: ModelConfig, distributed: DistributedConfig, world_size: int, environ: Mapping[str, str]
) -> str:
    """What the gradient and a sharded optimizer's weights cost the network, as `bytes_a_step` counts it."""
    if world_size == 1:
        return "none, one rank"
    try:
        parameters = BertConfig.from_json(model.bert_config_file).with_options(model.model_options).num_parameters
    except UserError:
        return f"unknown; {model.bert_config_file} cannot be read"
    node = environ.get("DGXNGPU", "")
    sharers = {"off": 1, "node": int(node) if node.isdecimal() else 1, "all": world_size}[distributed.sharded_optimizer]
    sizes = _BYTES[distributed.weights_allgather], _BYTES[distributed.gradient_reduction]
    sent = bytes_a_step(parameters, world_size, sharers, *sizes)
    return f"each rank sends and receives {sent / 1e9:.3f} GB a step for {parameters:,} parameters"


def bytes_a_step(parameters: int, world_size: int, sharers: int, weight_bytes: int, gradient_bytes: int = 4) -> float:
    """Bytes that each rank sends, and receives, for one optimizer step's gradient and weights.

    With N ranks, a ring all-reduce of B bytes costs 2 (N - 1) / N B, a reduce-scatter and an all-gather half of it each
    (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009), the least there
    is. Where S ranks share the optimizer, their gradient is reduce-scattered, each part is summed over the N / S
    groups, and the weights are gathered. Elements that a buffer is padded with, norms and metrics are not counted.

    Args:
        parameters: elements of the gradient.
        world_size: N.
        sharers: S, 1 where every rank updates everything.
        weight_bytes: of one weight as a sharded optimizer hands it out.
        gradient_bytes: of one element of the gradient; in bfloat16 its all-to-all and all-gather cost a ring's halves.
    """
    groups = world_size // sharers
    scattered = gradient_bytes * parameters * (sharers - 1) / sharers
    summed = 2 * gradient_bytes * parameters / sharers * (groups - 1) / groups
    gathered = weight_bytes * parameters * (sharers - 1) / sharers
    return scattered + summed + gathered


def _time(
    config: RunConfig, environ: Mapping[str, str], expected: int | None, limit: int, samples_per_second: float | None
) -> tuple[list[str], list[str]]:
    runs = int(environ["NEXP"]) if environ.get("NEXP", "").isdecimal() else 1
    given = environ.get("WALLTIME", "")
    walltime = walltime_minutes(given) if given else None
    told = f"WALLTIME {given}" if given else "WALLTIME is not set"
    if samples_per_second is None:
        lines = [f"expected time: unknown; give --samples-per-second N as a run of this machine measured it; {told}"]
        seconds = config.max_seconds
        what = f"{runs} runs of MAX_SECONDS {seconds:g}" if seconds is not None else ""
    else:
        seconds = (limit if expected is None else expected) / samples_per_second
        kind = "at most" if expected is None else "about"
        if config.max_seconds is not None and config.max_seconds < seconds:
            kind, seconds = "at most", config.max_seconds
        lines = [
            f"expected time: {kind} {seconds:,.0f} s a run at {samples_per_second:g} samples/s, {runs} runs "
            f"{runs * seconds / 60:,.1f} minutes; start-up, evaluation and compilation come on top; {told}"
        ]
        what = f"{runs} runs of {kind} {seconds:,.0f} s"
    if walltime is None or seconds is None or (minutes := runs * seconds / 60) < walltime:
        return lines, []
    return lines, [f"WALLTIME {given} ({walltime:g} minutes) is too short: {what} are {minutes:.1f} minutes"]


def _shape_warnings(config: DataConfig, world_size: int, environ: Mapping[str, str]) -> list[str]:
    warnings = []
    planned = planned_world_size(environ)
    if planned is not None and planned != world_size:
        warnings.append(f"the launcher started {world_size} ranks, DGXNNODES x DGXNGPU is {planned}")
    name = Path(environ.get("CONFIG_FILE", "")).name
    parts = parse_config_name(name)
    counts = (environ.get("DGXNNODES", "?"), environ.get("DGXNGPU", "?"))
    actual = "x".join(map(str, (*counts, config.train_batch_size, config.gradient_accumulation_steps)))
    if parts is not None and actual != parts.shape.removesuffix(parts.variant):
        warnings.append(f"{name} tells nodes x ranks x batch x accumulation, but they are {actual}")
    return warnings


def _schedule_warnings(schedule: ScheduleConfig, evaluation: EvaluationConfig, batch: int, limit: int) -> list[str]:
    warnings = []
    if schedule.start_warmup_step and not schedule.num_warmup_steps:
        warnings.append(f"START_WARMUP_STEP {schedule.start_warmup_step} does nothing without a warm-up")
    if evaluation.eval_iter_start_samples > limit:
        warnings.append(f"training ends after {limit:,} samples, before the first evaluation")
    if batch > evaluation.eval_iter_samples:
        warnings.append(f"one step is {batch:,} samples, more than lie between two evaluations")
    return warnings


def _closed_warnings(
    data: DataConfig,
    model: ModelConfig,
    evaluation: EvaluationConfig,
    batch: int,
    limit: int,
    point: rules.ReferencePoint | None,
) -> list[str]:
    """What the closed division would not accept, or what makes a run hopeless in it."""
    warnings = []
    if point is None:
        largest = max(known.global_batch_size for known in rules.REFERENCE_POINTS)
        warnings.append(f"batch {batch} is beyond the reference points, the largest is {largest}: closed refuses it")
    elif limit * _MOST_STEPS_OVER < point.min_mean_samples:
        needed = f"{point.mean_samples:,.0f} on average"
        warnings.append(f"training ends after {limit:,} samples, the reference needs {needed}")
    interval = rules.eval_interval(batch)
    if (evaluation.eval_iter_start_samples, evaluation.eval_iter_samples) != (interval, interval):
        warnings.append(f"the closed division wants EVAL_ITER_START_SAMPLES and EVAL_ITER_SAMPLES to be {interval}")
    if evaluation.num_eval_examples != rules.NUM_EVAL_SAMPLES:
        warnings.append(f"the closed division wants NUM_EVAL_EXAMPLES={rules.NUM_EVAL_SAMPLES}")
    if model.init_checkpoint is None:
        warnings.append("the closed division starts from the reference checkpoint, INIT_CHECKPOINT is none")
    if data.synthetic_data:
        warnings.append("the closed division trains on its data set, SYNTH_DATA is yes")
    return warnings
