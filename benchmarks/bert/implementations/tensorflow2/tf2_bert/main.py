"""Run `run_pretraining.py`: published command line, one run,
exit status (docs/how_a_run_ends.md).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence

from absl import app
from absl import flags as absl_flags
from rich.console import Console

from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.mlperf.mllog import constants
from mlbert.ops.config import ComputeConfig
from mlbert.runs.config import RunConfig
from mlbert.runs.run_folder import RunFolder
from tf2_bert import flags

FLAGS = flags.FLAGS
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def prepare_process() -> None:
    """Set the environment variables that TensorFlow reads when it is loaded."""
    threads = {
        "TF_GPU_THREAD_MODE": FLAGS.tf_gpu_thread_mode,
        "TF_GPU_THREAD_COUNT": FLAGS.per_gpu_thread_count,
    }
    for name, value in {**threads, "TF_CPP_MIN_LOG_LEVEL": 2}.items():
        if value and not environment().get(name):
            os.putenv(name, str(value))


def run_bert_pretrain(callbacks: Sequence[object] = ()) -> int:
    """Run once with the parsed flags and return the exit status:
    0, or 1 on the chief if the target is missed.

    For each loop of steps, ``on_batch_begin(number)`` and ``on_batch_end(number)`` of ``callbacks``
    are called. Raises UserError for user mistakes.
    """
    prepare_process()
    from tf2_bert import checkpoints, strategies
    from tf2_bert.experiment import run_experiment
    from tf2_bert.workers import Workers

    gpus = flags.number_of_gpus()
    first = flags.resolve_flags(replicas=1).config
    hosts = [host for host in (FLAGS.worker_hosts or "").split(",") if host]
    tensorflow = first[TensorFlowConfig]
    strategies.prepare_devices(tensorflow, first[ComputeConfig].cpu_threads, gpus)
    strategy, notes = strategies.make_strategy(tensorflow, gpus, hosts, FLAGS.task_index)
    resolved = flags.resolve_flags(strategy.num_replicas_in_sync)
    is_chief = Workers(strategy).is_chief
    console = Console(quiet=not is_chief)
    if FLAGS.model_export_path and is_chief:
        checkpoints.make_folder(FLAGS.model_export_path)  # fail now rather than hours later
    outcome = run_experiment(resolved, strategy, console, callbacks, notes)  # type: ignore[arg-type]
    if FLAGS.model_export_path and is_chief:
        checkpoints.copy_weights(
            RunFolder.of(resolved.config[RunConfig]).folder, FLAGS.model_export_path
        )
    state = outcome.state
    accuracy = (
        f"accuracy {state.accuracy:.4f} after " if resolved.config[TensorFlowConfig].do_eval else ""
    )
    words = f"{accuracy}{state.samples} samples, {outcome.seconds:.1f} s"
    console.print(
        f"{outcome.ending}: {outcome.reason}; {words}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0 if outcome.status == constants.SUCCESS or not is_chief else 1


def exit_status(work: Callable[[], int]) -> int:
    """Return the status of ``work``; for a user mistake, print one line to stderr and return 2."""
    try:
        return work()
    except UserError as error:
        return report_error(error)
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        reason = f"cannot be written ({error.strerror})"
        return report_error(
            UserError(
                "file.unwritable", error.filename or "a file", reason, "Free space or change LOGDIR"
            )
        )


def report_error(mistake: UserError) -> int:
    """Print the mistake to stderr in one line and return its exit status."""
    print(f"mlbert: error: {mistake.as_line()}", file=sys.stderr)
    return mistake.exit_status


def _main(arguments: Sequence[str]) -> None:
    def work() -> int:
        if len(arguments) > 1:
            reason = "is neither a flag nor a flag's value"
            raise UserError(
                "config.syntax", arguments[1], reason, "See run_pretraining.py --helpfull"
            )
        return run_bert_pretrain()

    sys.exit(exit_status(work))


def _parsed(words: Sequence[str]) -> list[str]:
    """Parse the flags and return the remaining arguments; exit if a flag is invalid."""
    try:
        return FLAGS(words)
    except absl_flags.Error as error:
        reason = str(error).splitlines()[0]
        sys.exit(
            report_error(
                UserError(
                    "config.syntax", "the command line", reason, "See run_pretraining.py --helpfull"
                )
            )
        )


def main() -> None:
    """Run the command line; never return."""
    flags.define_flags()
    app.run(_main, flags_parser=_parsed)
