"""The events of Lightning's Trainer for an `MLPerfCallback`.

Nothing of Lightning is imported: its Trainer calls methods by name, so this works with
`lightning.pytorch` and `pytorch_lightning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mlbert.host.environment import environment
from mlbert.host.errors import UserError

_SEED = "PL_GLOBAL_SEED"  # what seed_everything exports


class LogOfRun(Protocol):
    """What the events need of an `MLPerfCallback`."""

    metric: str
    exit_at_target: bool

    @property
    def hyperparameters(self) -> Mapping[str, Any]: ...

    def fit_start(self, hyperparameters: Mapping[str, Any] | None = None) -> None: ...

    def eval_start(self, samples: int) -> None: ...

    def eval_end(self, samples: int, accuracy: Any) -> bool: ...

    def close(self, reason: str | None = None, samples: int | None = None) -> None: ...


class LightningEvents:
    """A callback of Lightning's Trainer that writes the log; `MLPerfCallback.for_lightning` makes
    it.

    The validations whose metrics include the log's are its evaluations; the sanity check before
    the training is not.
    """

    def __init__(self, log: LogOfRun) -> None:
        self._log = log
        self.state_key = type(self).__qualname__  # under which Lightning saves a callback's state

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the clock, with the hyperparameters that the log's constructor lacks."""
        group = trainer.optimizers[0].param_groups[0]
        found: dict[str, Any] = {
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            "opt_name": type(trainer.optimizers[0]).__name__.lower(),
            "opt_base_learning_rate": group.get("initial_lr", group["lr"]),
        }
        if trainer.max_steps > 0:
            found["opt_learning_rate_training_steps"] = trainer.max_steps
        seed = environment().get(_SEED, "")
        if seed.isdecimal():
            found["seed"] = int(seed)
        self._log.fit_start({**found, **self._log.hyperparameters})

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Log the start of an evaluation."""
        if not trainer.sanity_checking:
            self._log.eval_start(self._samples(trainer))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Log the end of an evaluation. Raises UserError if it has not logged the metric."""
        if trainer.sanity_checking:
            return
        metric = self._log.metric
        if metric not in trainer.callback_metrics:
            found = ", ".join(trainer.callback_metrics)
            remedy = f'Call self.log("{metric}", ...) in validation_step, or set metric_name'
            raise UserError("config.choice", metric, f"is not among the metrics {found}", remedy)
        accuracy = trainer.callback_metrics[metric]
        if self._log.eval_end(self._samples(trainer), accuracy) and self._log.exit_at_target:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Close the log: the Trainer has reached its limit or the target."""
        self._log.close(samples=self._samples(trainer))

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Close the log as aborted."""
        self._log.close(type(exception).__name__)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Do nothing: the log is open."""

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Do nothing: the log is closed."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a log is not resumed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state of another log."""

    def _samples(self, trainer: Any) -> int:
        return int(trainer.global_step) * int(self._log.hyperparameters["global_batch_size"])

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore all other events."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__} has no {name}")
