"""Log keys: which are hyper-parameters, and which settings decide them."""

from __future__ import annotations

# ResNet's keys begin with the name of the optimizer.
_OPTIMIZER_PREFIXES = ("opt_", "lars_opt_", "sgd_opt_")
# In addition to every key that begins so.
_HYPERPARAMETERS = (
    "global_batch_size",
    "gradient_accumulation_steps",
    "num_warmup_steps",
    "start_warmup_step",
)
_WORDS = (
    "opt_name",
    "opt_implementation",
    "opt_learning_rate_decay_schedule",
    "opt_learning_rate_decay_boundary_steps",
)

# Numeric keys that the closed division requires exactly once.
CLOSED_KEYS = (
    *_HYPERPARAMETERS,
    "opt_base_learning_rate",
    "opt_learning_rate_training_steps",
    "opt_learning_rate_warmup_steps",
    "opt_lamb_epsilon",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
)

# Settings behind a key, if the key has another name and its call does not read them from `config`.
SETTINGS_OF = {
    "cache_clear": ("caches_cleared",),
    "starting_weights": ("init_checkpoint",),
    "starting_weights_sha256": ("init_checkpoint",),
    "threads_per_rank": ("cpu_threads",),
    "target_accuracy": ("target_mlm_accuracy",),
    "first_evaluation_samples": ("eval_iter_start_samples",),
    "evaluation_interval_samples": ("eval_iter_samples",),
    "evaluation_size": ("num_eval_examples",),
    "max_samples": ("max_samples_termination",),
    "train_data": ("input_dir",),
    "eval_data": ("eval_dir",),
    "model_shape": ("bert_config_file",),
    "model_shape_sha256": ("bert_config_file",),
    "global_batch_size": ("train_batch_size", "average_packing_rate"),
    "opt_implementation": ("optimizer_implementation",),
    "opt_name": ("optimizer",),
    "opt_learning_rate_decay_schedule": ("schedule",),
    "opt_base_learning_rate": ("learning_rate",),
    "opt_lamb_epsilon": ("opt_epsilon",),
    "opt_lamb_weight_decay_rate": ("weight_decay_rate",),
    "opt_adamw_epsilon": ("opt_epsilon",),
    "opt_adamw_beta_1": ("opt_lamb_beta_1",),
    "opt_adamw_beta_2": ("opt_lamb_beta_2",),
    "opt_adamw_weight_decay": ("weight_decay_rate",),
    "opt_acclip_epsilon": ("opt_epsilon",),
    "opt_acclip_beta_1": ("opt_lamb_beta_1",),
    "opt_acclip_beta_2": ("opt_lamb_beta_2",),
    "opt_acclip_weight_decay": ("weight_decay_rate",),
    "opt_madgrad_epsilon": ("opt_epsilon",),
    "opt_madgrad_momentum": ("opt_lamb_beta_1",),
    "opt_madgrad_weight_decay": ("weight_decay_rate",),
    "opt_sgd_momentum": ("opt_lamb_beta_1",),
    "opt_sgd_weight_decay": ("weight_decay_rate",),
    "opt_lamb_learning_rate_decay_poly_power": ("poly_power",),
    "opt_gradient_clip_norm": ("max_grad_norm",),
    "opt_end_learning_rate": ("end_lr",),
    "opt_learning_rate_decay_steps": ("lr_decay_steps", "lr_decay_proportion"),
    "opt_learning_rate_decay_boundary_steps": ("lr_milestones",),
    "opt_learning_rate_decay_factor": ("lr_gamma",),
    "opt_learning_rate_training_steps": ("max_steps",),
    "opt_learning_rate_warmup_steps": ("warmup_steps", "warmup_proportion"),
    "num_warmup_steps": ("warmup_steps", "warmup_proportion"),
    "eval_start": ("eval_iter_start_samples", "eval_iter_samples"),
    "eval_accuracy": ("eval_dir", "num_eval_examples"),
    "eval_samples": ("num_eval_examples",),
    "train_samples": ("target_mlm_accuracy", "max_steps", "max_samples_termination"),
}
# In the metadata of resumed_from_step: the time to train up to the checkpoint, in seconds.
ELAPSED = "elapsed_seconds"

# Functions behind a key that cannot be found by name from its call.
FUNCTIONS_OF = {"eval_accuracy": ("result", "metrics", "sums")}


def is_hyperparameter(key: str) -> bool:
    """Return True if a log key is a hyper-parameter."""
    return key.startswith(_OPTIMIZER_PREFIXES) or key in _HYPERPARAMETERS


def is_numeric(key: str) -> bool:
    """Return True if a key is a hyper-parameter whose value is a number."""
    return is_hyperparameter(key) and key not in _WORDS


def is_number_of(key: str, value: object) -> bool:
    """Return True if the key is a numeric hyper-parameter and the value is a number."""
    return is_numeric(key) and isinstance(value, int | float)
