"""Read this process's rank from the launcher's variables.

Does not import torch, so that the command line starts fast.

The identity is the first of these that is complete; later ones are only checked against it:

1. `RANK` and `WORLD_SIZE`: torchrun, or a site's own launcher;
2. `OMPI_COMM_WORLD_RANK` ... (Open MPI's mpirun), `PMI_RANK` ... (MPICH, Intel MPI);
3. `SLURM_STEP_ID`, `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`: a task started by `srun`. The shell of
   `sbatch` or `salloc` has SLURM_NTASKS and even SLURM_PROCID=0, but no step of many tasks, so it
   counts as a single process;
4. none: a single process.
"""

from __future__ import annotations

import itertools
import re
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import leave_report
from mlbert.host.texts import is_count

DEFAULT_PORT = 29500
HIGHEST_PORT = 65535
# Below the range that Linux uses for outgoing connections (32768 and up).
SLURM_PORTS = (15000, 16384)
LOOPBACK = "127.0.0.1"
REPORT_SECONDS = 2.0  # in which rank 0 reports a mistake that all ranks notice
# Launchers that export rank, world size, local rank and local size, in order of precedence.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
ONE_IDENTITY = "Launch with torchrun, srun or mpirun alone, or unset the variables of the others"


def _mistake(subject: str, problem: str, remedy: str = ONE_IDENTITY) -> UserError:
    return UserError("distributed.identity", subject, problem, remedy)


class _SharedMistake(UserError):
    """A mistake in what the launcher gives to all ranks alike, which one of them reports."""


def _no_hosts(text: str) -> UserError:
    return _SharedMistake(
        "distributed.identity",
        "SLURM_JOB_NODELIST",
        f"'{text}' is not a list of hosts",
        "Set MASTER_ADDR yourself",
    )


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return the variable as an integer of at least 0, or None if it is unset or empty."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not is_count(text):
        raise _mistake(name, f"'{text}' is not a whole number of at least 0")
    return int(text)


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's short form of host names: `gpu[01-03,7],login` -> gpu01, gpu02, gpu03,
    gpu7, login.

    Raises:
        UserError: the text is not a host list.
    """
    entry_form = r"(?:[^,\[\]\s]|\[[^\[\]]*\])+"
    if not re.fullmatch(rf"{entry_form}(?:,{entry_form})*", text):
        raise _no_hosts(text)
    hosts: list[str] = []
    for entry in re.findall(entry_form, text):
        parts = re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", entry)
        choices = [
            [literal] if literal else _expand_ranges(ranges, text) for literal, ranges in parts
        ]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    names: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (is_count(first) and is_count(last)) or int(first) > int(last):
            raise _no_hosts(text)
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's task counts: `4(x2),3` -> 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part, re.ASCII)
        if match is None:
            raise _mistake("SLURM_STEP_TASKS_PER_NODE", f"'{text}' is not a list of task counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@dataclass(frozen=True)
class ProcessIdentity:
    """Rank and sizes from one launcher, before the launchers are checked against each other."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


def _from_variables(
    environ: Mapping[str, str], launcher: str, *names: str
) -> ProcessIdentity | None:
    found = {name: _integer(environ, name) for name in names}
    given = [name for name, value in found.items() if value is not None]
    if not given:
        return None
    rank, world_size, local_rank, local_size = found.values()
    if rank is None or world_size is None:
        missing = " and ".join(name for name in names[:2] if found[name] is None)
        raise _mistake(missing, f"is not set, but {', '.join(given)} is")
    if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
        launcher = "variables"  # a site's own launcher
    return ProcessIdentity(launcher, rank, world_size, local_rank, local_size)


