"""Convert the sections shared by all programs' YAML files to our settings: model, optimizer,
schedule, outputs.

Also finds the shape and vocabulary of starting weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import hub_problem
from mlbert.data.formats.tokenizer_files import TOKENIZER_FILES, find_vocabulary
from mlbert.host.errors import UserError
from mlbert.host.provenance import shipped
from mlbert.models.weights.huggingface import obstacle, read_config
from mlbert.models.weights.weight_files import read_weights
from mlbert.recipes.sections import settings_by_key
from mlbert.runs.starting_weights import local_copy
from mosaic_yaml import flex_bert
from mosaic_yaml.durations import Durations
from mosaic_yaml.nested_yaml import Layer, Leaves, YamlValue
from mosaic_yaml.output_folder import find_output_folder

# Files of a model that are downloaded from Hugging Face's hub.
HUB_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    *TOKENIZER_FILES,
)

CONFIGS = shipped("configs")
MOST_SAMPLES = 10**15  # for limits and intervals that steps give in their place
# pretrained_model_name -> shape; MosaicBERT's differences are added as options.
SHAPES = {
    "bert-base-uncased": "base.json",
    "bert-large-uncased": "large.json",
    "prajjwal1/bert-tiny": "tiny.json",
}
MODELS = ("hf_bert", "mosaic_bert", flex_bert.NAME)
_MOSAIC_OPTIONS = "position_embedding_type=alibi gated_mlp=true attention_probs_dropout_prob=0.0"
# Transformers name -> ours.
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
# Without an effect here; the last one is a published file's spelling,
# without an effect in transformers either.
IGNORED_OPTIONS = (
    "alibi_starting_size",
    "pad_token_id",
    "use_cache",
    "model_type",
    "max_position_embedding",
)

# Composer's callbacks that only watch a run.
_MONITORS = ("activation", "lr", "memory", "nan", "optimizer", "speed", "system_metrics")
_CALLBACKS = (
    *(f"{name}_monitor" for name in _MONITORS),
    "runtime_estimator",
    "scheduled_gc",
    "oom_observer",
    "dataloader_speed",
    "packing_efficiency",
    "log_grad_norm",
)
# Evaluations without a better one until a fine-tuning stops; the best weights are kept.
PATIENCE = "callbacks.early_stopper.patience"
WANDB = ("entity", "name", "group", "tags")
SHARED = (  # with glue.py
    *(
        f"algorithms.{one}.**"
        for one in ("fused_layernorm", "low_precision_layernorm", "alibi", "gated_linear_units")
    ),
    *(f"algorithms.gradient_clipping.{name}" for name in ("clipping_type", "clipping_threshold")),
    *(f"callbacks.{name}.**" for name in (*_CALLBACKS, "health_checker", "memory_snapshot")),
    "loggers.tensorboard.log_dir",
    "loggers.wandb.init_kwargs.**",
    *(f"loggers.wandb.{name}" for name in ("project", *WANDB)),
    "loggers.mlflow.experiment_name",
)
COMMON = (
    *SHARED,
    "run_name",
    "seed",
    "precision",
    "tokenizer_name",
    "max_duration",
    "eval_interval",
    "device",
    "global_train_batch_size",
    "device_eval_batch_size",
    "global_eval_batch_size",
    "device_train_microbatch_size",
    "eval_subset_num_batches",
    "progress_bar",
    "log_to_console",
    "console_log_interval",
    "python_log_level",
    "save_folder",
    "save_interval",
    "save_num_checkpoints_to_keep",
    "save_overwrite",
    "autoresume",
    "load_path",
    "load_weights_only",
    *(
        f"model.{name}"
        for name in ("name", "use_pretrained", "pretrained_model_name", "tokenizer_name")
    ),
    "model.model_config.**",
    "model.pretrained_checkpoint",
    "model.gradient_checkpointing",
    *(
        f"scheduler.{name}"
        for name in ("name", "t_warmup", "t_max", "alpha_f", "t_decay", "milestones", "gamma")
    ),
    *(
        f"optimizer.{name}"
        for name in (
            "name",
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "filter_bias_norm_wd",
            "log_grad_norm",
        )
    ),
)
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "linear_decay_with_warmup": "linear",
    "cosine_with_warmup": "cosine",
    "warmup_stable_decay": "wsd",
    "one_minus_sqrt": "wsd_sqrt",
    "multistep_with_warmup": "multistep",
}

# Schedulers with a plateau, and the length of their decay if none is given.
_DECAY_AT_THE_END = {"warmup_stable_decay": "0.1dur", "one_minus_sqrt": "1dur"}
_DECAYING = ("linear_decay_with_warmup", "cosine_with_warmup", *_DECAY_AT_THE_END)

NAMES: Names = {
    "run_name": ("run_name",),
    "output_dir": ("save_folder", "run_name"),
    "resume": ("autoresume",),
    "save_checkpoint_steps": ("save_interval",),
    "keep_checkpoints": ("save_num_checkpoints_to_keep",),
    "log_freq": ("console_log_interval",),
    "tensorboard_dir": ("loggers.tensorboard.log_dir",),
    "wandb_project": ("loggers.wandb.project",),
    "wandb_options": ("loggers.wandb.init_kwargs",),
    "mlflow_experiment": ("loggers.mlflow.experiment_name",),
    "train_batch_size": ("global_train_batch_size",),
    "gradient_accumulation_steps": ("device_train_microbatch_size",),
    "auto_micro_batch": ("device_train_microbatch_size",),
    "eval_batch_size": ("global_eval_batch_size", "device_eval_batch_size"),
    "num_eval_examples": ("eval_subset_num_batches",),
    "eval_iter_samples": ("eval_interval",),
    "eval_iter_start_samples": ("eval_interval",),
    "max_steps": ("max_duration",),
    "max_samples_termination": ("max_duration",),
    "schedule": ("scheduler.name",),
    "warmup_steps": ("scheduler.t_warmup",),
    "warmup_proportion": ("scheduler.t_warmup",),
    "end_lr": ("scheduler.alpha_f",),
    "lr_decay_end": ("scheduler.t_max",),
    "lr_decay_steps": ("scheduler.t_decay",),
    "lr_decay_proportion": ("scheduler.t_decay",),
    "lr_milestones": ("scheduler.milestones",),
    "lr_gamma": ("scheduler.gamma",),
    "optimizer": ("optimizer.name",),
    "learning_rate": ("optimizer.lr",),
    "opt_lamb_beta_1": ("optimizer.betas",),
    "opt_lamb_beta_2": ("optimizer.betas",),
    "opt_epsilon": ("optimizer.eps",),
    "weight_decay_rate": ("optimizer.weight_decay",),
    "decay_all": ("optimizer.filter_bias_norm_wd",),
    "max_grad_norm": ("algorithms.gradient_clipping.clipping_threshold",),
    "model_implementation": ("model.name",),
    "bert_config_file": ("model.pretrained_model_name",),
    "model_options": ("model.model_config",),
    "init_checkpoint": ("load_path", "model.pretrained_checkpoint"),
    "precision": ("precision",),
    "seed": ("seed",),
}
# Composer's name -> ours.
_PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "amp_bf16": "bf16",
    "amp": "fp16",
    "amp_fp16": "fp16",
    "fp8": "fp8",
    "amp_fp8": "fp8",
    "auto": "auto",
}
# Our value -> theirs, by key, for settings whose values have other names.
_PUBLIC_VALUES: Mapping[str, Mapping[str, str]] = {
    "resume": {"1": "true", "0": "false"},
    "auto_micro_batch": {"1": "auto"},
    "model_implementation": {"mlbert": "mosaic_bert", "huggingface": "hf_bert"},
    "schedule": {ours: theirs for theirs, ours in _SCHEDULES.items()},
    "precision": {"bf16": "amp_bf16", "fp16": "amp_fp16", "fp8": "amp_fp8"},
}


def start_path(leaves: Leaves) -> Path | str | None:
    """Return the weights in ``load_path``, ``model.pretrained_checkpoint`` or
    ``model.use_pretrained``, or None.
    """
    if (given := leaves.optional_text("load_path", "model.pretrained_checkpoint")) is not None:
        return given
    if leaves.flag("model.use_pretrained", False).value:
        return hub_folder(str(leaves.text("model.pretrained_model_name", None).value))
    return None


def hub_folder(name: str) -> Path:
    """Return the cached folder of a Hugging Face hub model.

    Raises UserError if it cannot be downloaded.
    """
    problem = hub_problem()
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name, allow_patterns=[*HUB_FILES], local_files_only=problem is not None
            )
        )
    except Exception as error:  # huggingface_hub raises many types
        reason = f"cannot be downloaded: {problem or type(error).__name__}"
        remedy = "Give load_path=WEIGHTS of local weights"
        raise UserError(
            "network.unreachable", f"model.use_pretrained of {name}", reason, remedy
        ) from None


def find_start(start: Path | str) -> tuple[BertConfig | None, Path | None]:
    """Return shape and vocabulary of a run folder, its ``weights/``, a Hugging Face folder or a
    checkpoint file, or at the address of one; each is None if not available.

    Raises UserError if the path does not exist or is damaged.
    """
    source = local_copy(start)
    if not source.exists():
        remedy = "Name a run folder, its weights/, a Hugging Face folder, or a checkpoint"
        raise UserError("file.missing", source, "does not exist", remedy)
    folder = source if source.is_dir() else source.parent
    if (source / "weights").is_dir():
        folder = source / "weights"
    vocabulary = find_vocabulary(folder)
    shape: BertConfig | None = None
    if source.suffix == ".pt":
        shape = read_weights(source).shape
    elif (folder / "bert_config.json").is_file():
        shape = BertConfig.from_json(folder / "bert_config.json")
    elif (folder / "config.json").is_file():
        shape = read_config(folder / "config.json")
    return shape, vocabulary if vocabulary.is_file() else None


# What a user writes for a setting, by its key; of several names the first that the file has,
# see `Leaves.typed_name`.
Names = Mapping[str, tuple[str, ...]]


def names_for_errors(leaves: Leaves, names: Names) -> dict[str, str]:
    """Return what the user of a YAML file writes for each setting,
    for `mlbert.host.errors.public_names`.
    """
    known = settings_by_key()
    found = dict[str, str]()
    for key, alternatives in names.items():
        export = known[key].env
        name = leaves.typed_name(*alternatives)
        found[export] = name
        for ours, theirs in _PUBLIC_VALUES.get(key, {}).items():
            found[f"{export}={ours}"] = f"{name}={theirs}"
    found["MODEL_OPTIONS="] = "model.model_config."
    found["LOGDIR or EXPERIMENT"] = found["LOGDIR"]
    return found


def add_batches(leaves: Leaves, layer: Layer, world_size: int) -> int:
    """Add batch size and micro-batches per rank; return the sequences per step over all ranks."""
    batch = leaves.number("global_train_batch_size", None)
    of_rank, rest = divmod(batch.value, world_size)
    if rest or of_rank < 1 or of_rank != int(of_rank):
        reason = f"global_train_batch_size {batch.value} is not divisible by the {world_size} ranks"
        raise UserError("config.conflict", batch.origin, reason, f"Use a multiple of {world_size}")
    layer.put("train_batch_size", int(of_rank), batch.origin)
    part = leaves.text("device_train_microbatch_size", "auto")
    if part.value == "auto":
        layer.put("auto_micro_batch", True, part.origin)
        return int(batch.value)
    size = leaves.number("device_train_microbatch_size", None).value
    if size < 1 or size != int(size):
        reason = f"device_train_microbatch_size {size} is not a number of sequences"
        raise UserError("config.range", part.origin, reason, "Use 1 or more")
    parts = math.ceil(of_rank / size)
    while of_rank % parts:  # our micro-batches have equal size
        parts += 1
    layer.put("gradient_accumulation_steps", parts, part.origin)
    return int(batch.value)


def add_schedule(leaves: Leaves, layer: Layer, durations: Durations) -> Durations:
    """Add training length and learning rate; return durations that know the training length."""
    steps = durations.read(leaves, "max_duration", None)
    layer.put("max_steps", steps)
    samples = steps.value * durations.sequences_per_step
    if durations.counts_steps:
        samples = MOST_SAMPLES
    layer.put("max_samples_termination", samples, steps.origin)
    durations = replace(durations, max_steps=steps.value)
    name = leaves.choice("scheduler.name", tuple(_SCHEDULES), "linear_decay_with_warmup")
    layer.put("schedule", _SCHEDULES[name.value], name.origin)
    # Shares of the training stay shares, so that a run that is extended has the longer schedule,
    # as in Composer.
    warmup = leaves.text("scheduler.t_warmup", "0ba")
    share = durations.share(warmup.value)
    if share is None:
        layer.put("warmup_steps", durations.read(leaves, "scheduler.t_warmup", "0ba", least=0))
    else:
        layer.put("warmup_proportion", share, warmup.origin)
    layer.put("lr_first_step", -1)
    if name.value in _DECAYING:
        end = leaves.number("scheduler.alpha_f", 0.0)
        layer.put("end_lr", end.value * leaves.number("optimizer.lr", None).value, end.origin)
        decay_end = leaves.text("scheduler.t_max", "1dur")
        if durations.share(decay_end.value) == 1:
            layer.put("lr_decay_end", None, decay_end.origin)
        else:
            layer.put("lr_decay_end", durations.read(leaves, "scheduler.t_max", "1dur"))
    if name.value in _DECAY_AT_THE_END:
        _add_decay(leaves, layer, durations, _DECAY_AT_THE_END[name.value])
    if name.value == "multistep_with_warmup":
        given = leaves.sequence("scheduler.milestones", None, "[400ba, 600ba]")
        milestones = [durations.steps("scheduler.milestones", text) for text in given.value]
        layer.put("lr_milestones", ",".join(map(str, milestones)), given.origin)
        layer.put("lr_gamma", leaves.number("scheduler.gamma", 0.1))
    return durations


def _add_decay(leaves: Leaves, layer: Layer, durations: Durations, default: str) -> None:
    """Add the decay after a plateau; one of length 0 leaves the rate constant."""
    name = "scheduler.t_decay"
    decay = leaves.text(name, default)
    share = durations.share(decay.value)
    if share is not None:
        layer.put("lr_decay_proportion", share, decay.origin)
        return
    steps = durations.read_last(leaves, name, default, least=0)
    if steps.value:
        layer.put("lr_decay_steps", steps)
        return
    layer.put("schedule", "constant", decay.origin)
    del layer["end_lr"]
    del layer["lr_decay_end"]


def add_evaluation(leaves: Leaves, layer: Layer, interval: YamlValue, world_size: int) -> None:
    """Add the evaluation schedule; ``interval`` is in training sequences."""
    layer.put("eval_iter_samples", interval)
    layer.put("eval_iter_start_samples", interval)
    batch = leaves.number("device_eval_batch_size", 128)
    if leaves.is_given("global_eval_batch_size"):
        of_all = leaves.number("global_eval_batch_size", None)
        batch = YamlValue(math.ceil(of_all.value / world_size), of_all.origin)
    layer.put("eval_batch_size", batch)
    subset = leaves.number("eval_subset_num_batches", -1)
    if subset.value > 0:
        layer.put("num_eval_examples", int(subset.value * batch.value), subset.origin)


def refuse_train_subset(leaves: Leaves) -> None:
    """Raise UserError if train_subset_num_batches is set."""
    if (subset := leaves.number("train_subset_num_batches", -1)).value > 0:
        reason = "train_subset_num_batches is not supported"
        raise UserError("config.unsupported", subset.origin, reason, "Set max_duration=...ba")


def add_optimizer(leaves: Leaves, layer: Layer) -> None:
    """Add the optimizer's settings and the gradient norm limit."""
    known = ("decoupled_adamw", "decoupled_stableadamw", "stableadamw")
    layer.put("optimizer", leaves.choice("optimizer.name", known, known[0]))
    layer.put("learning_rate", leaves.number("optimizer.lr", None))
    betas = leaves.sequence(
        "optimizer.betas", YamlValue([0.9, 0.95], "default"), "[0.9, 0.98]", size=2
    )
    layer.put("opt_lamb_beta_1", betas.value[0], betas.origin)
    layer.put("opt_lamb_beta_2", betas.value[1], betas.origin)
    layer.put("opt_epsilon", leaves.number("optimizer.eps", 1e-8))
    layer.put("weight_decay_rate", leaves.number("optimizer.weight_decay", 1e-5))
    if leaves.is_given("optimizer.filter_bias_norm_wd"):
        without = leaves.flag("optimizer.filter_bias_norm_wd", False)
        layer.put("decay_all", not without.value, without.origin)
    if "algorithms.gradient_clipping.clipping_threshold" in leaves:
        leaves.choice("algorithms.gradient_clipping.clipping_type", ("norm",), "norm")
        layer.put(
            "max_grad_norm", leaves.number("algorithms.gradient_clipping.clipping_threshold", None)
        )


