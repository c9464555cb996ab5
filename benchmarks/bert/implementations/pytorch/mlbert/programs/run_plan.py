"""Plan a run from its resolved configuration: batch, evaluations, expected samples and time.

Uses only settings and the rules, never data or devices. Unknown quantities (the speed of a machine,
when a custom target is reached) are reported as unknown.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlbert.config.configuration import Configuration
from mlbert.config.shell import planned_world_size
from mlbert.config.sources import parse_config_name
from mlbert.data.loading.config import DataConfig
from mlbert.distributed.config import DistributedConfig
from mlbert.host.errors import UserError
from mlbert.host.texts import is_count
from mlbert.mlperf import rules
from mlbert.mlperf.config import SubmissionConfig
from mlbert.models.config import ModelConfig
from mlbert.optim.config import SCHEDULES, ScheduleConfig
from mlbert.recipes.model_shape import model_shape
from mlbert.runs.config import RunConfig
from mlbert.training.config import EvaluationConfig

_WALLTIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_BYTES = {"fp32": 4, "bf16": 2, "e5m2": 1}
# Batches can differ from the nominal size, because packs are not equally full.
_MOST_STEPS_OVER = 1.05


@dataclass(frozen=True)
class RunPlan:
    """Lines to print, and warnings; each is at most one sentence."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def make_plan(
    config: Configuration,
    world_size: int,
    environ: Mapping[str, str],
    samples_per_second: float | None = None,
) -> RunPlan:
    """Return the plan of one run, and of a job's NEXP runs.

    Args:
        config: the run's settings.
        world_size: number of ranks.
        environ: exports of the launchers: DGXNNODES, DGXNGPU, NEXP, WALLTIME, CONFIG_FILE.
        samples_per_second: measured training speed of all ranks together, or None.
    """
    data = config[DataConfig]
    model = config[ModelConfig]
    schedule = config[ScheduleConfig]
    evaluation = config[EvaluationConfig]
    batch = rules.global_batch_size(data.train_batch_size, world_size, data.average_packing_rate)
    limit = min(schedule.max_steps * batch, config[RunConfig].max_samples_termination)
    point = rules.reference_point(batch)
    end = _decay_samples(schedule, batch)
    expected, why = _expected_samples(evaluation, point, end, limit)
    warmup = f"warm-up of {schedule.num_warmup_steps} from step {schedule.start_warmup_step}"
    lines = [
        f"global_batch_size {batch} = BATCHSIZE {data.train_batch_size} x {world_size} ranks "
        f"x PACKING_FACTOR {data.average_packing_rate:g}",
        f"schedule: {schedule.max_steps} steps of about {batch} samples, "
        f"{warmup if schedule.num_warmup_steps else 'no warm-up'}; "
        f"training ends after {limit:,} samples at the latest",
        f"evaluation: first after {evaluation.eval_iter_start_samples:,} samples, "
        f"then every {evaluation.eval_iter_samples:,}, on "
        f"{_number_or_all(evaluation.num_eval_examples)}; "
        f"closed division: every {rules.eval_interval(batch):,}, on {rules.NUM_EVAL_SAMPLES:,}",
        f"reference convergence point: {_point_words(batch, point)}",
        f"expected samples: {_expected_words(evaluation, expected, why)}",
        *_decay_lines(schedule, evaluation, end),
        "communication: "
        f"{_communication_words(model, config[DistributedConfig], world_size, environ)}",
    ]
    time_lines, time_warnings = _time(
        config[RunConfig], environ, expected, limit, samples_per_second
    )
    is_closed = config[SubmissionConfig].submission_division == "closed"
    warnings = [
        *_shape_warnings(data, world_size, environ),
        *_schedule_warnings(schedule, evaluation, batch, limit),
        *(_closed_warnings(config, batch, limit, point) if is_closed else []),
        *time_warnings,
    ]
    return RunPlan((*lines, *time_lines), tuple(warnings))


def walltime_minutes(text: str) -> float:
    """Return the minutes of a time limit in one of sbatch's forms:
    M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        UserError: the text has another form.
    """
    match = _WALLTIME.fullmatch(text.strip())
    if match is None:
        reason = f"'{text}' is not an sbatch time limit"
        raise UserError("config.value", "WALLTIME", reason, "Give minutes, or H:M:S, or D-H:M:S")
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None:
        padded = [*given, 0, 0]
        hours, minutes, seconds = padded[:3]
        return days * 1440 + hours * 60 + minutes + seconds / 60
    if len(given) == 1:  # M
        hours, minutes, seconds = [0, *given, 0]
    elif len(given) == 2:  # M:S
        hours, minutes, seconds = [0, *given]
    else:
        hours, minutes, seconds = given
    return hours * 60 + minutes + seconds / 60


