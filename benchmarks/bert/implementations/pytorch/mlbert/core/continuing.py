"""Which settings a continued run shares with the run that it continues."""

from __future__ import annotations

from mlbert.core.settings import TrainConfig, train_settings

# What an update is made of. Data, model shape, batch and optimizer are compared by what they are, not by a setting.
_FIXED = (
    "learning_rate",
    "start_warmup_step",
    "schedule",
    "poly_power",
    "end_lr",
    "lr_decay_steps",
    "lr_milestones",
    "lr_gamma",
    "lr_first_step",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_epsilon",
    "weight_decay_rate",
    "decay_all",
    "max_grad_norm",
    "gradient_clipping",
    "precision",
    "max_seq_length",
    "masking_rate",
    "masking_rate_end",
    "masking_schedule",
    "max_sequences_per_pack",
    "bin_counts",
    "drop_last",
)


def fixed_settings(config: TrainConfig) -> dict[str, object]:
    """Settings that may not change when a run is continued, environment name to value.

    Limits, evaluations, paths and what only decides how fast the run is may change. So may the length of the schedule:
    a run is made longer that way.
    """
    names = list(_FIXED)
    if not config.auto_micro_batch:
        names.append("gradient_accumulation_steps")
    return {train_settings()[name].env: getattr(config, name) for name in names}
