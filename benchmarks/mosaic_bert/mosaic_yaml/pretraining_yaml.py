"""Convert the YAML of ``main.py`` to our settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mlbert.config.batch_growth import BatchGrowth
from mlbert.data.formats.streams import WEIGHTS, Stream, streams_of
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.host.errors import UserError
from mlbert.runs.starting_weights import newest_checkpoint
from mosaic_yaml import common_yaml
from mosaic_yaml.durations import Durations, unit_of
from mosaic_yaml.nested_yaml import Layer, Leaves, YamlValue

_DATASET = (
    "local remote split tokenizer_name max_seq_len long_texts mlm_probability mlm_probability_end "
    "mlm_schedule "
    "shuffle shuffle_seed shuffle_algo num_canonical_nodes partition_algo "
    "shuffle_block_size eos_token_id bos_token_id cache_limit "
    "predownload keep_zip keep_raw download_retry download_timeout validate_hash streaming"
)
_STREAM = (
    "local remote split proportion repeat choose keep_zip download_retry download_timeout "
    "validate_hash"
)
_LOADER = (
    "name drop_last num_workers pin_memory prefetch_factor persistent_workers timeout "
    "sequence_packing"
)
_GROWTH_START = "train_loader.batch_size_warmup_min_size"
_GROWTH_TOKENS = "train_loader.batch_size_warmup_tokens"
# Sequences in the tokens of a row, on average over a micro-batch: most for the memory, not for
# the text. Rows of 1024 tokens with 32 of them have sequences of 32 tokens.
SEQUENCES_IN_ROW = 32
KNOWN = (
    *common_yaml.COMMON,
    "data_local",
    "data_remote",
    "max_seq_len",
    "mlm_probability",
    "train_subset_num_batches",
    "count_padding_tokens",
    "reset_time",
    "restart_override",
    "model.disable_train_metrics",
    _GROWTH_START,
    _GROWTH_TOKENS,
    *(f"{loader}.{name}" for loader in ("train_loader", "eval_loader") for name in _LOADER.split()),
    *(
        f"{loader}.dataset.{name}"
        for loader in ("train_loader", "eval_loader")
        for name in _DATASET.split()
    ),
    *(
        f"{loader}.dataset.streams.*.{name}"
        for loader in ("train_loader", "eval_loader")
        for name in _STREAM.split()
    ),
)
NAMES: common_yaml.Names = {
    **common_yaml.NAMES,
    "input_dir": ("train_loader.dataset.local", "data_local"),
    "eval_dir": ("eval_loader.dataset.local", "data_local"),
    "data_remote": ("train_loader.dataset.remote", "data_remote"),
    "eval_remote": ("eval_loader.dataset.remote", "data_remote"),
    "data_streams": ("train_loader.dataset.streams",),
    "eval_streams": ("eval_loader.dataset.streams",),
    "max_seq_length": ("train_loader.dataset.max_seq_len", "max_seq_len"),
    "long_texts": ("train_loader.dataset.long_texts",),
    "tokenizer": ("train_loader.dataset.tokenizer_name", "tokenizer_name"),
    "masking_rate": ("train_loader.dataset.mlm_probability", "mlm_probability"),
    "masking_rate_end": ("train_loader.dataset.mlm_probability_end",),
    "masking_schedule": ("train_loader.dataset.mlm_schedule",),
    "eval_masking_rate": ("eval_loader.dataset.mlm_probability",),
    "shuffle": ("train_loader.dataset.shuffle_algo",),
    "shuffle_seed": ("train_loader.dataset.shuffle_seed",),
    "canonical_nodes": ("train_loader.dataset.num_canonical_nodes",),
    "cache_limit": ("train_loader.dataset.cache_limit",),
    "max_sequences_per_pack": ("train_loader.sequence_packing",),
    "batchsize_warmup_start": (_GROWTH_START,),
    "batchsize_warmup_steps": (_GROWTH_TOKENS,),
    "batchsize_warmup_tokens": (_GROWTH_TOKENS,),
    "eval_iter_steps": ("eval_interval",),
    "init_optimizer": ("load_path",),
    "extend_context": ("reset_time",),
    "step_tokens": ("count_padding_tokens",),
}
_DEFAULT_SPLITS = {"train_loader": "train", "eval_loader": "val"}

# (data sets, tokenizer, maximum length, split or truncate) -> sequences in an epoch
CountSequences = Callable[[Sequence[Stream], str, int, str], int]


def to_settings(
    leaves: Leaves, world_size: int, has_gpu: bool, count_sequences: CountSequences
) -> Layer:
    """Return settings with origins by field name.

    Args:
        leaves: leaves of the YAML.
        world_size: number of ranks.
        has_gpu: whether the run computes on GPUs.
        count_sequences: called only if a duration is in epochs.

    Raises:
        UserError: a value is missing or illegal.
    """
    layer = Layer({"recipe": ("masked_lm", "main.py"), "target_mlm_accuracy": (None, "main.py")})
    train, evaluation = (_dataset(leaves, loader) for loader in ("train_loader", "eval_loader"))
    length = leaves.number("train_loader.dataset.max_seq_len", leaves.number("max_seq_len", None))
    layer.put("max_seq_length", length)
    long_texts = leaves.choice("train_loader.dataset.long_texts", ("split", "truncate"), "split")
    layer.put("long_texts", long_texts)
    tokenizer = leaves.text(
        "train_loader.dataset.tokenizer_name", leaves.text("tokenizer_name", None)
    )
    for name in ("model.tokenizer_name", "eval_loader.dataset.tokenizer_name"):
        if (other := leaves.text(name, tokenizer)).value != tokenizer.value:
            reason = f"{name} is not {tokenizer.value}"
            raise UserError(
                "config.conflict", other.origin, reason, "Give the same tokenizer everywhere"
            )
    common_yaml.refuse_train_subset(leaves)
    layer.put("tokenizer", tokenizer)
    _add_masking(leaves, layer)
    _add_order(leaves, layer)
    per_step = common_yaml.add_batches(leaves, layer, world_size)
    counts_padding = leaves.flag("count_padding_tokens", True)
    packing = leaves.flag("train_loader.sequence_packing", False)
    if packing.value:
        layer.put("max_sequences_per_pack", SEQUENCES_IN_ROW, packing.origin)
    leaves.refuse("eval_loader.sequence_packing", ": an evaluation has no padding without it")

    def steps_per_epoch() -> int:
        if packing.value:
            raise UserError(
                "config.unsupported",
                packing.origin,
                "an epoch of packed sequences has no known number of steps",
                "Give durations in ba or tok",
            )
        count = count_sequences(
            train, str(tokenizer.value), int(length.value), str(long_texts.value)
        )
        if count < per_step:
            reason = f"its {count} sequences are fewer than a step's {per_step}"
            raise UserError("data.too-small", train[0].name, reason, "Lower the batch")
        return count // per_step

    step_tokens = None
    in_tokens = unit_of(leaves.text("max_duration", None).value) == "tok"
    counts_text = bool(packing.value and not counts_padding.value)
    if in_tokens and counts_text:
        step_tokens = per_step * int(length.value)
        layer.put("step_tokens", step_tokens, counts_padding.origin)
    growth = None
    if counts_text:
        _add_growth_with_tokens(leaves, layer, int(length.value), step_tokens)
    else:
        growth = _add_growth(leaves, layer, int(length.value), world_size)
    durations = Durations(
        per_step,
        int(length.value),
        steps_per_epoch,
        growth=growth,
        knows_tokens=bool(counts_padding.value or packing.value),
        is_packed=bool(packing.value),
        step_tokens=step_tokens,
        grows_with_tokens=step_tokens is None and "batchsize_warmup_tokens" in layer,
    )
    durations = common_yaml.add_schedule(leaves, layer, durations)
    interval = durations.read_interval(leaves, "eval_interval", "1000ba")
    samples = interval.value * per_step
    if durations.counts_steps:
        layer.put("eval_iter_steps", interval)
        samples = common_yaml.MOST_SAMPLES
    common_yaml.add_evaluation(leaves, layer, YamlValue(samples, interval.origin), world_size)
    common_yaml.add_optimizer(leaves, layer)
    common_yaml.add_model(leaves, layer, load_tokenizer(str(tokenizer.value)).vocab_size)
    _add_phase(leaves, layer)
    common_yaml.add_compute(leaves, layer, has_gpu)
    common_yaml.add_outputs(leaves, layer, durations)
    for name, folder, streams in (("data", "input_dir", train), ("eval", "eval_dir", evaluation)):
        origin = "train_loader.dataset" if name == "data" else "eval_loader.dataset"
        layer.put(folder, streams[0].folder, origin)
        layer.put(f"{name}_remote", streams[0].remote, origin)
        if len(streams) > 1 or streams[0].weight:
            mixed = [stream.model_dump(exclude_none=True) for stream in streams]
            layer.put(f"{name}_streams", json.dumps({"streams": mixed}), origin)
    return layer


def _add_phase(leaves: Leaves, layer: Layer) -> None:
    """Add how a phase starts from the run in ``load_path``.

    ``load_weights_only: false`` starts with its optimizer state, too, and ``reset_time: true`` at
    the beginning of the schedule, which is the only way here; then the rotary base may change.
    """
    start = leaves.optional_text("load_path")
    weights_only = leaves.flag("load_weights_only", True)
    new_time = leaves.flag("reset_time", False)
    leaves.flag("restart_override", False)
    if start is None:
        return
    if not weights_only.value:
        if not new_time.value:
            reason = "load_weights_only is false, and reset_time is not true"
            remedy = "Set reset_time=true for a new phase; autoresume=true continues a run"
            raise UserError("config.conflict", weights_only.origin, reason, remedy)
        checkpoint = str(newest_checkpoint(start))
        layer.put("init_checkpoint", checkpoint, "load_path")
        layer.put("init_optimizer", checkpoint, "load_path")
    layer.put("extend_context", new_time.value, new_time.origin)


def _add_growth(
    leaves: Leaves, layer: Layer, row_tokens: int, world_size: int
) -> BatchGrowth | None:
    """Add a batch-size warm-up whose tokens are those of full rows, and return it; None if there
    is none.

    Each batch size has the same number of steps, so that they are on average in the middle between
    the first and the last but one.
    """
    ends = _ends_of_growth(leaves, layer)
    if ends is None:
        return None
    first, last = ends
    tokens = leaves.text(_GROWTH_TOKENS, None)
    mean = (first + last - 1) / 2
    rows_of_rank = Durations(world_size, row_tokens, lambda: 1)
    steps = math.ceil(rows_of_rank.interval(_GROWTH_TOKENS, tokens.value) / mean)
    layer.put("batchsize_warmup_steps", steps, tokens.origin)
    return BatchGrowth(first, last, steps)


def _add_growth_with_tokens(
    leaves: Leaves, layer: Layer, row_tokens: int, step_tokens: int | None
) -> None:
    """Add a batch-size warm-up, if there is one, whose tokens are counted without padding.

    With ``step_tokens`` its length is in steps of so many tokens, as that of the training.
    """
    if _ends_of_growth(leaves, layer) is None:
        return
    tokens = leaves.text(_GROWTH_TOKENS, None)
    if step_tokens is not None:
        full_steps = Durations(step_tokens // row_tokens, row_tokens, lambda: 1)
        steps = full_steps.interval(_GROWTH_TOKENS, tokens.value)
        layer.put("batchsize_warmup_steps", steps, tokens.origin)
        return
    if unit_of(tokens.value) != "tok":
        reason = f"{_GROWTH_TOKENS} is {tokens.value}, not a number of tokens"
        raise UserError("config.value", tokens.origin, reason, "Write it in tok, such as 50e9tok")
    count = Durations(1, 1, lambda: 1).interval(_GROWTH_TOKENS, tokens.value)
    layer.put("batchsize_warmup_tokens", count, tokens.origin)


def _ends_of_growth(leaves: Leaves, layer: Layer) -> tuple[int, int] | None:
    """Add the first batch of a rank in a batch-size warm-up; return it and the full one.

    None if the batch does not grow.
    """
    if not leaves.is_given(_GROWTH_START) and not leaves.is_given(_GROWTH_TOKENS):
        return None
    start = leaves.number(_GROWTH_START, None)
    last = int(str(layer["train_batch_size"][0]))
    if start.value != int(start.value) or not 1 <= start.value <= last:
        reason = f"{_GROWTH_START} is {start.value}, but a rank has {last} sequences per step"
        remedy = f"Give a whole number from 1 to {last}"
        raise UserError("config.range", start.origin, reason, remedy)
    if start.value == last:
        leaves.text(_GROWTH_TOKENS, None)
        return None
    layer.put("batchsize_warmup_start", int(start.value), start.origin)
    return int(start.value), last


def _dataset(leaves: Leaves, loader: str) -> Sequence[Stream]:
    """Return a loader's sets: the folder of each in which its split is, where it is a copy of,
    and its weight.
    """
    leaves.choice(f"{loader}.name", ("text",), "text")
    above = f"{loader}.dataset.streams."
    names = list(
        dict.fromkeys(
            leaf.removeprefix(above).split(".")[0] for leaf in leaves if leaf.startswith(above)
        )
    )
    if not names:
        split = str(leaves.text(f"{loader}.dataset.split", _DEFAULT_SPLITS[loader]).value)
        local = leaves.text(f"{loader}.dataset.local", leaves.text("data_local", None)).value
        return [
            _stream(
                str(local), leaves.optional_text(f"{loader}.dataset.remote", "data_remote"), split
            )
        ]
    found = []
    for name in names:
        folder = leaves.text(f"{above}{name}.local", None).value
        of_split = leaves.optional_text(f"{above}{name}.split", f"{loader}.dataset.split") or ""
        stream = _stream(str(folder), leaves.optional_text(f"{above}{name}.remote"), of_split)
        given = [weight for weight in WEIGHTS if leaves.is_given(f"{above}{name}.{weight}")]
        weights = {weight: leaves.number(f"{above}{name}.{weight}", None).value for weight in given}
        found.append({"local": str(stream.folder.absolute()), "remote": stream.remote, **weights})
    return streams_of(f"{loader}.dataset.streams", json.dumps({"streams": found}), Path())


def _stream(local: str, remote: str | None, split: str) -> Stream:
    address = (
        None if remote is None or remote == local else f"{remote.rstrip('/')}/{split}".rstrip("/")
    )
    return Stream(local=str(Path(local) / split), remote=address)


def _add_masking(leaves: Leaves, layer: Layer) -> None:
    rate = leaves.number(
        "train_loader.dataset.mlm_probability", leaves.number("mlm_probability", 0.15)
    )
    layer.put("masking_rate", rate)
    if leaves.is_given("train_loader.dataset.mlm_probability_end"):
        layer.put(
            "masking_rate_end", leaves.number("train_loader.dataset.mlm_probability_end", None)
        )
        known = ("constant", "linear", "cosine", "step")
        layer.put(
            "masking_schedule", leaves.choice("train_loader.dataset.mlm_schedule", known, "linear")
        )
    layer.put("eval_masking_rate", leaves.number("eval_loader.dataset.mlm_probability", 0.15))


def _add_order(leaves: Leaves, layer: Layer) -> None:
    if leaves.flag("train_loader.dataset.shuffle", False).value:
        known = ("naive", "py1s", "py2s", "py1b", "py1br", "py1e")
        shuffle = leaves.choice("train_loader.dataset.shuffle_algo", known, "py1s")
        layer.put("shuffle", shuffle)
        block = leaves.get("train_loader.dataset.shuffle_block_size")
        if block and block.value is not None and shuffle.value in ("py1b", "py1br", "py1e"):
            reason = f"shuffle_block_size of {shuffle.value} is always Streaming's default"
            raise UserError("config.unsupported", block.origin, reason, "Remove it")
    layer.put("shuffle_seed", leaves.number("train_loader.dataset.shuffle_seed", 9176))
    layer.put("canonical_nodes", leaves.number("train_loader.dataset.num_canonical_nodes", 128))
    limit = leaves.get("train_loader.dataset.cache_limit")
    if limit is not None and limit.value is not None:
        layer.put("cache_limit", replace(limit, value=_gigabytes(limit)))
    for loader in ("train_loader", "eval_loader"):
        leaves.choice(f"{loader}.dataset.partition_algo", ("orig",), "orig")


def _gigabytes(limit: YamlValue) -> float:
    """Return a number of bytes, or Streaming's text such as 100gb, in units of 10^9 bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kmgtp]?b?)", str(limit.value).strip().lower())
    if found is None or isinstance(limit.value, bool):
        reason = f"'{limit.value}' is not a number of bytes"
        raise UserError("config.value", limit.origin, reason, "Write for example 100gb")
    power = " kmgtp".index(found[2].removesuffix("b") or " ")
    return float(found[1]) * 1024**power / 1e9
