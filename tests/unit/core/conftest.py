"""Fixtures: a complete set of recipe defaults and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

# What a recipe gives: everything but the three folders.
DEFAULTS = {
    "recipe": "packed_lamb",
    "bert_config_file": Path("bert_config.json"),
    "init_checkpoint": None,
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "average_packing_rate": 2.0,
    "data_reader": "auto",
    "max_sequences_per_pack": 3,
    "bin_counts": None,
    "exchange_padding": "off",
    "exchange_by": "lengths",
    "learning_rate": 1e-3,
    "max_steps": 100,
    "max_samples_termination": 100_000,
    "max_seconds": None,
    "warmup_steps": 10,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "polynomial",
    "poly_power": 1.0,
    "lr_first_step": 0,
    "optimizer": "lamb",
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.999,
    "opt_epsilon": 1e-6,
    "weight_decay_rate": 0.01,
    "max_grad_norm": 1.0,
    "gradient_clipping": "after",
    "bucket_mib": 25,
    "optimizer_implementation": "ops",
    "sharded_optimizer": "off",
    "gradient_reduction": "fp32",
    "weights_allgather": "fp32",
    "seed": None,
    "target_mlm_accuracy": 0.72,
    "num_eval_examples": 100,
    "eval_batch_size": 4,
    "eval_iter_start_samples": 1000,
    "eval_iter_samples": 1000,
    "precision": "auto",
    "fp8_fast_accumulation": "forward",
    "loss_scale": 131072.0,
    "loss_scale_window": 2000,
    "cpu_threads": None,
    "ops": "auto",
    "cuda_graph_mode": "none",
    "save_checkpoint_steps": 0,
    "keep_checkpoints": 2,
    "resume": False,
    "max_skipped_steps": 3,
    "synthetic_data": False,
    "log_freq": 10,
    "experiment": 0,
    "caches_cleared": False,
    "submission_org": "SomeOrg",
    "submission_platform": "some machine",
    "submission_division": "open",
}


@pytest.fixture
def defaults() -> dict[str, object]:
    """A recipe's defaults."""
    return dict(DEFAULTS)


@pytest.fixture
def environ() -> dict[str, str]:
    """What a sourced configuration exports at least."""
    return {"DATADIR_PHASE2": "/data/train", "EVALDIR": "/data/eval", "LOGDIR": "/runs/x"}