def _from_slurm(environ: Mapping[str, str]) -> ProcessIdentity | None:
    step_tasks = _integer(environ, "SLURM_STEP_NUM_TASKS")
    if not environ.get("SLURM_STEP_ID") or step_tasks is None:
        return None
    rank = _integer(environ, "SLURM_PROCID")
    if step_tasks == 1:
        return ProcessIdentity("slurm", 0, 1, 0, 1)
    if rank is None:
        raise _mistake(
            "SLURM_PROCID",
            f"is not set in a step of {step_tasks} tasks",
            "Start the ranks with srun",
        )
    node = _integer(environ, "SLURM_NODEID")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE")
    counts = expand_tasks_per_node(per_node) if per_node else []
    if node is not None and node < len(counts):
        local_size: int | None = counts[node]
    else:
        local_size = _integer(environ, "SLURM_NTASKS_PER_NODE")
    return ProcessIdentity(
        "slurm", rank, step_tasks, _integer(environ, "SLURM_LOCALID"), local_size
    )


def _check_contradiction(chosen: ProcessIdentity, other: ProcessIdentity) -> None:
    """Raise UserError if two launchers disagree, unless one legitimately runs inside the other.

    If srun or mpirun starts torchrun (or another process launcher) once per node, torchrun's world
    is the larger one. If mpirun starts its daemons with srun, Slurm's identity is that of the
    daemon.
    """
    nested = chosen.world_size > other.world_size or chosen.launcher == "torchrun"
    if nested or (chosen.launcher == "mpirun" and other.launcher == "slurm"):
        return
    if (chosen.rank, chosen.world_size) != (other.rank, other.world_size):
        say = [f"rank {one.rank} of {one.world_size} ({one.launcher})" for one in (chosen, other)]
        raise _mistake("process identity", " contradicts ".join(say))