def _expected_samples(
    evaluation: EvaluationConfig, point: rules.ReferencePoint | None, end: int | None, limit: int
) -> tuple[int | None, str]:
    """Return the samples at the evaluation expected to reach the target, and the reason.

    This is the first evaluation at or after the reference's mean. If there is no mean, or training
    ends before it, it is the last evaluation before the schedule's end; None if neither is known.
    """
    if evaluation.target_metric != rules.TARGET_MLM_ACCURACY:
        return None, ""
    if point is not None and (end is None or point.mean_samples <= limit):
        beyond = max(0.0, point.mean_samples - evaluation.eval_iter_start_samples)
        evaluations = math.ceil(beyond / evaluation.eval_iter_samples)
        why = "after the reference's average"
    elif end is not None and end >= evaluation.eval_iter_start_samples:
        evaluations = _evaluations(evaluation, end) - 1
        why = "last before the schedule's end"
    else:
        return None, ""
    return evaluation.eval_iter_start_samples + evaluations * evaluation.eval_iter_samples, why


def _evaluations(evaluation: EvaluationConfig, samples: int) -> int:
    """Return the number of evaluations up to this many samples."""
    return max(
        0, (samples - evaluation.eval_iter_start_samples) // evaluation.eval_iter_samples + 1
    )


def _decay_samples(config: ScheduleConfig, batch: int) -> int | None:
    """Return the samples until the decay ends if LR_DECAY_END is before the end of training,
    else None.
    """
    end = config.lr_decay_end
    if (
        end is None
        or "lr_decay_end" not in SCHEDULES[config.schedule].reads
        or end >= config.max_steps
    ):
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
    return (
        f"{where}: {point.mean_samples:,.0f} samples on average, "
        f"at least {point.min_mean_samples:,.0f}"
    )


def _number_or_all(number: int | None) -> str:
    return "all" if number is None else f"{number:,}"


def _expected_words(evaluation: EvaluationConfig, expected: int | None, why: str) -> str:
    if expected is None and evaluation.target_metric != rules.TARGET_MLM_ACCURACY:
        wanted = rules.TARGET_MLM_ACCURACY
        target = evaluation.target_metric
        return (
            f"unknown; the reference defines them for accuracy {wanted:g}, "
            f"TARGET_MLM_ACCURACY is {target or 'none'}"
        )
    if expected is None:
        return "unknown; there is no reference point"
    return f"{expected:,}, at evaluation {_evaluations(evaluation, expected)}, the {why}"


def _decay_lines(
    schedule: ScheduleConfig, evaluation: EvaluationConfig, end: int | None
) -> list[str]:
    if end is None:
        return []
    evaluations = _evaluations(evaluation, end)
    samples = f"about {end / 1e6:.2f} M samples ({end:,})"
    return [
        f"schedule's end: {schedule.lr_decay_end} steps / {evaluations} evaluations / {samples}"
    ]


def _communication_words(
    model: ModelConfig, distributed: DistributedConfig, world_size: int, environ: Mapping[str, str]
) -> str:
    """Describe the network traffic of the gradient and a sharded optimizer's weights,
    as in `bytes_a_step`.
    """
    if world_size == 1:
        return "none, one rank"
    try:
        parameters = model_shape(model).num_parameters
    except UserError:
        return f"unknown; {model.bert_config_file} cannot be read"
    node = environ.get("DGXNGPU", "")
    ranks_per_node = int(node) if node.isdecimal() else 1
    sharers = {"off": 1, "node": ranks_per_node, "all": world_size}[distributed.sharded_optimizer]
    sent = bytes_a_step(
        parameters,
        world_size,
        sharers,
        weight_bytes=_BYTES[distributed.weights_allgather],
        gradient_bytes=_BYTES[distributed.gradient_reduction],
    )
    return (
        f"each rank sends and receives {sent / 1e9:.3f} GB per step for {parameters:,} parameters"
    )


def bytes_a_step(
    parameters: int, world_size: int, sharers: int, weight_bytes: int, gradient_bytes: int = 4
) -> float:
    """Return the bytes that each rank sends, and receives,
    for the gradient and weights of one optimizer step.

    With N ranks, a ring all-reduce of B bytes costs 2 (N - 1) / N B; a reduce-scatter and an
    all-gather cost half of it each (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
    clusters of workstations, 2009). This is the minimum. If S ranks share the optimizer, their
    gradient is reduce-scattered, each part is summed over the N / S groups, and the weights are
    gathered. Buffer padding, norms and metrics are not counted.

    Args:
        parameters: elements of the gradient.
        world_size: N.
        sharers: S; 1 if every rank updates everything.
        weight_bytes: bytes per weight in a sharded optimizer's all-gather.
        gradient_bytes: bytes per gradient element;
            in bfloat16, all-to-all and all-gather cost half a ring each.
    """
    groups = world_size // sharers
    scattered = gradient_bytes * parameters * (sharers - 1) / sharers
    summed = 2 * gradient_bytes * parameters / sharers * (groups - 1) / groups
    gathered = weight_bytes * parameters * (sharers - 1) / sharers
    return scattered + summed + gathered


