"""MLPerf logs for other people's training loops: a context manager for plain PyTorch,
a callback for Hugging Face and for Lightning.

    with MLPerfCallback(folder, index, submitter=..., system_name=...) as log:
        ...                                         # build model and optimizer
        log.fit_start(hyperparameters)              # starts the clock, before any training data
        ...
        log.eval_start(samples)
        if log.eval_end(samples, accuracy):         # target reached, log closed
            break

    trainer = transformers.Trainer(..., callbacks=[MLPerfCallback(...)])

    trainer = lightning.Trainer(..., callbacks=[MLPerfCallback(...).for_lightning()])

Each object writes one run's log, ``<folder>/results/<system_name>/bert/result_<index>.txt``, and
``<folder>/systems/<system_name>.json`` if it does not exist. Argument names match Composer's
callback of the same name.
"""

from __future__ import annotations

import atexit
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.host.provenance import tree_root
from mlbert.host.system_description import STATUSES, describe_system, write_description
from mlbert.mlperf import rules
from mlbert.mlperf.keys import CLOSED_KEYS
from mlbert.mlperf.lightning import LightningEvents
from mlbert.mlperf.mllog import MLPerfLogger, constants

__all__ = ["MLPerfCallback"]

# Keys the user must supply in either division; the 5.0.0 checkers also require REQUIRED_IN_CLOSED
# in closed.
REQUIRED = (
    "seed",
    "global_batch_size",
    "gradient_accumulation_steps",
    "opt_name",
    "opt_base_learning_rate",
    "opt_learning_rate_training_steps",
    "opt_learning_rate_warmup_steps",
    "eval_samples",
)
REQUIRED_IN_CLOSED = tuple(key for key in CLOSED_KEYS if key not in REQUIRED)
# Logged after training, so a Trainer may supply it at the first evaluation.
_AT_THE_END = ("eval_samples",)
_BLOCK = {"first_epoch_num": 1}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")

Value = int | float | str


