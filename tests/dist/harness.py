"""Run a function on several ranks (gloo on this machine) and collect the return values.

    values = run_ranks(sum_of_ranks, 2, tmp_path, scale=3)

Each rank is a separate process with RANK, WORLD_SIZE and so on set. The function gets the started
`World` and the keyword arguments, and returns a JSON-serializable value. The processes are forked
from a server that has already imported torch, which saves seconds per process.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlbert
from programs import free_ports

PRELOADED = [
    "torch.distributed",
    "mlbert.cli.train",
    "mlbert.recipes.packed_lamb_build",
    "mlbert.training.experiment",
    "matplotlib.figure",
]
HERE = Path(__file__).resolve().parent
GRACE_S = 1.5  # time for the other ranks to exit after one has failed, before they are killed
TAIL_LINES = 40


class Rank:
    """A process, forked from the server, that calls a function with the given environment and
    output file.
    """

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
        self._process = context.Process(
            target=_be_rank, args=(named(function), arguments, environment, str(output))
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Return the exit code as `subprocess.Popen` does; None while the process runs."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> str:
        """Wait for the process, kill it after the timeout, and return its output."""
        self._process.join(timeout)
        self.kill()
        return self._output.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


def named(function: Callable[..., object]) -> tuple[str, str]:
    """Return the module and the name by which a process imports a function;
    pytest adds a test's folders to them.
    """
    return function.__module__.removeprefix("tests.dist."), function.__name__


def run_program(
    program: str | Path, words: Sequence[str], folder: Path, environ: dict[str, str]
) -> Rank:
    """Start a Python file with arguments in a folder, as `python program words` does,
    but without importing torch.
    """
    output = Path(tempfile.mkstemp(dir=folder)[1])
    return Rank(run_as_main, ([str(program), *words], str(folder)), environ, output)


def run_as_main(command: list[str], folder: str = ".") -> None:
    os.chdir(folder)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def _be_rank(
    name: tuple[str, str], arguments: tuple[Any, ...], environ: dict[str, str], output: str
) -> None:
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    getattr(importlib.import_module(name[0]), name[1])(*arguments)


def rank_environment(
    rank: int, world_size: int, port: int, node_size: int | None = None
) -> dict[str, str]:
    """Return the environment of one rank; nodes have `node_size` ranks (None: all)."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "PMI_"))
    }
    path = [str(HERE), str(Path(mlbert.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    node_size = node_size or world_size
    identity = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % node_size,
        "LOCAL_WORLD_SIZE": node_size,
    }
    kept |= {key: str(value) for key, value in identity.items()}
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kept |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return kept


def start_ranks(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    size: int,
    folder: Path,
    node_size: int | None = None,
) -> list[Rank]:
    (port,) = free_ports(1)
    environments = [rank_environment(rank, size, port, node_size) for rank in range(size)]
    return [
        Rank(function, arguments, each, folder / f"{port}_{each['RANK']}.txt")
        for each in environments
    ]


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    tmp_path: Path,
    *,
    node_size: int | None = None,
    time_limit_s: float = 90.0,
    check: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run a test's function on up to four ranks, and return its values;
    nodes have `node_size` ranks (None: all).

    If a rank fails or does not end in time, kill all and raise an error with its output. Without
    `check`, a rank may fail; return the exit code and the output of each.
    """
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    ranks = start_ranks(
        _start_and_call, (named(function), kwargs, str(folder)), world_size, folder, node_size
    )
    failed = None
    running = ranks
    deadline = time.monotonic() + time_limit_s
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        running = [rank for rank in ranks if rank.returncode is None]
        if (
            check
            and not failed
            and (failed := next((rank for rank in ranks if rank.returncode), None))
        ):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    failed = failed or next(iter(running), None)
    outputs = [rank.communicate(0) for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    if failed:
        tail = "\n".join(outputs[ranks.index(failed)].splitlines()[-TAIL_LINES:])
        raise AssertionError(
            f"{function.__name__}: exit codes {codes}; output of rank "
            f"{ranks.index(failed)}:\n{tail}"
        )
    if not check:
        return list(zip(codes, outputs, strict=True))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _start_and_call(name: tuple[str, str], kwargs: dict[str, Any], folder: str) -> None:
    from mlbert.distributed.world import World

    world = World.identify()
    # When all ranks have imported torch, timeouts of a few seconds are enough.
    Path(folder, f"{world.rank}.ready").touch()
    while len(list(Path(folder).glob("*.ready"))) < world.world_size:
        time.sleep(0.02)
    world.start(timeout_s=kwargs.pop("collective_timeout_s", 60.0))
    value = getattr(importlib.import_module(name[0]), name[1])(world, **kwargs)
    Path(folder, f"{world.rank}.json").write_text(json.dumps(value))
    world.stop()
