"""The absl flags of Google's `run_pretraining.py` and the settings that they map to.

A flag that is given overrides a sourced config. One that is not given has its published default,
unless a config is sourced. Flags count global batches and steps; settings count rows per replica
and samples. Every other setting that this implementation reads is also a flag, named by its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from mlbert.config.resolution import Resolved
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.loading.config import DataConfig
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.mlperf import rules
from mlbert.recipes.sections import peek, resolve, settings_by_key
from tf2_bert.recipe import RECIPE

FLAGS = flags.FLAGS

# Published flag -> (key of the setting, type, default, short name).
_DIRECT: Mapping[str, tuple[str, Any, Any, str | None]] = {
    "bert_config_file": ("bert_config_file", str, None, None),
    "init_checkpoint": ("init_checkpoint", str, None, None),
    "input_files": ("input_files", str, None, None),
    "model_dir": ("output_dir", str, "/tmp", "md"),
    "max_seq_length": ("max_seq_length", int, 128, None),
    "max_predictions_per_seq": ("max_predictions_per_seq", int, 20, None),
    "num_accumulation_steps": ("gradient_accumulation_steps", int, 1, None),
    "learning_rate": ("learning_rate", float, 5e-5, None),
    "warmup_steps": ("warmup_steps", float, 10_000.0, None),
    "optimizer_type": ("optimizer", str, "adamw", None),
    "beta_1": ("opt_lamb_beta_1", float, 0.9, None),
    "beta_2": ("opt_lamb_beta_2", float, 0.999, None),
    "epsilon": ("opt_epsilon", float, 1e-6, None),
    "weight_decay_rate": ("weight_decay_rate", float, 0.01, None),
    "num_eval_samples": ("num_eval_examples", int, 10_000, None),
    "stop_threshold": ("target_mlm_accuracy", float, 0.712, None),
    "do_eval": ("do_eval", bool, False, None),
    "dtype": ("precision", str, "fp32", "dt"),
    "distribution_strategy": ("distribution_strategy", str, "mirrored", "ds"),
    "all_reduce_alg": ("all_reduce_alg", str, None, "ara"),
    "explicit_allreduce": ("explicit_allreduce", bool, False, None),
    "allreduce_bytes_per_pack": ("allreduce_bytes_per_pack", int, 0, None),
    "scale_loss": ("scale_loss", bool, False, None),
    "device_warmup": ("device_warmup", bool, False, None),
    "steps_per_loop": ("steps_per_loop", int, 200, None),
    "run_eagerly": ("run_eagerly", bool, False, None),
    "enable_xla": ("enable_xla", bool, False, None),
    "tpu": ("tpu", str, None, None),
}
# Published flags that are converted to settings in other units.
_CONVERTED: Mapping[str, tuple[Any, Any, str]] = {
    "train_batch_size": (int, 32, "Rows per step, over all replicas and accumulation steps."),
    "eval_batch_size": (int, 32, "Rows per evaluation batch, over all replicas."),
    "num_steps_per_epoch": (
        int,
        1000,
        "Steps per epoch; times num_train_epochs, this is the length of the schedule.",
    ),
    "num_train_epochs": (int, 3, "Epochs in the schedule."),
    "stop_steps": (int, None, "Training stops at this step (default: the end of the schedule)."),
    "steps_between_eval": (int, 10_000, "Steps between evaluations."),
    "steps_before_eval_start": (int, 0, "Steps before the first evaluation."),
    "loss_scale": (str, None, "Loss scale for fp16: dynamic, or a fixed number."),
    "enable_checkpoint_and_summary": (
        bool,
        False,
        "Save a checkpoint after each loop, and write TensorBoard files.",
    ),
}
MAX_ROWS = 1_000_000  # beyond this, TensorFlow fails with unhelpful errors
_LENGTH = ("num_steps_per_epoch", "num_train_epochs")
_BETWEEN = ("steps_between_eval", "steps_before_eval_start")
_WIDTHS = ("max_seq_length", "max_predictions_per_seq")
_SHORT = {"loss_scale": "ls"}
# Published flags of the process rather than the run,
# then those of features that are not implemented.
_PROCESS: Mapping[str, tuple[Any, Any, str]] = {
    "num_gpus": (int, 1, "GPUs to use; without a GPU, the CPU is split into this many devices."),
    "worker_hosts": (str, None, "Comma-separated host:port of each multi_worker_mirrored worker."),
    "task_index": (int, -1, "Index of this process in worker_hosts."),
    "model_export_path": (str, None, "Folder for a copy of the final weights."),
    "tf_gpu_thread_mode": (
        str,
        None,
        "TF_GPU_THREAD_MODE of the process: gpu_private, gpu_shared or global.",
    ),
    "per_gpu_thread_count": (
        int,
        0,
        "TF_GPU_THREAD_COUNT of the process (0: TensorFlow's default).",
    ),
}
_UNSUPPORTED: Mapping[str, tuple[Any, Any, str]] = {
    "use_keras_compile_fit": (bool, False, "training with Keras is not supported"),
    "model_type": (str, "bert", "ALBERT is not supported"),
    "hub_module_url": (str, None, "weights come from --init_checkpoint"),
    "hub_module_trainable": (bool, True, "weights come from --init_checkpoint"),
    "datasets_num_private_threads": (int, None, "tf.data uses TensorFlow's own threads"),
    "fp16_implementation": (
        str,
        "keras",
        "fp16 always means float16 products, float32 weights and --loss_scale",
    ),
}
_DEFINE: Mapping[Any, Callable[..., Any]] = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    str: flags.DEFINE_string,
}
_PUBLISHED_KEYS = {key for key, *_ in _DIRECT.values()}


def define_flags() -> None:
    """Define every flag; further calls in the same process do nothing."""
    if "train_batch_size" in FLAGS:
        return
    settings = settings_by_key()
    for name, (key, kind, default, short) in _DIRECT.items():
        _DEFINE[kind](name, default, settings[key].meaning, short_name=short)
    for name, (kind, default, meaning) in {**_CONVERTED, **_PROCESS, **_UNSUPPORTED}.items():
        _DEFINE[kind](name, default, meaning, short_name={"num_gpus": "ng", **_SHORT}.get(name))
    for key, setting in settings.items():
        if RECIPE.reads(setting) and key not in _PUBLISHED_KEYS and key not in FLAGS:
            flags.DEFINE_string(
                key, None, f"{setting.meaning} ({setting.type_name}; export {setting.env})"
            )


def given(name: str) -> bool:
    """Return True if a flag was set on the command line or by a program."""
    return not FLAGS[name].using_default_value


def number_of_gpus() -> int:
    """Return --num_gpus, or DGXNGPU of a sourced config if the flag is not given."""
    exported = environment().get("DGXNGPU", "")
    return int(exported) if exported.isdecimal() and not given("num_gpus") else int(FLAGS.num_gpus)


def resolve_flags(replicas: int) -> Resolved:
    """Return the settings of this run; global batch sizes are divided by ``replicas``,
    counted over all workers.

    Raises:
        UserError: settings conflict or are not supported here.
    """
    for name, (_, default, reason) in _UNSUPPORTED.items():
        if given(name) and FLAGS[name].value != default:
            raise UserError(
                "config.unsupported", f"--{name}={FLAGS[name].value}", reason, "Leave it out"
            )
    values = {**_direct(), **_converted(replicas), **_additional()}
    resolved = resolve(RECIPE, None, given=values)
    data = resolved.config[DataConfig]
    tensorflow = resolved.config[TensorFlowConfig]
    if data.average_packing_rate != 1:
        values |= {**_converted(replicas, data.average_packing_rate), **_additional()}
        resolved = resolve(RECIPE, None, given=values)
    if tensorflow.eval_schedule == "mlperf":
        batch = rules.global_batch_size(data.train_batch_size, replicas, data.average_packing_rate)
        grid = (rules.eval_interval(batch), "EVAL_SCHEDULE=mlperf")
        values |= {"eval_iter_start_samples": grid, "eval_iter_samples": grid}
        resolved = resolve(RECIPE, None, given=values)
    if not tensorflow.do_eval:
        values["target_mlm_accuracy"] = (None, "DO_EVAL=0")
        resolved = resolve(RECIPE, None, given=values)
    return resolved


def exported() -> bool:
    """Return True if a config was sourced, which replaces the published defaults."""
    return bool(environment().get("CONFIG_FILE"))


def _origin(name: str) -> str:
    return f"flag --{name}" if given(name) else f"default of --{name}"


def _direct() -> dict[str, tuple[object, str]]:
    """Return the settings of published flags that map to one setting each."""
    values: dict[str, tuple[object, str]] = {}
    for name, (key, *_) in _DIRECT.items():
        if name in _WIDTHS and not (given(name) or given("input_files")):
            continue  # a prepared data set defines them
        value = FLAGS[name].value
        setting = settings_by_key()[key]
        if given(name) or not (exported() or setting.env in environment() or value is None):
            whole = isinstance(value, float) and setting.kind is int and value.is_integer()
            values[key] = (round(float(str(value))) if whole else value, _origin(name))
    if "input_files" in values:
        folder = str(values["input_files"][0]).split(",", maxsplit=1)[0].rpartition("/")[0] or "."
        values |= {key: (folder, _origin("input_files")) for key in ("input_dir", "eval_dir")}
    if given("synthetic_data"):
        values |= {
            key: ("synthetic", _origin("synthetic_data")) for key in ("input_dir", "eval_dir")
        }
    return values


def _additional() -> dict[str, tuple[object, str]]:
    """Return the settings of flags that are not published ones."""
    read = [key for key, setting in settings_by_key().items() if RECIPE.reads(setting)]
    ours = [key for key in read if key in FLAGS and key not in _DIRECT and key not in _CONVERTED]
    return {key: (FLAGS[key].value, _origin(key)) for key in ours if given(key)}


def _converted(replicas: int, packing_rate: float = 1.0) -> dict[str, tuple[object, str]]:
    """Return settings that published flags give in other units.

    ``packing_rate``: nominal sequences per row.
    """
    values: dict[str, tuple[object, str]] = {}

    def applies(key: str, *names: str) -> bool:
        known = exported() or settings_by_key()[key].env in environment()
        return not known or any(given(name) for name in names)

    def put(key: str, value: int, *names: str) -> None:
        if applies(key, *names):
            values[key] = (value, _origin(next(filter(given, names), names[0])))

    for name in ("train_batch_size", "eval_batch_size"):
        if applies(name, name):
            values[name] = (_per_replica(name, replicas), _origin(name))
    if "train_batch_size" in values:
        rows = values["train_batch_size"][0]
    else:
        rows = peek("train_batch_size")
    batch = rules.global_batch_size(_whole(rows), replicas, packing_rate)
    schedule = FLAGS.num_steps_per_epoch * FLAGS.num_train_epochs
    steps = schedule if FLAGS.stop_steps is None else FLAGS.stop_steps
    for name in _LENGTH:
        if int(FLAGS[name].value or 0) < 1:
            raise UserError(
                "config.range",
                f"--{name}",
                f"{FLAGS[name].value} is not at least 1",
                "Set at least 1",
            )
    if not 1 <= steps <= schedule:
        reason = f"{steps} is not between 1 and the schedule's {schedule} steps"
        raise UserError("config.range", "--stop_steps", reason, "Set it within the schedule")
    put("max_steps", steps, "stop_steps", *_LENGTH)
    put("lr_decay_end", schedule, *_LENGTH, "stop_steps")
    put("max_samples_termination", 2 * steps * batch, *_LENGTH, "stop_steps")
    between = FLAGS.steps_between_eval
    before = FLAGS.steps_before_eval_start
    if between < 1:
        raise UserError(
            "config.range", "--steps_between_eval", f"{between} is not at least 1", "Set at least 1"
        )
    if before < 0:
        raise UserError(
            "config.range", "--steps_before_eval_start", f"{before} is negative", "Set 0 or more"
        )
    put("eval_iter_start_samples", max(-(-before // between), 1) * between * batch, *_BETWEEN)
    put("eval_iter_samples", between * batch, *_BETWEEN)
    if given("loss_scale") and FLAGS.loss_scale != "dynamic":
        values["loss_scale"] = (FLAGS.loss_scale, _origin("loss_scale"))
        values["loss_scale_fixed"] = (True, _origin("loss_scale"))
    if FLAGS.enable_checkpoint_and_summary:
        name = "enable_checkpoint_and_summary"
        folder = FLAGS.model_dir if given("model_dir") else peek("output_dir") or FLAGS.model_dir
        loop = (
            FLAGS.steps_per_loop
            if given("steps_per_loop")
            else _whole(peek("steps_per_loop"), FLAGS.steps_per_loop)
        )
        values["save_checkpoint_steps"] = (loop, _origin(name))
        values["tensorboard_dir"] = (f"{folder}/summaries", _origin(name))
    return values


def _whole(value: object, otherwise: int = 1) -> int:
    """Parse a count; return ``otherwise`` if it is invalid, which `resolve` reports later."""
    return int(str(value)) if str(value).isdecimal() else otherwise


def _per_replica(name: str, replicas: int) -> int:
    total = FLAGS[name].value or 0
    if total < 1 or total % replicas:
        reason = f"{total} cannot be divided among {replicas} replicas"
        raise UserError("config.conflict", f"--{name}", reason, f"Give a multiple of {replicas}")
    if total // replicas > MAX_ROWS:
        raise UserError(
            "config.range",
            f"--{name}",
            f"{total} is more than {MAX_ROWS} rows per replica",
            "Lower it",
        )
    return total // replicas
