"""Keys of the MLPerf log that more than one module writes or requires."""

from __future__ import annotations

# Numeric keys that the closed division requires exactly once.
CLOSED_KEYS = (
    "global_batch_size",
    "gradient_accumulation_steps",
    "num_warmup_steps",
    "start_warmup_step",
    "opt_base_learning_rate",
    "opt_learning_rate_training_steps",
    "opt_learning_rate_warmup_steps",
    "opt_lamb_epsilon",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
)
# In the metadata of resumed_from_step: the time to train up to the checkpoint, in seconds.
ELAPSED = "elapsed_seconds"
