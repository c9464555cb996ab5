"""Google's method of MLPerf v0.7 in TensorFlow 2: what a setting is where nobody gives it.

LAMB or AdamW, polynomial decay from step 0, the gradient of each micro-batch clipped on each replica before it is
accumulated and summed. The numbers are the defaults that the published `run_pretraining.py` has for its flags;
`tf2_bert.flags` has those that count otherwise than the table of settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from mlbert.core.text_settings import TextSettings

_READ_OF_TEXT = ("max_seq_length", "model_options", "tensorboard_dir")
# Settings of the table that only PyTorch has a use for: what they amount to here. Whoever gives one is told.
UNREAD: Mapping[str, object] = {
    "data_reader": "auto",
    "exchange_padding": "off",
    "exchange_by": "lengths",
    "bucket_mib": 25,
    "optimizer_implementation": "plain",
    "sharded_optimizer": "off",
    "gradient_reduction": "fp32",
    "weights_allgather": "fp32",
    "join_timeout": None,
    "fp8_fast_accumulation": "forward",
    "ops": "auto",
    "cuda_graph_mode": "none",
    **{field.name: None for field in fields(TextSettings) if field.name not in _READ_OF_TEXT},
}

DEFAULTS: Mapping[str, object] = {
    "recipe": "tensorflow2",
    "init_checkpoint": None,
    "gradient_accumulation_steps": 1,
    "average_packing_rate": 1.0,
    "max_sequences_per_pack": 1,
    "bin_counts": None,
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "polynomial",
    "poly_power": 1.0,
    "end_lr": None,
    "lr_decay_end": None,
    "lr_decay_steps": None,
    "lr_milestones": None,
    "lr_gamma": None,
    "lr_first_step": 0,
    "optimizer": "adamw",
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.999,
    "opt_epsilon": 1e-6,
    "weight_decay_rate": 0.01,
    "max_grad_norm": 1.0,
    "gradient_clipping": "before",
    "seed": None,
    "target_mlm_accuracy": 0.712,
    "num_eval_examples": 10_000,
    "eval_batch_size": 16,
    "precision": "fp32",
    "loss_scale": 32768.0,
    "loss_scale_window": 2000,
    "cpu_threads": None,
    "save_checkpoint_steps": 0,
    "keep_checkpoints": 2,
    "resume": False,
    "max_skipped_steps": 1000,
    "synthetic_data": False,
    "log_freq": 10,
    "experiment": 0,
    "caches_cleared": False,
    "submission_org": "unnamed",
    "submission_platform": "unnamed",
    "submission_division": "open",
    "deterministic": True,
    "distribution_strategy": "mirrored",
    "explicit_allreduce": False,
    "allreduce_bytes_per_pack": 0,
    "scale_loss": False,
    "loss_scale_fixed": False,
    "device_warmup": False,
    "steps_per_loop": 200,
    "do_eval": True,
    "eval_schedule": "steps",
    "run_eagerly": False,
    "enable_xla": False,
    **UNREAD,
}
