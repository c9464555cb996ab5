"""Settings of the TensorFlow 2 implementation; defined here because audits check its logs too."""

from __future__ import annotations

from typing import Literal

from mlbert.config.section import Section, fixed_setting, setting


class TensorFlowConfig(Section):
    """Settings that only the TensorFlow 2 implementation reads."""

    input_files: str | None = setting(
        "INPUT_FILES",
        "TFRecords for tf.data, comma-separated globs; "
        "none: DATADIR_PHASE2, read by mlbert.data.formats.",
        default=None,
    )
    eval_files: str | None = setting(
        "EVAL_FILES",
        "The same for evaluation; none: the training files, or EVALDIR if there are none.",
        default=None,
    )
    deterministic: bool = setting(
        "DETERMINISTIC", "Make tf.data's order reproducible, at some cost in speed.", default=True
    )
    distribution_strategy: Literal[
        "off", "one_device", "mirrored", "multi_worker_mirrored", "parameter_server", "tpu"
    ] = setting("DISTRIBUTION_STRATEGY", "tf.distribute's strategy; off: none.", default="mirrored")
    tpu: str | None = setting("TPU", "Name or address of the TPU.", default=None)
    all_reduce_alg: Literal["nccl", "hierarchical_copy", "ring"] | None = setting(
        "ALL_REDUCE_ALG",
        "All-reduce algorithm: nccl or hierarchical_copy with mirrored, "
        "ring or nccl with multi_worker_mirrored.",
        default=None,
    )
    explicit_allreduce: bool = fixed_setting(
        "EXPLICIT_ALLREDUCE",
        "All-reduce gradients before unscaling and clipping, in their own precision.",
        default=False,
    )
    allreduce_bytes_per_pack: int = setting(
        "ALLREDUCE_BYTES_PER_PACK",
        "Size of the packs for the gradient all-reduce; 0: one pack.",
        default=0,
        unit="bytes",
        ge=0,
        le=1099511627776,
    )
    scale_loss: bool = fixed_setting(
        "SCALE_LOSS", "Divide each replica's loss by the number of replicas.", default=False
    )
    loss_scale_fixed: bool = fixed_setting(
        "LOSS_SCALE_FIXED", "Keep LOSS_SCALE constant.", default=False
    )
    device_warmup: bool = setting(
        "DEVICE_WARMUP",
        "Compile and run one step on zeros before the clock starts; the weights are restored.",
        default=False,
    )
    steps_per_loop: int = setting(
        "STEPS_PER_LOOP",
        "Steps that run on the device without returning to the host.",
        default=200,
        unit="steps",
        ge=1,
        le=1000000,
    )
    do_eval: bool = setting("DO_EVAL", "Evaluate while training.", default=True)
    eval_schedule: Literal["steps", "mlperf"] = setting(
        "EVAL_SCHEDULE",
        "Evaluate at the sample counts of the settings (steps), "
        "or on ruleset 5.0.0's grid (mlperf).",
        default="steps",
    )
    run_eagerly: bool = setting(
        "RUN_EAGERLY", "Run each step op by op, for debugging.", default=False
    )
    enable_xla: bool = setting(
        "ENABLE_XLA", "Compile forward, backward and update with XLA.", default=False
    )