class MLPerfCallback:
    """Write one run's MLPerf log, as a context manager or as a callback of `transformers.Trainer`
    or Lightning's Trainer (`for_lightning`).

    If the block or the process ends before the target is reached, the log is closed as aborted.
    Only rank 0 writes; every rank may call every method.

    Args:
        root_folder: submission folder, in which ``results/`` and ``systems/`` are created.
        index: i of ``result_<i>.txt``; a submission has 0 to 9.
        benchmark: "bert", the only benchmark supported.
        target: accuracy, 0 to 1, at which the run succeeds.
        division: "open" or "closed".
        metric_name, metric_label: a Trainer's metric, looked up as
            ``<metric_label>_<metric_name>``; evaluations with another label are not logged.
        submitter: submitting organization (default: MLPERF_SUBMISSION_ORG).
        system_name: name of the results folder (default: MLPERF_SUBMISSION_PLATFORM, or
            ``<ranks>x<device>``).
        status: "onprem", "cloud", "preview" or "research".
        cache_clear_cmd: command that drops the page cache, run without a shell by the first rank of
            each node. With None, the log says that caches were not cleared.
        host_processors_per_node: processors of a node (default: as Linux reports).
        exit_at_target: stop the Trainer when the target is reached.
        hyperparameters: values known so far, by their log keys.
        rank: rank of this process (default: RANK, or 0).

    Attributes:
        path: of the log.
        hyperparameters: values by their log keys that are known so far.

    Raises:
        UserError: an argument is invalid, the result exists, the existing system description
            differs, or the command or a write failed.
    """

    def __init__(
        self,
        root_folder: str | Path,
        index: int,
        benchmark: str = rules.BENCHMARK,
        target: float = rules.TARGET_MLM_ACCURACY,
        division: str = "open",
        metric_name: str = "MaskedAccuracy",
        metric_label: str = "eval",
        submitter: str | None = None,
        system_name: str | None = None,
        status: str = "onprem",
        cache_clear_cmd: str | Sequence[str] | None = None,
        host_processors_per_node: int | None = None,
        exit_at_target: bool = False,
        *,
        hyperparameters: Mapping[str, Value] | None = None,
        rank: int | None = None,
    ) -> None:
        if not 0.0 < target <= 1.0:
            raise UserError(
                "config.range",
                f"target {target}",
                "is not between 0 and 1",
                "Give a fraction, not a percentage",
            )
        self.target = float(target)
        self.exit_at_target = exit_at_target
        self.metric = f"{metric_label}_{metric_name}"
        self._label = f"{metric_label}_"
        self._division = division
        for name, value, choices in (
            ("division", division, ("open", "closed")),
            ("benchmark", benchmark, (rules.BENCHMARK,)),
            ("status", status, tuple(STATUSES)),
        ):
            if value not in choices:
                raise UserError(
                    "config.choice", f"{name} {value!r}", "is not known", "Use a valid one", choices
                )
        self.hyperparameters: dict[str, Value] = dict(hyperparameters or {})
        self._samples = 0
        self._evaluates = False
        self._reached = False
        self.rank = _number("RANK", 0) if rank is None else rank
        org = submitter or environment().get("MLPERF_SUBMISSION_ORG")
        if not org:
            raise UserError(
                "config.missing",
                "submitter",
                "is not given",
                "Give it, or export MLPERF_SUBMISSION_ORG",
            )
        facts = self._describe(org, status, host_processors_per_node) if self.rank == 0 else {}
        system = (
            system_name or environment().get("MLPERF_SUBMISSION_PLATFORM") or _default_name(facts)
        )
        if not _NAME.fullmatch(system):
            reason = "is not a valid folder name"
            raise UserError(
                "config.value",
                f"system_name {system!r}",
                reason,
                "Use letters, digits, - _ . and +",
            )
        root = Path(root_folder)
        self.path = root / "results" / system / benchmark / f"result_{int(index)}.txt"
        if self.rank == 0:
            _refuse_result(self.path)
            _keep_description(root / "systems" / f"{system}.json", facts)
        cleared = _clear_caches(cache_clear_cmd, _number("LOCAL_RANK", self.rank))
        self._log = MLPerfLogger(
            self.path if self.rank == 0 else None, rank=self.rank, root=tree_root()
        )
        atexit.register(self.close, "the process ended")
        self._log.event(constants.CACHE_CLEAR, cleared)
        self._log.start(constants.INIT_START)
        self._log.event(constants.SUBMISSION_BENCHMARK, benchmark)
        self._log.event(constants.SUBMISSION_DIVISION, division)
        self._log.event(constants.SUBMISSION_ORG, org)
        self._log.event(constants.SUBMISSION_PLATFORM, system)
        self._log.event(constants.SUBMISSION_STATUS, status)

    def __enter__(self) -> MLPerfCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(kind.__name__ if kind else None)

    # Any loop

    def fit_start(self, hyperparameters: Mapping[str, Value] | None = None) -> None:
        """End the initialization and start the clock.

        Args:
            hyperparameters: values by their log keys, added to the constructor's. Together they
                must contain `REQUIRED` and, in the closed division, `REQUIRED_IN_CLOSED`.

        Raises:
            UserError: hyper-parameters are missing, or the clock is already running.
        """
        self._start({**self.hyperparameters, **(hyperparameters or {})}, REQUIRED)

    def eval_start(self, samples: int) -> None:
        """Log that an evaluation begins after ``samples`` training samples.

        Raises:
            UserError: training has not begun, another evaluation has not ended,
                or ``samples`` went down.
        """
        if self._log.status is not None:
            return
        if not self._log.run_started or self._evaluates or samples < self._samples:
            raise _out_of_order(f"eval_start({samples})")
        self._evaluates = True
        self._samples = int(samples)
        self._log.start(constants.EVAL_START, metadata={"epoch_num": self._samples})

    def eval_end(self, samples: int, accuracy: Any) -> bool:
        """Log the end of an evaluation.

        The first one that reaches the target closes the log with success.

        Args:
            samples: the same count as in `eval_start`.
            accuracy: a number from 0 to 1, or a one-element tensor.

        Returns:
            True once the target has been reached, now or earlier.

        Raises:
            UserError: no evaluation has begun, or the accuracy is not between 0 and 1.
        """
        value = float(accuracy)
        if not 0.0 <= value <= 1.0:
            raise UserError(
                "config.range",
                f"accuracy {value:g}",
                "is not between 0 and 1",
                "Give a fraction, not a percentage",
            )
        if self._log.status is not None:
            return self._reached
        if not self._evaluates or samples != self._samples:
            raise _out_of_order(f"eval_end({samples})")
        self._evaluates = False
        self._log.end(constants.EVAL_STOP, metadata={"epoch_num": self._samples})
        self._log.event(constants.EVAL_ACCURACY, value, metadata={"epoch_num": self._samples})
        if value >= self.target:
            self._reached = True
            self._stop(constants.SUCCESS, None)
        return self._reached

    def close(self, reason: str | None = None, samples: int | None = None) -> None:
        """Close the log if it is open, as aborted if the run has begun.

        Args:
            reason: for the log (default: the target was not reached).
            samples: training samples so far (default: as at the last evaluation).
        """
        atexit.unregister(self.close)
        if samples is not None and self._log.status is None:
            self._samples = samples
        self._stop(constants.ABORTED, reason or f"target {self.target:g} not reached")

    def for_lightning(self) -> LightningEvents:
        """Return a callback for Lightning's Trainer that writes this log.

        It takes the seed of ``seed_everything``, the accumulation, the rate and the steps from the
        Trainer. Pass the other hyperparameters to the constructor, global_batch_size among them.
        The metric is the name that ``self.log`` was called with in validation.
        """
        return LightningEvents(self)

    # Events of Hugging Face's Trainer; `__getattr__` ignores all others

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the hyper-parameters missing from the constructor from the Trainer's arguments,
        and start the clock.
        """
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        warmup = int(args.get_warmup_steps(state.max_steps))
        own: dict[str, Value] = {
            "seed": args.seed,
            "global_batch_size": batch,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "opt_name": str(getattr(args.optim, "value", args.optim)),
            "opt_base_learning_rate": args.learning_rate,
            "opt_learning_rate_training_steps": state.max_steps,
            "opt_learning_rate_warmup_steps": warmup,
            "num_warmup_steps": warmup,
            "start_warmup_step": 0,
        }
        self._start(own | self.hyperparameters, [key for key in REQUIRED if key not in _AT_THE_END])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the start of an evaluation that follows this step,
        unless a later callback requested it.
        """
        if control.should_evaluate and not self._evaluates:
            self.eval_start(self._samples_of(state))

    on_epoch_end = on_step_end

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any
    ) -> None:
        """Log the end of an evaluation. Raises UserError if it has the label but not the metric."""
        if not self._log.run_started or not any(name.startswith(self._label) for name in metrics):
            return
        if self.metric not in metrics:
            reason = f"is not among the metrics {', '.join(metrics)}"
            raise UserError("config.choice", self.metric, reason, "Set metric_name")
        samples = self._samples_of(state)
        if not self._evaluates:
            self.eval_start(samples)
        if "eval_samples" not in self.hyperparameters and kwargs.get("eval_dataloader") is not None:
            self.hyperparameters["eval_samples"] = len(kwargs["eval_dataloader"].dataset)
        if self.eval_end(samples, metrics[self.metric]) and self.exit_at_target:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the log: the Trainer has reached its limit or the target."""
        self.close(samples=self._samples_of(state))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__} has no {name}")

    # Helpers

    def _start(self, known: dict[str, Value], required: Sequence[str]) -> None:
        if self._log.run_started:
            raise _out_of_order("fit_start")
        self.hyperparameters = known
        wanted = list(required)
        if self._division == "closed":
            wanted += REQUIRED_IN_CLOSED
        missing = [key for key in wanted if key not in known]
        if missing:
            reason = f"lack {', '.join(missing)}"
            raise UserError("config.missing", "hyperparameters", reason, "Give them by these names")
        for key, value in self.hyperparameters.items():
            if key not in _AT_THE_END:
                self._log.event(key, value)
        self._log.end(constants.INIT_STOP)
        self._log.start(constants.RUN_START)
        self._log.start(constants.EPOCH_START, metadata={"epoch_num": 0})
        self._log.start(constants.BLOCK_START, metadata={**_BLOCK, "epoch_count": 1})

    def _stop(self, status: str, reason: str | None) -> None:
        if self._log.run_started and self._log.status is None:
            self._log.end(constants.BLOCK_STOP, metadata=_BLOCK)
            self._log.end(constants.EPOCH_STOP, metadata={"epoch_num": self._samples})
            self._log.event(constants.TRAIN_SAMPLES, self._samples)
            if "eval_samples" in self.hyperparameters:
                self._log.event(constants.EVAL_SAMPLES, self.hyperparameters["eval_samples"])
            self._log.run_stop(status, {"reason": reason} if reason else None)
        self._log.close()

    def _describe(self, submitter: str, status: str, host_processors: int | None) -> dict[str, str]:
        nodes = max(1, _number("WORLD_SIZE", 1) // max(1, _number("LOCAL_WORLD_SIZE", 1)))
        facts = describe_system(submitter, self._division, nodes) | {"status": STATUSES[status]}
        return (
            facts
            if host_processors is None
            else facts | {"host_processors_per_node": str(int(host_processors))}
        )

    def _samples_of(self, state: Any) -> int:
        return int(state.global_step) * int(self.hyperparameters["global_batch_size"])


def _out_of_order(call: str) -> UserError:
    remedy = (
        "Call fit_start once for each MLPerfCallback, "
        "then eval_start and eval_end alternately, with increasing samples"
    )
    return UserError("callback.order", call, "is out of order", remedy)


def _number(name: str, otherwise: int) -> int:
    """Return an integer from the environment, or the default if it is not one."""
    text = environment().get(name, "").strip()
    return int(text) if text.isdecimal() else otherwise


def _default_name(facts: Mapping[str, str]) -> str:
    device = facts.get("accelerator_model_name", "N/A")
    words = re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_").lower() if device != "N/A" else "cpu"
    return f"{_number('WORLD_SIZE', 1)}x{words}"


def _refuse_result(path: Path) -> None:
    """Raise UserError if the log contains run_start: a result is never overwritten."""
    if path.exists() and f'"{constants.RUN_START}"' in path.read_text(
        encoding="utf-8", errors="replace"
    ):
        reason = "exists, and no result is overwritten"
        raise UserError("file.exists", path, reason, "Choose another index, or move it away")


def _keep_description(path: Path, facts: dict[str, str]) -> None:
    """Write the description unless one exists, because a person may have completed it."""
    if not path.exists():
        write_description(path, facts)
        return
    there = read_json(path, "Remove it, and a new one is written")
    if differing := [name for name in ("submitter", "division") if there.get(name) != facts[name]]:
        words = ", ".join(
            f"{name} {there.get(name)!r} and not {facts[name]!r}" for name in differing
        )
        raise UserError(
            "config.conflict",
            path,
            f"says {words}",
            "Give the value in the file, or a different system_name",
        )


def _clear_caches(command: str | Sequence[str] | None, local_rank: int) -> bool:
    """Run the command. Returns True if there is one."""
    if command is None or local_rank != 0:
        return command is not None
    words = shlex.split(command) if isinstance(command, str) else list(command)
    try:
        subprocess.run(
            words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except (OSError, IndexError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "").strip() or str(error)
        raise UserError(
            "program.failed", "cache_clear_cmd", f"failed ({reason})", "Fix it, or give None"
        ) from None
    return True