def add_model(
    leaves: Leaves, layer: Layer, vocab_size: int, start_shape: BertConfig | None = None
) -> None:
    """Add the model's shape, implementation and starting weights.

    If model.name is not given, weights of the shape ``start_shape`` choose the implementation that
    supports them.
    """
    why_not = None if start_shape is None else obstacle(start_shape)
    name = leaves.choice("model.name", MODELS, "hf_bert" if why_not is None else "mosaic_bert")
    if name.value == flex_bert.NAME:
        _add_flex_bert(leaves, layer, name)
        return
    is_mosaic = name.value == "mosaic_bert"
    if why_not is not None and not is_mosaic:
        reason = f"model.name {name.value!r} does not support the weights: {why_not}"
        raise UserError("model.unsupported", name.origin, reason, "Set model.name=mosaic_bert")
    layer.put("model_implementation", "mlbert" if is_mosaic else "huggingface", name.origin)
    shape = leaves.text("model.pretrained_model_name", "bert-base-uncased")
    if shape.value not in SHAPES and not Path(str(shape.value)).is_file():
        reason = f"model.pretrained_model_name {shape.value!r} is unknown"
        raise UserError(
            "config.choice",
            shape.origin,
            reason,
            "Use one of the choices, or the path of a bert_config.json",
            SHAPES,
        )
    layer.put(
        "bert_config_file",
        CONFIGS / SHAPES[shape.value] if shape.value in SHAPES else shape,
        shape.origin,
    )
    options: dict[str, object] = {"hidden_act": "gelu", "vocab_size": vocab_size}
    if is_mosaic:
        options |= dict(word.split("=") for word in _MOSAIC_OPTIONS.split())
    options |= {
        name: value for name, value in model_config(leaves).items() if name not in IGNORED_OPTIONS
    }
    if (activation := options["hidden_act"]) not in _ACTIVATIONS:
        reason = f"model.model_config.hidden_act {activation!r} is unknown"
        origin = leaves["model.model_config"].origin
        raise UserError("config.choice", origin, reason, "Use a valid one", _ACTIVATIONS)
    options["hidden_act"] = _ACTIVATIONS[str(activation)]
    layer.put(
        "model_options",
        " ".join(f"{key}={value}" for key, value in options.items()),
        "model.model_config",
    )
    _add_start(leaves, layer)
    for algorithm in ("alibi", "gated_linear_units"):
        if not is_mosaic and any(key.startswith(f"algorithms.{algorithm}") for key in leaves):
            reason = f"algorithms.{algorithm} is part of mosaic_bert"
            raise UserError("config.conflict", leaves.path, reason, "Use model.name=mosaic_bert")


