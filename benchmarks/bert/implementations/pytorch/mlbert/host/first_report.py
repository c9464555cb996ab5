"""Report a failure once on a machine, if all processes of a job there have it.

The ranks of a run agree on who reports an error once they are connected
(`mlbert.distributed.rendezvous`). An error before that, such as a missing package, may concern all
of them or one. So the first process of the job to fail on each machine reports it, and the others
there end quietly. Other machines than rank 0's wait for a moment: launchers end all ranks when the
first one exits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping

from mlbert.host.environment import environment
from mlbert.host.exit_statuses import quiet_on_signal
from mlbert.host.texts import is_count

# How long the first process to fail keeps the others of its machine from reporting.
HOLD_SECONDS = 3.0
# How long other machines than rank 0's wait for its report.
OTHER_MACHINE_SECONDS = 2.0
# Names under which launchers export the number of ranks, the rank,
# and the number of ranks on this machine.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# What the processes of one job have in common, and those of another job on the machine do not.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def reporting_once(status: int) -> Iterator[bool]:
    """Yield True if this process should report its failure, and False if another one of the same
    job on this machine does.

    The one that reports waits at the end of the block, so that the others find it. A single process
    waits for nothing. SIGTERM, with which launchers end the others, ends it with ``status``.
    """
    environ = environment()
    if not is_one_of_many():
        yield True
        return
    with quiet_on_signal(status):
        if not _is_on_first_machine(environ):
            time.sleep(OTHER_MACHINE_SECONDS)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
            try:
                claim.bind(_name(environ))
            except OSError:
                yield False
                return
            yield True
            time.sleep(HOLD_SECONDS)


def is_one_of_many() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    environ = environment()
    size = _first_count(environ, _SIZES)
    if size is not None:
        return size > 1
    # A launcher that gives a rank and forgets the number of ranks. Slurm's batch script has a rank.
    names = (*_RANKS[:-1], *_LOCAL_RANKS[:-1])
    return any(environ.get(name, "").strip() for name in names)


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or its rank is unknown."""
    return not _first_count(environment(), _RANKS)


def _is_on_first_machine(environ: Mapping[str, str]) -> bool:
    """Return whether rank 0 runs on this machine; True if the rank is unknown."""
    rank = _first_count(environ, _RANKS)
    local_rank = _first_count(environ, _LOCAL_RANKS)
    return rank is None or local_rank is None or rank == local_rank


def _first_count(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    texts = [environ.get(name, "").strip() for name in names]
    return next((int(text) for text in texts if is_count(text)), None)


def _name(environ: Mapping[str, str]) -> bytes:
    """Return the name of a socket that one process of the job on this machine can have, and that
    the kernel frees when it ends.
    """
    job = [environ.get(name, "").strip() for name in _JOB]
    words = job if any(job) else [str(os.getppid())]
    digest = hashlib.sha256("\n".join([str(os.getuid()), *words]).encode()).hexdigest()
    return f"\0mlbert-failure-{digest}".encode()  # a first byte of 0: not a file
