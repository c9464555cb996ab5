"""The rows of the settings table that only the TensorFlow 2 implementation reads: none elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from mlbert.core.setting import row


@dataclass(frozen=True, kw_only=True)
class TensorFlow2Settings:
    """What a run in TensorFlow 2 has besides the settings of any run."""

    input_files: str | None = row(
        "INPUT_FILES", "TFRecords for tf.data, globs with commas between; none: DATADIR_PHASE2 through mlbert.store."
    )
    eval_files: str | None = row(
        "EVAL_FILES", "Likewise for the evaluation; none: the training files, or EVALDIR where there are none."
    )
    deterministic: bool | None = row("DETERMINISTIC", "tf.data gives the same order each time, at some cost in speed.")
    max_predictions_per_seq: int | None = row(
        "MAX_PREDICTIONS_PER_SEQ", "Most masked tokens of a sequence.", "tokens", at_least=1, at_most=65_535
    )
    distribution_strategy: str | None = row(
        "DISTRIBUTION_STRATEGY",
        "tf.distribute's strategy; off: none.",
        choices=("off", "one_device", "mirrored", "multi_worker_mirrored", "parameter_server", "tpu"),
    )
    tpu: str | None = row("TPU", "Name or address of the TPU.")
    all_reduce_alg: str | None = row(
        "ALL_REDUCE_ALG",
        "How gradients are summed: nccl or hierarchical_copy by mirrored, ring or nccl by multi_worker_mirrored.",
        choices=("nccl", "hierarchical_copy", "ring"),
    )
    explicit_allreduce: bool | None = row(
        "EXPLICIT_ALLREDUCE", "Sum gradients before they are unscaled and clipped, in their own precision."
    )
    allreduce_bytes_per_pack: int | None = row(
        "ALLREDUCE_BYTES_PER_PACK",
        "Size of the packs in which they travel; 0: one.",
        "bytes",
        at_least=0,
        at_most=2**40,
    )
    scale_loss: bool | None = row("SCALE_LOSS", "Divide each replica's loss by the number of replicas.")
    loss_scale_fixed: bool | None = row("LOSS_SCALE_FIXED", "LOSS_SCALE stays as it is.")
    device_warmup: bool | None = row(
        "DEVICE_WARMUP", "Compile and run one step on zeros before the clock starts; weights are put back."
    )
    steps_per_loop: int | None = row(
        "STEPS_PER_LOOP", "Steps between two looks of the host.", "steps", at_least=1, at_most=1_000_000
    )
    do_eval: bool | None = row("DO_EVAL", "Evaluate while training.")
    eval_schedule: str | None = row(
        "EVAL_SCHEDULE",
        "When: after the settings' numbers of samples, or on the grid of ruleset 5.0.0.",
        choices=("steps", "mlperf"),
    )
    run_eagerly: bool | None = row("RUN_EAGERLY", "Run each step op by op, for debugging.")
    enable_xla: bool | None = row("ENABLE_XLA", "Compile forward, backward and update with XLA.")
