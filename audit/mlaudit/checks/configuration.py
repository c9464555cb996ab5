"""Check this code's own logs against their `configuration` event:
each key has the value of its setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlaudit import rules
from mlaudit.findings import Complaint, Complaints, Outcome
from mlaudit.keys import SETTINGS_OF
from mlaudit.logs import Event, Log, is_number
from mlaudit.result_set import OWN_FORM, ResultSet, evaluations_of
from mlaudit.settings import MASKED_LM, parse_config_name, settings_by_key

_AS_SET = "this code's own logs: a key has the value of its setting in the configuration"
# Identities of what the settings name.
_DATA = ("train_data", "eval_data", "model_shape_sha256", "starting_weights_sha256")
_HELD_OUT = "rules: training data contains no evaluation data"
_SYNTHETIC = "synthetic"
_UP_TO = ("classification", "masked_lm_text")  # recipes that evaluate on at most NUM_EVAL_EXAMPLES
_CHOSEN = ("auto", "ops", "none")  # values that leave the choice to the program
_PRECISIONS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
    "fp8-forward": "float8",
}
# A run may exceed its time limit, because a step and the end of a run take time.
_LATE_SHARE = 1.1  # of the time limit
_LATE_SECONDS = 30  # beyond the time limit


def check_configuration(results: ResultSet) -> Complaints:
    """Every key of this code's logs has the value of its setting in their configuration."""
    for log in results.own_logs:
        event = log.first("configuration")
        if event is None:
            continue  # reported as missing provenance
        settings = _values(event)
        if settings is None:
            yield log.error(
                "configuration is not a mapping of settings to value and origin", OWN_FORM, event
            )
            continue
        for logged in log.events:
            yield from _against_setting(log, logged, settings)
        yield from _warmup(log, settings)
        yield from _sources(log, settings)
        yield from _batch(log, settings)
        yield from _ranks(log, event)
        yield from _totals(log, settings)
        yield from _time_limit(log, settings)


def _values(event: Event) -> dict[str, Any] | None:
    """Map each setting to its value, or return None if the event has another form."""
    rows = event.value
    if not isinstance(rows, dict) or not rows:
        return None
    if not all(
        isinstance(entry, dict) and {"value", "origin"} <= set(entry) for entry in rows.values()
    ):
        return None
    return {name: entry["value"] for name, entry in rows.items()}


def _against_setting(log: Log, event: Event, settings: Mapping[str, Any]) -> Iterable[Complaint]:
    key = event.key
    known = settings_by_key()
    fields = [field for field in dict.fromkeys((key, *SETTINGS_OF.get(key, ()))) if field in known]
    if len(fields) != 1 or key in _DATA or key == "configuration":
        return
    env = known[fields[0]].env
    wanted = settings.get(env)
    if wanted is None or wanted in _CHOSEN or key == "opt_implementation":
        return
    is_limit = key == "eval_samples" and (
        log.value("recipe") in _UP_TO or log.value("eval_data") == _SYNTHETIC
    )
    if is_limit and is_number(event.value) and event.value < wanted:
        return
    if not _is_same(key, event.value, wanted):
        yield log.error(
            f"{key} is {event.value!r}, its configuration says {env} = {wanted!r}", _AS_SET, event
        )


def _is_same(key: str, logged: Any, wanted: Any) -> bool:
    if key == "recipe" and wanted == MASKED_LM:
        return str(logged).startswith(MASKED_LM)
    if key == "precision":
        return str(logged).startswith(
            (str(wanted), f"torch.{_PRECISIONS.get(wanted, wanted)}")
        ) or "fp8" in str(wanted)
    if key == "ops":
        return str(wanted) in str(logged) or not str(logged).startswith("{")
    if key == "starting_weights":
        return Path(str(wanted)).name == logged
    if (
        key == "model_shape"
    ):  # an installed package has another place; model_shape_sha256 is checked, too
        return Path(str(wanted)).parts[-2:] == Path(str(logged)).parts[-2:]
    if isinstance(logged, bool) or isinstance(wanted, bool):
        return logged is wanted
    return bool(logged == wanted)


def _warmup(log: Log, settings: Mapping[str, Any]) -> Iterable[Complaint]:
    """Check the warm-up, configured as a number of steps or a fraction of all steps."""
    steps, part, limit = (
        settings.get(env) for env in ("WARMUP_STEPS", "WARMUP_PROPORTION", "MAX_STEPS")
    )
    wanted = steps
    source = f"WARMUP_STEPS = {steps}"
    if part and is_number(part) and is_number(limit) and is_number(limit * part):
        wanted = int(limit * part)
        source = f"WARMUP_PROPORTION = {part} of MAX_STEPS = {limit}"
    for key in ("opt_learning_rate_warmup_steps", "num_warmup_steps"):
        event = log.first(key)
        if event is not None and is_number(wanted) and event.value != wanted:
            yield log.error(
                f"{key} is {event.value!r}, its configuration says {source}", _AS_SET, event
            )


def _sources(log: Log, settings: Mapping[str, Any]) -> Iterable[Complaint]:
    """Check that exactly generated data is logged as synthetic and that evaluation data is not
    training data; note a run that found nothing to resume.
    """
    generated = settings.get("SYNTH_DATA")
    for event in (log.first("train_data"), log.first("eval_data")):
        if event is None or not isinstance(generated, bool):
            continue
        is_synthetic = event.value == _SYNTHETIC
        if is_synthetic != generated:
            text = (
                f"{event.key} is {event.value!r}, its configuration says SYNTH_DATA = {generated}"
            )
            yield log.error(text, _AS_SET, event)
    train = log.value("train_data")
    held_out = log.first("eval_data")
    if held_out is not None and train == held_out.value and str(train).startswith("sha256:"):
        yield log.error("eval_data is train_data, so nothing was held out", _HELD_OUT, held_out)
    event = log.first("configuration")
    if settings.get("RESUME") is True and not log.is_continued:
        text = (
            "its configuration says RESUME = True, but no checkpoint was found: started at step 0"
        )
        yield log.complaint(Outcome.NOTE, text, event=event)


