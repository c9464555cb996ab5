"""Run a function on several ranks (gloo on this machine) and collect the return values.

    results = run_ranks("rank_programs:sum_of_ranks", 2, tmp_path, scale=3)

Each rank is a separate process with RANK, WORLD_SIZE and so on set. The function gets the started `World` and the
keyword arguments, and returns a JSON-serializable value. The processes are forked from a server that has already
imported torch, which saves seconds per process.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
GRACE_S = 1.5  # time for the other ranks to exit after one has failed, before they are killed
TAIL_LINES = 40


class Rank:
    """A process, forked from the server, that calls a function with the given environment and output file."""

    def __init__(
        self,
        function: Callable[..., object],
        arguments: tuple[Any, ...],
        environment: dict[str, str],
        output: Path,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        self._output = output
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
        self._process = context.Process(target=_be_rank, args=(function, arguments, environment, str(output)))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Return the exit code as `subprocess.Popen` does; None while the process runs."""
        return self._process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float) -> str:
        """Wait for the process, kill it after the timeout, and return its output."""
        self._process.join(timeout)
        self.kill()
        return self._output.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()


def run_program(program: str | Path, words: Sequence[str], folder: Path, environ: dict[str, str]) -> Rank:
    """Start a Python file with arguments in a folder, as `python program words` does, but without importing torch."""
    output = Path(tempfile.mkstemp(dir=folder)[1])
    return Rank(run_as_main, ([str(program), *words], str(folder)), environ, output)


def run_as_main(command: list[str], folder: str = ".") -> None:
    os.chdir(folder)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


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
    returncode: int
    output: str
    value: Any


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int, node_size: int | None = None) -> dict[str, str]:
    """Return the environment of one rank; nodes have `node_size` ranks (None: all)."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "PMI_"))}
    path = [str(HERE), str(Path(mlbert.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    node_size = node_size or world_size
    identity = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % node_size, "LOCAL_WORLD_SIZE": node_size}
    kept |= {key: str(value) for key, value in identity.items()}
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kept |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return kept


def start_ranks(
    function: Callable[..., object], arguments: tuple[Any, ...], size: int, folder: Path, node_size: int | None = None
) -> list[Rank]:
    port = free_port()
    environments = [rank_environment(rank, size, port, node_size) for rank in range(size)]
    return [Rank(function, arguments, each, folder / f"{port}_{each['RANK']}.txt") for each in environments]


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
    """Run `module:function` of this folder on up to four ranks; nodes have `node_size` ranks (None: all).

    If a rank fails (unless `check` is False) or does not end in time, kill all and raise an error with its output.
    """
    port = free_port()
    folder = tmp_path / f"ranks-{port}"
    folder.mkdir()
    processes = []
    for rank in range(world_size):
        arguments = (fn_path, kwargs, str(folder / f"{rank}.json"))
        environment = rank_environment(rank, world_size, port, node_size)
        processes.append(Rank(_run_program, arguments, environment, folder / f"{rank}.txt"))
    try:
        first_failed = _wait(processes, time_limit_s, check)
        hung = [rank for rank, process in enumerate(processes) if process.poll() is None]
    finally:
        for process in processes:
            process.kill()
    results = []
    for rank, process in enumerate(processes):
        file = folder / f"{rank}.json"
        value = json.loads(file.read_text()) if file.exists() else None
        results.append(RankResult(process.returncode, (folder / f"{rank}.txt").read_text(errors="replace"), value))
    if check and first_failed is not None:
        raise AssertionError(_report(fn_path, results, first_failed))
    if hung:
        raise AssertionError(f"after {time_limit_s:.0f} s: " + _report(fn_path, results, hung[0]))
    return results


def _wait(processes: list[Rank], time_limit_s: float, check: bool) -> int | None:
    """Wait until all ranks have exited, but not much longer after a failure; return the first rank that failed."""
    first_failed, running = None, True
    deadline = time.monotonic() + time_limit_s
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        codes = [process.poll() for process in processes]
        running = None in codes
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed and first_failed is None:
            first_failed = failed[0]
            deadline = min(deadline, time.monotonic() + GRACE_S) if check else deadline
    return first_failed


def _report(fn_path: str, results: list[RankResult], rank: int) -> str:
    codes = [result.returncode for result in results]
    tail = "\n".join(results[rank].output.splitlines()[-TAIL_LINES:])
    return f"{fn_path}: exit codes {codes}; output of rank {rank}:\n{tail}"


def _run_program(fn_path: str, kwargs: dict[str, Any], result: str) -> None:
    from mlbert.distributed.world import World

    module, _, name = fn_path.partition(":")
    world = World.identify()
    # When all ranks have imported torch, timeouts of a few seconds are enough.
    Path(result).with_suffix(".ready").touch()
    while len(list(Path(result).parent.glob("*.ready"))) < world.world_size:
        time.sleep(0.02)
    world.start(timeout_s=kwargs.pop("collective_timeout_s", 60.0))
    value = getattr(importlib.import_module(module), name)(world, **kwargs)
    Path(result).write_text(json.dumps(value))
    world.stop()