def _add_flex_bert(leaves: Leaves, layer: Layer, name: YamlValue) -> None:
    """Add ModernBERT, whose shape is all in model.model_config."""
    layer.put("model_implementation", "mlbert", name.origin)
    # Only to begin with: every option of the shape is given.
    layer.put("bert_config_file", CONFIGS / SHAPES["bert-base-uncased"], name.origin)
    leaves.text("model.pretrained_model_name", "bert-base-uncased")
    if not leaves.is_given("model.model_config"):
        remedy = "Give the model_config of ModernBERT's YAML"
        raise UserError("config.missing", name.origin, "model.model_config is not set", remedy)
    options = flex_bert.model_options(leaves["model.model_config"])
    layer.put("model_options", options, "model.model_config")
    _add_start(leaves, layer)


def _add_start(leaves: Leaves, layer: Layer) -> None:
    """Add the starting weights, if there are any."""
    leaves.refuse("model.gradient_checkpointing")
    if (start := start_path(leaves)) is not None:
        layer.put("init_checkpoint", start, "load_path")


def ignored_options(leaves: Leaves) -> list[str]:
    """Return the names in ``model.model_config`` that have no effect here."""
    name = leaves.text("model.name", MODELS[0]).value
    ignored = flex_bert.IGNORED if name == flex_bert.NAME else IGNORED_OPTIONS
    return [option for option in model_config(leaves) if option in ignored]


