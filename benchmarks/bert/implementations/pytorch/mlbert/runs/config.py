"""Settings of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mlbert.config.section import Contradiction, Ranges, Section, setting

_OPTION = re.compile(r"(?<![\w-])([\w-]++)[\"']?\s*:")  # a name in YAML or JSON
_SECRET = re.compile(r"api[_-]?key|passw|secret|credential|token$", re.IGNORECASE)


class RunConfig(Section):
    """The run: its folder, limits, checkpoints and logs."""

    recipe: str = setting("RECIPE", "Method: a module of mlbert.recipes.")
    run_name: str | None = setting(
        "RUN_NAME", "Name of the run in loggers and displays.", default=None
    )
    output_dir: Path = setting(
        "LOGDIR", "Run folder: MLPerf log, metrics, checkpoints, final weights."
    )
    seed: int | None = setting(
        "SEED", "Random seed; none draws one from the system.", default=None, ge=0, le=4294967295
    )
    max_samples_termination: int = setting(
        "MAX_SAMPLES_TERMINATION", "Training ends after this many sequences.", **Ranges.SAMPLES
    )
    max_seconds: float | None = setting(
        "MAX_SECONDS",
        "Time limit counted from run_start; none for no limit.",
        default=None,
        **Ranges.SECONDS,
    )
    max_skipped_steps: int = setting(
        "MAX_SKIPPED_STEPS",
        "Non-finite losses tolerated before the run ends.",
        default=20,
        **Ranges.STEPS_FROM_0,
    )
    save_checkpoint_steps: int = setting(
        "SAVE_CHECKPOINT_STEPS",
        "Steps between checkpoints; 0 saves none.",
        default=0,
        **Ranges.STEPS_FROM_0,
    )
    keep_checkpoints: int = setting(
        "KEEP_CHECKPOINTS",
        "How many of the newest checkpoints to keep.",
        default=2,
        **Ranges.CHECKPOINTS,
    )
    resume: bool = setting(
        "RESUME", "Continue from the newest good checkpoint in LOGDIR.", default=False
    )
    log_freq: int = setting(
        "LOG_FREQ", "Steps between metric lines; 0 writes none.", default=10, **Ranges.STEPS_FROM_0
    )
    tensorboard_dir: Path | None = setting(
        "TENSORBOARD_DIR",
        "Folder for TensorBoard event files, with a subfolder for each run; none writes none.",
        default=None,
    )
    wandb_project: str | None = setting(
        "WANDB_PROJECT",
        "Weights & Biases project; logs offline, in the run folder, if not logged in. "
        "none disables it.",
        default=None,
    )
    wandb_options: str | None = setting(
        "WANDB_OPTIONS", "More arguments of wandb.init, in JSON.", default=None
    )
    mlflow_experiment: str | None = setting(
        "MLFLOW_EXPERIMENT",
        "MLflow experiment; logs to the run folder unless MLFLOW_TRACKING_URI is set. "
        "none disables it.",
        default=None,
    )
    experiment: int = setting("EXPERIMENT", "Index i of result_<i>.txt.", default=0, ge=0, le=9999)
    caches_cleared: bool = setting(
        "CACHES_CLEARED",
        "Set by the launcher when it dropped the page caches before this run.",
        default=False,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield a contradiction if checkpoints are saved but none is kept,
        or options hold a secret.
        """
        names = (option[1] for option in _OPTION.finditer(self.wandb_options or ""))
        secret = next((name for name in names if _SECRET.search(name)), None)
        if secret is not None:
            remedy = "Remove it; run wandb login, or export WANDB_API_KEY"
            yield Contradiction(
                "config.value",
                "WANDB_OPTIONS",
                f"contains {secret}, which every log would show",
                remedy,
            )
        if self.save_checkpoint_steps and not self.keep_checkpoints:
            problem = f"is 0 while SAVE_CHECKPOINT_STEPS is {self.save_checkpoint_steps}"
            remedy = "Keep at least 1, or set SAVE_CHECKPOINT_STEPS=0"
            yield Contradiction("config.conflict", "KEEP_CHECKPOINTS", problem, remedy)
