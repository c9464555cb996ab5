"""The limit on open files (`ulimit -n`), which every connection between ranks counts against."""

from __future__ import annotations

import resource
import sys

from mlbert.host.errors import UserError

# Rank 0 has three connections to each rank: gloo's, the store's and the watch's. The other ranks have only gloo's, but
# get the same limit, so that all ranks report the same mistake, which is printed once.
CONNECTIONS_PER_RANK = 3
OTHER_FILES = 256  # data, logs, libraries, devices and NCCL's sockets


def raise_open_files_limit(world_size: int) -> None:
    """Raise the soft limit on open files to what a run of so many ranks needs.

    The limit is never lowered. Where the hard limit allows it, it becomes twice the need: further groups of ranks have
    their own connections.

    Raises:
        UserError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    needed = CONNECTIONS_PER_RANK * world_size + OTHER_FILES
    if needed > most:
        reason = f"the hard limit on open files is {hard}, and {world_size} ranks need {needed}"
        raise UserError(
            "machine.open-files",
            "ulimit -n",
            reason,
            "Raise it on every node (LimitNOFILE of slurmd, --ulimit nofile of docker)",
        )
    wanted = min(2 * needed, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
