"""The limit on open files that ranks need, because each of them has connections to others."""

from __future__ import annotations

import resource
import sys

from mlbert.host.errors import UserError

# Rank 0 has two connections to each rank: for the store and the watch. The other ranks have one of
# each, but get the same limit, so that all ranks report the same mistake, which is printed once.
CONNECTIONS_PER_RANK = 2
OTHER_FILES = 256  # data, logs, libraries, devices and NCCL's sockets


def raise_open_files_limit(world_size: int) -> None:
    """Raise the soft limit on open files (`ulimit -n`) to what a run of ``world_size`` ranks needs.

    The limit is never lowered. If the hard limit allows it, it becomes twice the need, because
    further groups of ranks open more connections.

    Raises:
        UserError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    needed = CONNECTIONS_PER_RANK * world_size + OTHER_FILES
    if needed > most:
        reason = f"the hard limit on open files is {hard}, and {world_size} ranks need {needed}"
        remedy = "Raise it on every node (LimitNOFILE of slurmd, --ulimit nofile of docker)"
        raise UserError("machine.open-files", "ulimit -n", reason, remedy)
    limit = min(2 * needed, most)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