def _time(
    config: RunConfig,
    environ: Mapping[str, str],
    expected: int | None,
    limit: int,
    samples_per_second: float | None,
) -> tuple[list[str], list[str]]:
    runs = int(environ["NEXP"]) if is_count(environ.get("NEXP", "")) else 1
    given = environ.get("WALLTIME", "")
    walltime = walltime_minutes(given) if given else None
    limit_text = f"WALLTIME {given}" if given else "WALLTIME is not set"
    if samples_per_second is None:
        lines = [
            "expected time: unknown; give --samples-per-second N measured on this machine; "
            f"{limit_text}"
        ]
        seconds = config.max_seconds
        what = f"{runs} runs of MAX_SECONDS {seconds:g}" if seconds is not None else ""
    else:
        seconds = (limit if expected is None else expected) / samples_per_second
        kind = "at most" if expected is None else "about"
        if config.max_seconds is not None and config.max_seconds < seconds:
            kind = "at most"
            seconds = config.max_seconds
        lines = [
            f"expected time: {kind} {seconds:,.0f} s per run at {samples_per_second:g} samples/s, "
            f"{runs} runs "
            f"{runs * seconds / 60:,.1f} minutes; plus start-up, evaluation and compilation; "
            f"{limit_text}"
        ]
        what = f"{runs} runs of {kind} {seconds:,.0f} s"
    if walltime is None or seconds is None or (minutes := runs * seconds / 60) < walltime:
        return lines, []
    return lines, [
        f"WALLTIME {given} ({walltime:g} minutes) is too short: {what} take {minutes:.1f} minutes"
    ]


def _shape_warnings(config: DataConfig, world_size: int, environ: Mapping[str, str]) -> list[str]:
    warnings = []
    planned = planned_world_size(environ)
    if planned is not None and planned != world_size:
        warnings.append(
            f"the launcher started {world_size} ranks, DGXNNODES x DGXNGPU is {planned}"
        )
    name = Path(environ.get("CONFIG_FILE", "")).name
    parts = parse_config_name(name)
    nodes = environ.get("DGXNNODES", "?")
    ranks = environ.get("DGXNGPU", "?")
    batch = config.train_batch_size
    actual = f"{nodes}x{ranks}x{batch}x{config.gradient_accumulation_steps}"
    if parts is not None and actual != parts.shape.removesuffix(parts.variant):
        warnings.append(
            f"{name} names nodes x ranks x batch x accumulation, but the settings are {actual}"
        )
    return warnings


def _schedule_warnings(
    schedule: ScheduleConfig, evaluation: EvaluationConfig, batch: int, limit: int
) -> list[str]:
    unused = schedule.start_warmup_step
    first = evaluation.eval_iter_start_samples
    found = {
        f"START_WARMUP_STEP {unused} has no effect without a warm-up": unused
        and not schedule.num_warmup_steps,
        f"training ends after {limit:,} samples, before the first evaluation": first > limit,
        f"one step is {batch:,} samples, more than between two evaluations": batch
        > evaluation.eval_iter_samples,
    }
    return [warning for warning, applies in found.items() if applies]


def _closed_warnings(
    config: Configuration, batch: int, limit: int, point: rules.ReferencePoint | None
) -> list[str]:
    """Return what the closed division rejects, or what makes a run hopeless in it."""
    evaluation = config[EvaluationConfig]
    warnings = []
    if point is None:
        largest = rules.REFERENCE_POINTS[-1].global_batch_size
        reason = f"batch {batch} is beyond the reference points, the largest is {largest}"
        warnings.append(f"{reason}: the closed division rejects it")
    elif limit * _MOST_STEPS_OVER < point.min_mean_samples:
        needed = f"{point.mean_samples:,.0f} on average"
        warnings.append(f"training ends after {limit:,} samples, the reference needs {needed}")
    interval = rules.eval_interval(batch)
    intervals = {evaluation.eval_iter_start_samples, evaluation.eval_iter_samples}
    samples = rules.NUM_EVAL_SAMPLES
    found = {
        f"requires EVAL_ITER_START_SAMPLES and EVAL_ITER_SAMPLES = {interval}": intervals
        != {interval},
        f"requires NUM_EVAL_EXAMPLES={samples}": evaluation.num_eval_examples != samples,
        "starts from the reference checkpoint, INIT_CHECKPOINT is none": config[
            ModelConfig
        ].init_checkpoint
        is None,
        "trains on its data set, SYNTH_DATA is yes": config[DataConfig].synthetic_data,
    }
    return [
        *warnings,
        *(f"the closed division {words}" for words, applies in found.items() if applies),
    ]
