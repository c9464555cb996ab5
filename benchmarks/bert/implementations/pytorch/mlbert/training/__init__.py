"""The training loop, evaluation, checkpoints and run folder."""