def model_config(leaves: Leaves) -> Mapping[str, object]:
    """Return the mapping ``model.model_config``, empty if it is not given."""
    return leaves["model.model_config"].value if leaves.is_given("model.model_config") else {}


def add_compute(leaves: Leaves, layer: Layer, has_gpu: bool) -> None:
    """Add precision and seed.

    Composer uses float32 on a CPU; we use bf16 if the CPU has bf16 matrix products.
    """
    precision = leaves.choice("precision", tuple(_PRECISIONS), "amp_bf16" if has_gpu else "fp32")
    wanted = _PRECISIONS[precision.value]
    layer.put(
        "precision", wanted if has_gpu or wanted in ("fp32", "auto") else "auto", precision.origin
    )
    layer.put("seed", leaves.number("seed", 17))


def add_outputs(leaves: Leaves, layer: Layer, durations: Durations) -> None:
    """Add run folder, checkpoints, console and loggers."""
    assert durations.max_steps is not None, "of the whole training"
    layer.put("run_name", leaves.text("run_name", "bert"))
    output = find_output_folder(leaves, durations.max_steps, durations.step_tokens)
    if leaves.optional_text("save_folder") is None:
        layer.put("output_dir", output.base, "run_name")
        layer.put("experiment", output.experiment)
    else:
        layer.put("output_dir", output.base, "save_folder")
        interval = durations.read_interval(leaves, "save_interval", "1000ba")
        keep = leaves.number("save_num_checkpoints_to_keep", -1)
        layer.put("save_checkpoint_steps", interval.value if keep.value else 0, interval.origin)
        layer.put("keep_checkpoints", int(keep.value) if keep.value > 0 else 10**6, keep.origin)
    layer.put("resume", output.resume, leaves.flag("autoresume", True).origin)
    layer.put("log_freq", durations.read_interval(leaves, "console_log_interval", "1ba"))
    if "loggers.tensorboard.log_dir" in leaves or "loggers.tensorboard" in leaves:
        layer.put(
            "tensorboard_dir",
            Path(leaves.optional_text("loggers.tensorboard.log_dir") or "tensorboard"),
        )
    if "loggers.mlflow.experiment_name" in leaves:
        name = leaves.text("loggers.mlflow.experiment_name", "mlbert")
        layer.put("mlflow_experiment", name)
    if any(leaf.startswith("loggers.wandb") and leaves.is_given(leaf) for leaf in leaves):
        layer.put("wandb_project", leaves.text("loggers.wandb.project", "uncategorized"))
        given = {
            one: leaves[f"loggers.wandb.{one}"].value
            for one in WANDB
            if leaves.is_given(f"loggers.wandb.{one}")
        }
        more = leaves.get("loggers.wandb.init_kwargs")
        if options := given | ((more and more.value) or {}):
            layer.put("wandb_options", json.dumps(options), "loggers.wandb")
