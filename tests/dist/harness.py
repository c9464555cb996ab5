"""Starts a function on several ranks (gloo on this machine) and collects what each returned.

    results = run_ranks("rank_programs:sum_of_ranks", 2, tmp_path, scale=3)

Each rank is a process of its own with RANK, WORLD_SIZE and the like set. The function gets the started `World` and the
keyword arguments and returns what JSON can hold. The processes are forked from a server that has imported torch, which
costs each of them seconds otherwise.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlbert

PRELOADED = [
    "torch.distributed",
    "mlbert.cli.train",
    "mlbert.recipes.packed_lamb",
    "mlbert.training.experiment",
    "matplotlib.figure",
]
HERE = Path(__file__).resolve().parent
GRACE_S = 1.5  # what the other ranks get after one has failed, before they are ended
TAIL_LINES = 40


class Rank:
    """A process that is forked from the server and calls a function, with this environment and output."""

    def __init__(
        self, function: Callable[..., object], arguments: tuple[Any, ...], environment: dict[str, str], output: Path
    ) -> None:
        self._output = output
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP reads it when torch is loaded, which the server does
        multiprocessing.forkserver.ensure_running()
        del os.environ["OMP_NUM_THREADS"]
        os.environ |= {} if threads is None else {"OMP_NUM_THREADS": threads}
        self._process = context.Process(target=_be_rank, args=(function, arguments, environment, str(output)))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As `subprocess.Popen` tells it; None while it runs."""
        return self._process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float) -> str:
        """Waits for the end; everything that it has printed."""
        self._process.join(timeout)
        self.kill()
        return self._output.read_text(errors="replace")

    def kill(self) -> None:
        """Ends it with what it has started, if it still runs."""
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()


def _be_rank(function: Callable[..., object], arguments: tuple[Any, ...], environ: dict[str, str], output: str) -> None:
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    function(*arguments)


@dataclass
class RankResult:
    """How one rank ended: exit code (negative: the signal), output, returned value or None, seconds it ran."""

    returncode: int
    output: str
    value: Any
    seconds: float


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int, node_size: int | None = None) -> dict[str, str]:
    """This process's environment with one rank's identity and one thread; nodes have `node_size` ranks (None: all)."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "PMI_"))}
    path = [str(HERE), str(Path(mlbert.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    node_size = node_size or world_size
    identity = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % node_size, "LOCAL_WORLD_SIZE": node_size}
    kept |= {key: str(value) for key, value in identity.items()}
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    kept |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return kept


def run_ranks(
    fn_path: str,
    world_size: int,
    tmp_path: Path,
    *,
    node_size: int | None = None,
    time_limit_s: float = 90.0,
    check: bool = True,
    **kwargs: Any,
) -> list[RankResult]:
    """Runs `module:function` on `world_size` ranks.

    Args:
        fn_path: a function in this folder, `(world, **kwargs) -> JSON-able`.
        world_size: at most 4; each process spends seconds on importing torch.
        tmp_path: folder for results and output.
        node_size: ranks of each make-believe node; None: all are on one.
        time_limit_s: after it all ranks are killed and the call fails.
        check: fail, with the output of the rank that failed first, unless all exit with 0. False: ranks may fail.
        **kwargs: handed to the function; JSON-able.
    """
    port = free_port()
    folder = tmp_path / f"ranks-{port}"
    folder.mkdir()
    processes = [
        Rank(
            _run_program,
            (fn_path, kwargs, str(folder / f"{rank}.json")),
            rank_environment(rank, world_size, port, node_size),
            folder / f"{rank}.txt",
        )
        for rank in range(world_size)
    ]
    started = time.monotonic()  # not before: the first one waits until the server has imported torch
    try:
        seconds, first_failed = _wait(processes, started, time_limit_s, check)
    finally:
        for process in processes:
            process.kill()
    results = []
    for rank, process in enumerate(processes):
        file = folder / f"{rank}.json"
        value = json.loads(file.read_text()) if file.exists() else None
        output_text = (folder / f"{rank}.txt").read_text(errors="replace")
        results.append(RankResult(process.returncode, output_text, value, seconds.get(rank, time_limit_s)))
    if check and first_failed is not None:
        raise AssertionError(_report(fn_path, results, first_failed))
    if len(seconds) < world_size:
        hung = [rank for rank in range(world_size) if rank not in seconds]
        raise AssertionError(f"after {time_limit_s:.0f} s: " + _report(fn_path, results, hung[0]))
    return results


def _wait(
    processes: list[Rank], started: float, time_limit_s: float, check: bool
) -> tuple[dict[int, float], int | None]:
    """Seconds of each rank that ended by itself, and the first that failed."""
    seconds: dict[int, float] = {}
    first_failed: int | None = None
    deadline = started + time_limit_s
    while len(seconds) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in seconds and process.poll() is not None:
                seconds[rank] = time.monotonic() - started
                if process.returncode != 0 and first_failed is None:
                    first_failed = rank
                    deadline = min(deadline, time.monotonic() + GRACE_S) if check else deadline
        time.sleep(0.02)
    return seconds, first_failed


def _report(fn_path: str, results: list[RankResult], rank: int) -> str:
    codes = [result.returncode for result in results]
    tail = "\n".join(results[rank].output.splitlines()[-TAIL_LINES:])
    return f"{fn_path}: exit codes {codes}; rank {rank} said:\n{tail}"


def _meet(folder: Path, rank: int, world_size: int) -> None:
    """Waits until every rank has imported torch, so that a test may choose a timeout of few seconds."""
    (folder / f"{rank}.ready").touch()
    while not all((folder / f"{other}.ready").exists() for other in range(world_size)):
        time.sleep(0.02)


def _run_program(fn_path: str, kwargs: dict[str, Any], result: str) -> None:
    """One rank: connects, runs the function, writes what it returns."""
    from mlbert.distributed.world import World

    module, _, name = fn_path.partition(":")
    world = World.identify()
    _meet(Path(result).parent, world.rank, world.world_size)
    world.start(timeout_s=kwargs.pop("collective_timeout_s", 60.0))
    value = getattr(importlib.import_module(module), name)(world, **kwargs)
    Path(result).write_text(json.dumps(value))
    world.stop()
