"""What is known of the keys of a log: which are hyper-parameters, and what decides them."""

from __future__ import annotations

# Besides everything that begins with opt_: those are the method's own.
_HYPERPARAMETERS = ("global_batch_size", "gradient_accumulation_steps", "num_warmup_steps", "start_warmup_step")
_WORDS = (
    "opt_name",
    "opt_implementation",
    "opt_learning_rate_decay_schedule",
    "opt_learning_rate_decay_boundary_steps",
)

# Numbers of which the closed division wants one each.
CLOSED_KEYS = (
    *("global_batch_size", "gradient_accumulation_steps", "num_warmup_steps", "start_warmup_step"),
    *("opt_base_learning_rate", "opt_learning_rate_training_steps", "opt_learning_rate_warmup_steps"),
    *("opt_lamb_epsilon", "opt_lamb_beta_1", "opt_lamb_beta_2", "opt_lamb_weight_decay_rate"),
)

# Framework to the distributions that have it.
DISTRIBUTIONS_OF = {"PyTorch": ("torch",), "TensorFlow": ("tensorflow", "tensorflow-cpu")}

# Settings behind a key that is not named like its setting and whose call does not read them from `config` itself.
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
    "opt_learning_rate_decay_steps": ("lr_decay_steps",),
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
# Functions behind a key that its call does not lead to by name.
FUNCTIONS_OF = {"eval_accuracy": ("result", "metrics", "sums")}


def is_hyperparameter(key: str) -> bool:
    """Whether a key of a log is a hyper-parameter: the method's own begin with opt_."""
    return key.startswith("opt_") or key in _HYPERPARAMETERS


def is_numeric(key: str) -> bool:
    """Whether a key is a hyper-parameter whose value is a number."""
    return is_hyperparameter(key) and key not in _WORDS


def is_number_of(key: str, value: object) -> bool:
    """Whether a value is the number of a hyper-parameter."""
    return is_numeric(key) and isinstance(value, int | float)
