"""Log a run's numbers to TensorBoard, Weights & Biases and MLflow under Composer's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbert.host.environment import environment
from mlbert.host.errors import UserError, import_package
from mlbert.host.metrics import logger_name
from mlbert.runs.config import RunConfig
from mlbert.runs.events import Events
from mlbert.runs.progress import RunOutcome, TrainState

_TRACKING_URI = "MLFLOW_TRACKING_URI"
_MOST_PARAMETERS = 100  # that MLflow takes in one call
Write = Callable[[Mapping[str, float], int], object]  # numbers by name, and their step


class NumberLogger(Events):
    """Log every log point and evaluation as named numbers.

    Args:
        write: logs the numbers of a step.
        close: closes the logger.
        optimizer: name of the optimizer, part of the learning rate's name.
        ranks: ranks of the run.
        peak: peak FLOP/s of one rank.
    """

    def __init__(
        self, write: Write, close: Callable[[], object], optimizer: str, ranks: int, peak: float
    ) -> None:
        self._write = write
        self._close = close
        self._optimizer = optimizer
        self._ranks = ranks
        self._peak = peak

    def step(
        self,
        state: TrainState,
        loss: float,
        lr: float,
        grad_norm: float,
        ranks: Sequence[float] = (),
    ) -> None:
        """Log loss, learning rate, gradient norm,
        and the average speed so far without evaluations.
        """
        seconds = state.train_seconds or float("inf")
        numbers = {
            "loss/train/total": loss,
            f"lr-{self._optimizer}/group0": lr,
            "l2_norm/grad/global": grad_norm,
            "throughput/samples_per_sec": state.samples / seconds,
            "throughput/tokens_per_sec": state.tokens / seconds,
            "throughput/device/flops_per_sec": state.flops / seconds / self._ranks,
            "throughput/device/mfu": state.flops / seconds / self._ranks / self._peak,
            "time/sample": state.samples,
            "time/token": state.tokens,
        }
        if state.loader_share is not None:
            numbers["time/loader_share"] = state.loader_share
        self._write(numbers, state.step)

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Log every metric of an evaluation."""
        numbers = {f"metrics/eval/{logger_name(name)}": value for name, value in metrics.items()}
        self._write(numbers, state.step)

    def stop(self, outcome: RunOutcome) -> None:
        """Close the logger."""
        self._close()


def make_loggers(
    config: RunConfig,
    record: Mapping[str, Any],
    folder: Path,
    optimizer: str,
    ranks: int,
    peak: Callable[[], float],
) -> list[Events]:
    """Return the loggers that TENSORBOARD_DIR, WANDB_PROJECT and MLFLOW_EXPERIMENT ask for; call on
    rank 0.

    Args:
        config: the run's settings.
        record: the resolved configuration, JSON-serializable.
        folder: for files of a logger that has no folder setting.
        optimizer, ranks: as in `NumberLogger`.
        peak: measures `NumberLogger`'s peak; called only if there is a logger.

    Raises:
        UserError: the package of a logger is not installed, or its folder cannot be written.
    """
    opened: list[tuple[Write, Callable[[], object]]] = []
    if config.tensorboard_dir is not None:
        opened.append(_tensorboard(config.tensorboard_dir / (config.run_name or folder.name)))
    if config.wandb_project is not None:
        opened.append(_wandb(config, record, folder))
    if config.mlflow_experiment is not None:
        opened.append(_mlflow(config.mlflow_experiment, config.run_name, record, folder))
    if not opened:
        return []
    peak_flops = peak()
    return [NumberLogger(write, close, optimizer, ranks, peak_flops) for write, close in opened]


def _tensorboard(folder: Path) -> tuple[Write, Callable[[], object]]:
    import_package("tensorboard", "TENSORBOARD_DIR", "loggers")
    from torch.utils.tensorboard import SummaryWriter

    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = SummaryWriter(str(folder))
    except OSError as error:
        reason = f"{folder} cannot be written ({error.strerror})"
        raise UserError(
            "file.unwritable", "TENSORBOARD_DIR", reason, "Name a writable folder"
        ) from None

    def write(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, writer.close


def _wandb(
    config: RunConfig, record: Mapping[str, Any], folder: Path
) -> tuple[Write, Callable[[], object]]:
    """Open a run.

    Without a login it stays in the folder, as with WANDB_MODE=offline; upload it with wandb sync.
    """
    wandb = import_package("wandb", "WANDB_PROJECT", "loggers")
    is_configured = "WANDB_MODE" in environment() or wandb.login(prompt=False, verify=False)
    about: dict[str, Any] = {
        "project": config.wandb_project,
        "name": config.run_name,
        "dir": str(folder),
        "config": dict(record),
        "mode": None if is_configured else "offline",
    }
    try:
        run = wandb.init(**about | json.loads(config.wandb_options or "{}"))
    except (ValueError, TypeError) as error:
        reason = f"is not accepted by wandb.init ({error})"
        raise UserError(
            "config.value", "WANDB_OPTIONS", reason, "Give its arguments in JSON"
        ) from None
    return lambda numbers, step: run.log(dict(numbers), step=step), run.finish


def _mlflow(
    experiment: str, run_name: str | None, record: Mapping[str, Any], folder: Path
) -> tuple[Write, Callable[[], object]]:
    """Open a run: on the server that MLFLOW_TRACKING_URI names, else in a database in the run
    folder, which `mlflow ui --backend-store-uri` shows.
    """
    mlflow = import_package("mlflow", "MLFLOW_EXPERIMENT", "mlflow")
    if _TRACKING_URI not in environment():
        mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    settings = [(name, str(value)) for name, value in record.get("config", record).items()]
    try:
        mlflow.set_experiment(experiment)
        run = mlflow.start_run(run_name=run_name)
        for first in range(0, len(settings), _MOST_PARAMETERS):
            mlflow.log_params(dict(settings[first : first + _MOST_PARAMETERS]))
    except mlflow.MlflowException as error:
        reason = f"MLflow reports: {error}"
        remedy = f"Set {_TRACKING_URI} to a server or folder that this machine can write to"
        raise UserError("program.failed", "MLFLOW_EXPERIMENT", reason, remedy) from None

    def write(numbers: Mapping[str, float], step: int) -> None:
        mlflow.log_metrics(dict(numbers), step=step, run_id=run.info.run_id)

    return write, mlflow.end_run
