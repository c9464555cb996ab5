"""A mistake of all ranks is reported in at most three lines, at any number of ranks.

All ranks write to one file, and no launcher ends them. MLBERT_RANKS sets another number of ranks;
a record has the lines for 256.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from harness import Rank, rank_environment
from mlbert.cli.main import main
from mlbert.distributed import rendezvous
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.host.command_line import exit_code
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import FAILED, LOST_RANK, WRONG_INPUT
from programs import free_ports
from training_settings import train_arguments

RANKS = int(os.environ.get("MLBERT_RANKS", "16"))
NODE_RANKS = 8
TIME_LIMIT_S = 60 + RANKS
MOST_LINES = 3
BAD_STEP = 2
REACH_SECONDS = 4.0

Settings = dict[str, object]


def train_with(folder: Path, **changes: object) -> Callable[[], None]:
    """Return a run of ``mlbert train`` with these settings."""
    return lambda: main(train_arguments(folder, **changes))


def misspell(folder: Path) -> Callable[[], None]:
    return lambda: main([*train_arguments(folder), "--learning-rat", "1e-3"])


def take_the_port(folder: Path) -> Callable[[], None]:
    """Another program has rank 0's port."""
    rendezvous.JOIN_SECONDS = REACH_SECONDS
    if os.environ["RANK"] == "0":
        taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        taken.set_inheritable(True)
        os.dup(taken.fileno())
    return train_with(folder)


def name_no_host(folder: Path) -> Callable[[], None]:
    rendezvous.HEAD_SECONDS = rendezvous.JOIN_SECONDS = REACH_SECONDS
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    return train_with(folder)


def forget_the_number_of_ranks(folder: Path) -> Callable[[], None]:
    del os.environ["WORLD_SIZE"]
    return train_with(folder)


def lack_torch(folder: Path) -> Callable[[], None]:
    def work() -> NoReturn:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    return lambda: _exit(work)


def lack_open_files(folder: Path) -> Callable[[], None]:
    from mlbert.distributed import open_files

    open_files.resource.getrlimit = lambda _: (64, 64)
    return train_with(folder)


def read_damaged_data(folder: Path) -> Callable[[], None]:
    """All ranks find damage in the same step."""
    return lambda: _exit(_steps(lambda: _raise(UserError("data.damaged", "a.h5", "is damaged"))))


def lose_a_rank(folder: Path) -> Callable[[], None]:
    def die() -> None:
        if os.environ["RANK"] == str(RANKS // 2):
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: _exit(_steps(die))


def mistakes() -> dict[str, tuple[Callable[[Path], Callable[[], None]], str, int]]:
    """Return what each mistake's ranks do, words of the report, and the exit status."""
    return {
        "a setting's value": (
            lambda folder: train_with(folder, learning_rate="fast"),
            "'fast' is not a number",
            WRONG_INPUT,
        ),
        "a setting's name": (misspell, "--learning-rat", WRONG_INPUT),
        "missing data": (
            lambda folder: train_with(folder, synthetic_data=0, input_dir=folder / "nowhere"),
            "nowhere",
            WRONG_INPUT,
        ),
        "damaged weights": (
            lambda folder: train_with(folder, init_checkpoint=folder / "damaged.safetensors"),
            "damaged.safetensors",
            WRONG_INPUT,
        ),
        "a port in use": (take_the_port, "is taken by another program", WRONG_INPUT),
        "a host without address": (name_no_host, "no-such-host.invalid", WRONG_INPUT),
        "half of a launcher": (forget_the_number_of_ranks, "WORLD_SIZE: is not set", WRONG_INPUT),
        "no torch": (lack_torch, "torch: is not installed", WRONG_INPUT),
        "few open files": (lack_open_files, "the hard limit on open files is 64", WRONG_INPUT),
        "damaged data": (read_damaged_data, "a.h5: is damaged", WRONG_INPUT),
        "a lost rank": (lose_a_rank, f"rank {RANKS // 2} on ", LOST_RANK),
    }


def fail_in_inspection(folder: Path) -> Callable[[], None]:
    from mlbert.training import experiment

    experiment._inspect = lambda *_: _raise(ValueError("a defect"))
    return train_with(folder)


def fail_in_a_step(folder: Path) -> Callable[[], None]:
    return lambda: _exit(_steps(lambda: _raise(ValueError("a defect"))))


def defects() -> dict[str, Callable[[Path], Callable[[], None]]]:
    """Return what each defect's ranks do."""
    return {"before the run": fail_in_inspection, "in a step": fail_in_a_step}


def _raise(error: Exception) -> NoReturn:
    raise error


def _exit(work: Callable[[], int]) -> NoReturn:
    raise SystemExit(exit_code(work))


def _steps(fail: Callable[[], None]) -> Callable[[], int]:
    """Return steps as of a training run, in which ranks may fail."""

    def work() -> int:
        world = World.identify()
        world.rendezvous.run_all("inputs", lambda: None)
        world.start()
        with Lifecycle(world, lambda *_: None).guard():
            for step in range(BAD_STEP + 1):
                world.barrier()
                if step == BAD_STEP:
                    fail()
            world.barrier()
        return 0

    return work


@contextmanager
def _children(ranks: int, run: Callable[[int], None]) -> Iterator[dict[int, int]]:
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            signal.alarm(TIME_LIMIT_S)
            status = 0
            try:
                run(rank)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            finally:
                os._exit(status)
        children[child] = rank
    yield children


def start_and_wait(ranks: int, folder: str, kind: str) -> None:
    (port,) = free_ports(1)
    prepare = defects()[kind] if kind in defects() else mistakes()[kind][0]

    def run(rank: int) -> None:
        os.environ.clear()
        os.environ.update(rank_environment(rank, ranks, port, NODE_RANKS))
        prepare(Path(folder))()

    codes = {}
    with _children(ranks, run) as children:
        while len(codes) < ranks:
            child, status = os.wait()
            codes[children[child]] = os.waitstatus_to_exitcode(status)
    Path(folder, "codes.json").write_text(json.dumps([codes[rank] for rank in range(ranks)]))


def lines_and_codes(folder: Path, kind: str) -> tuple[list[str], list[int]]:
    """Return all lines that the ranks print, and their exit statuses."""
    (folder / "damaged.safetensors").write_bytes(b"no weights")
    environment = rank_environment(0, 1, 1) | {"RES_OPTIONS": "timeout:1 attempts:1"}
    parent = Rank(start_and_wait, (RANKS, str(folder), kind), environment, folder / "output.txt")
    output = parent.communicate(TIME_LIMIT_S + 30)
    assert parent.returncode == 0, output
    return output.splitlines(), json.loads((folder / "codes.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", mistakes())
def test_a_mistake_is_reported_once(tmp_path: Path, kind: str) -> None:
    lines, codes = lines_and_codes(tmp_path, kind)
    _, words, status = mistakes()[kind]
    assert any(words in line for line in lines), lines
    assert len(lines) <= MOST_LINES, lines
    victim = RANKS // 2 if kind == "a lost rank" else -1
    assert codes == [-signal.SIGKILL if rank == victim else status for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", defects())
def test_a_defect_of_all_ranks_has_one_traceback(tmp_path: Path, kind: str) -> None:
    lines, codes = lines_and_codes(tmp_path, kind)
    assert sum("mlbert: error: " in line for line in lines) == 1, lines
    assert sum("Traceback" in line for line in lines) == 1, lines
    assert lines.count("ValueError: a defect") == 1
    assert set(codes) <= {FAILED, LOST_RANK}