def _batch(log: Log, settings: Mapping[str, Any]) -> Iterable[Complaint]:
    """Check that the nominal batch is packs per rank x ranks x sequences per pack,
    and has equal micro-batches.
    """
    event = log.first("global_batch_size")
    ranks = log.value("ranks")
    rows = settings.get("BATCHSIZE")
    packing = settings.get("PACKING_FACTOR")
    if (
        event
        and is_number(event.value)
        and is_number(ranks)
        and is_number(rows)
        and is_number(packing)
    ):
        wanted = rules.global_batch_size(int(rows), int(ranks), packing)
        if event.value != wanted:
            product = f"BATCHSIZE {rows} x {ranks} ranks x PACKING_FACTOR {packing}"
            text = f"global_batch_size is {event.value!r}, but {product} is {wanted}"
            yield log.error(text, _AS_SET, event)
    parts = settings.get("GRADIENT_STEPS")
    event = log.first("gradient_accumulation_steps")
    if is_number(rows) and is_number(parts) and parts >= 1 and rows % parts:
        yield log.error(f"BATCHSIZE {rows} cannot be {parts} equal micro-batches", _AS_SET, event)


def _ranks(log: Log, configuration: Event) -> Iterable[Complaint]:
    """Check ranks and exports against the config file's name (nodes x GPUs x batch x
    accumulation).
    """
    event = log.first("ranks")
    name = str(log.value("config_file"))
    if event is not None and (type(event.value) is not int or event.value < 1):
        yield log.error(f"ranks is {event.value!r}, not a count", OWN_FORM, event)
        return
    parts = parse_config_name(Path(name).name)
    if event is None or parts is None:
        return
    if parts.nodes * parts.ranks != event.value:
        # DGXNNODES and DGXNGPU may be set after sourcing,
        # and the configuration does not record them.
        yield log.warning(
            f"ranks is {event.value}, but {name} is for {parts.nodes} x {parts.ranks}",
            _AS_SET,
            event,
        )
    for env, wanted in (("BATCHSIZE", parts.batch), ("GRADIENT_STEPS", parts.accumulation)):
        entry = configuration.value.get(env, {})
        if str(entry.get("origin")).startswith(f"{name}:") and entry["value"] != wanted:
            yield log.error(
                f"{env} is {entry['value']!r}, but {name} is for {wanted}", _AS_SET, configuration
            )


def _time_limit(log: Log, settings: Mapping[str, Any]) -> Iterable[Complaint]:
    """Check that a run ends with the step that reaches MAX_SECONDS and one more evaluation."""
    limit = settings.get("MAX_SECONDS")
    start = log.first("run_start")
    stop = log.first("run_stop")
    if not is_number(limit) or start is None or stop is None:
        return
    took = [
        one.stop.time_ms - one.start.time_ms
        for one in evaluations_of(log)
        if one.start and one.stop
    ]
    seconds = (stop.time_ms - start.time_ms) / 1000
    if seconds > limit * _LATE_SHARE + _LATE_SECONDS + max(took, default=0) / 1000:
        yield log.error(
            f"the run took {seconds:.4g} s, its configuration says MAX_SECONDS = {limit:g}",
            _AS_SET,
            stop,
        )


def _totals(log: Log, settings: Mapping[str, Any]) -> Iterable[Complaint]:
    """Check that steps, samples and tokens fit: a pack holds 1 to MAX_SEQUENCES_PER_PACK
    sequences.
    """
    steps = log.value("steps")
    samples = log.value("train_samples")
    event = log.first("steps")
    rows = settings.get("BATCHSIZE")
    ranks = log.value("ranks")
    most = settings.get("MAX_SEQUENCES_PER_PACK")
    limit = settings.get("MAX_STEPS")
    length = log.value("max_sequence_length")
    tokens = log.first("tokens")
    if event is None or not is_number(steps) or not is_number(samples) or log.is_continued:
        return
    skipped = log.value("skipped_steps") or 0
    if is_number(skipped) and skipped > steps:
        yield log.error(
            f"skipped_steps is {skipped}, of {steps} steps", _AS_SET, log.first("skipped_steps")
        )
    if is_number(limit) and steps > limit:
        yield log.error(
            f"steps is {steps}, its configuration says MAX_STEPS = {limit}", _AS_SET, event
        )
    if is_number(rows) and is_number(ranks) and is_number(most):
        packs = rows * ranks
        # Its epochs end smaller.
        least = packs * (steps - skipped) if log.value("recipe") != "classification" else 0
        if not least <= samples <= packs * steps * most:
            text = (
                f"{steps} steps of {packs} packs of 1 to {most} sequences cannot be {samples} "
                "train_samples"
            )
            yield log.error(text, _AS_SET, event)
    if (
        tokens
        and is_number(length)
        and is_number(tokens.value)
        and not samples <= tokens.value <= samples * length
    ):
        yield log.error(
            f"tokens is {tokens.value}, of {samples} sequences of at most {length}", _AS_SET, tokens
        )