def _has_agent(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent holds the store.

    Raise UserError if torchrun would restart ranks that then find the addresses of dead ones.

    By default all rounds of its c10d rendezvous share one store, so new ranks find the addresses of
    the previous round there and connect to ranks that no longer exist.
    """
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_agent and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        problem = "is not 1, so ranks restarted by torchrun would wait for the dead ones"
        remedy = "Export it as 1 before torchrun --max-restarts with --rdzv-backend=c10d"
        raise _SharedMistake(
            "distributed.identity", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", problem, remedy
        )
    return has_agent


def _complete_local(identity: ProcessIdentity, one_machine: bool) -> tuple[int, int]:
    """Return local rank and size.

    If the launcher omits them and there is one machine, use the global ones.
    """
    rank = identity.local_rank
    size = identity.local_world_size
    if (rank is None or size is None) and identity.world_size > 1 and not one_machine:
        missing = "local rank" if rank is None else "number of local ranks"
        remedy = "Set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with torchrun or srun"
        problem = f"the {missing} is not set ({identity.launcher})"
        raise _SharedMistake("distributed.identity", "process identity", problem, remedy)
    rank = identity.rank if rank is None else rank
    size = identity.world_size if size is None else size
    for value, limit, name in (
        (identity.rank, identity.world_size, "rank"),
        (rank, size, "local rank"),
    ):
        if value >= limit:
            raise _mistake("process identity", f"{name} {value} of {limit} ({identity.launcher})")
    if size > identity.world_size:
        reason = (
            f"{size} local ranks, but only {identity.world_size} in total ({identity.launcher})"
        )
        raise _mistake("process identity", reason)
    return rank, size


def _is_first(environ: Mapping[str, str]) -> bool:
    """Return whether this is rank 0, or a process whose rank is not known."""
    names = (*(launcher[1] for launcher in _LAUNCHERS), "SLURM_PROCID")
    texts = [environ[name].strip() for name in names if environ.get(name, "").strip()]
    return not texts or not is_count(texts[0]) or int(texts[0]) == 0


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _slurm_head(environ: Mapping[str, str]) -> str | None:
    """Return rank 0's host: the step's first, or, if that name does not resolve here,
    the host that ran srun.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    first = expand_hostlist(nodes)[0] if nodes else None
    launch_node = environ.get("SLURM_LAUNCH_NODE_IPADDR") or None
    return first if first is not None and (launch_node is None or _resolves(first)) else launch_node


def _master_port(environ: Mapping[str, str]) -> int | None:
    text = environ.get("MASTER_PORT", "").strip()
    if not text:
        return None
    if not is_count(text) or int(text) > HIGHEST_PORT:
        remedy = f"Export a port from 1 to {HIGHEST_PORT} that is free on rank 0's machine"
        raise _SharedMistake(
            "distributed.identity", "MASTER_PORT", f"'{text}' is not a port", remedy
        )
    return int(text)


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Return a port that is the same for all ranks of a step,
    and probably differs between steps on one machine.
    """
    job = _integer(environ, "SLURM_JOB_ID") or 0
    step = _integer(environ, "SLURM_STEP_ID") or 0
    first, count = SLURM_PORTS
    return first + (job * 31 + step) % count


@dataclass(frozen=True)
class RankPlace:
    """This process's place among the ranks that train together."""

    rank: int = 0
    local_rank: int = 0  # among the processes of this machine
    world_size: int = 1
    local_world_size: int = 1
    launcher: str = "single"  # or "torchrun", "slurm", "mpirun", "variables"
    master_addr: str = LOOPBACK  # where rank 0 listens, with the port
    master_port: int = DEFAULT_PORT
    # Slurm's name for this node, otherwise the host name.
    host: str = field(default="", compare=False)
    # torchrun's agent, not rank 0, listens there.
    has_agent: bool = field(default=False, compare=False)

    @classmethod
    def identify(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read this process's identity from the environment (the process's own unless one is
        given).

        Raises:
            UserError: the identity is partial, contradicts itself, or rank 0 has no known address.
            SystemExit: the same in this process's own environment, and rank 0 reports it.
        """
        is_own = environ is None or environ is environment()
        environ = environment() if environ is None else environ
        try:
            return cls._identify(environ)
        except _SharedMistake:
            if is_own and not _is_first(environ):
                leave_report(REPORT_SECONDS)
            raise

    def warn_once(self) -> None:
        """Ignore Python's warnings from now on, except on rank 0, which has the same ones."""
        if self.rank:
            warnings.simplefilter("ignore")

    @classmethod
    def _identify(cls, environ: Mapping[str, str]) -> Self:
        host = environ.get("SLURMD_NODENAME") or socket.gethostname()
        found = [
            *(_from_variables(environ, *launcher) for launcher in _LAUNCHERS),
            _from_slurm(environ),
        ]
        identities = [identity for identity in found if identity is not None]
        if not identities:
            return cls(host=host)
        chosen, *others = identities
        for other in others:
            _check_contradiction(chosen, other)
            if chosen.local_rank is None and (chosen.rank, chosen.world_size) == (
                other.rank,
                other.world_size,
            ):
                chosen = other  # srun's PMI plugin sets no local ranks, but srun does
        has_agent = _has_agent(environ)
        if chosen.world_size < 1:
            raise _mistake("process identity", f"the number of ranks is 0 ({chosen.launcher})")
        address = environ.get("MASTER_ADDR", "").strip()
        in_step = chosen.launcher == "slurm"
        is_local = address in ("", "localhost", LOOPBACK)
        one_machine = _integer(environ, "SLURM_STEP_NUM_NODES") == 1 if in_step else is_local
        local_rank, local_world_size = _complete_local(chosen, one_machine)
        if not address:
            if local_world_size == chosen.world_size:
                address = LOOPBACK
            else:
                address = _slurm_head(environ) or ""
        if not address:
            reason = f"is not set, and the {chosen.world_size} ranks are on several machines"
            remedy = "Export the address of the machine of rank 0"
            raise _SharedMistake("distributed.identity", "MASTER_ADDR", reason, remedy)
        port = _master_port(environ) or (_slurm_port(environ) if in_step else DEFAULT_PORT)
        return cls(
            chosen.rank,
            local_rank,
            chosen.world_size,
            local_world_size,
            chosen.launcher,
            address,
            port,
            host,
            has_agent,
        )
