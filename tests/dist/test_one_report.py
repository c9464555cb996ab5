"""A mistake of all ranks is reported in at most three lines, at any number of ranks.

All ranks write to one file, and no launcher ends them. MLBERT_RANKS sets another number of ranks;
a record has the lines for 256.
"""

import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import save_file

from harness import Rank, rank_environment
from mlbert.cli.main import main
from mlbert.distributed import rendezvous
from mlbert.distributed.lifecycle import Lifecycle
from mlbert.distributed.world import World
from mlbert.host.command_line import exit_code
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import FAILED, LOST_RANK, SUCCEEDED, WRONG_INPUT
from programs import free_ports
from training_settings import train_arguments

RANKS = int(os.environ.get("MLBERT_RANKS", "16"))
NODE_RANKS = 8
TRAINING_RANKS = 16
TIME_LIMIT_S = 60 + RANKS
MOST_LINES = 3
BAD_STEP = 2
REACH_SECONDS = 4.0
DISK_BYTES = 4096

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


def forget_the_address(folder: Path) -> Callable[[], None]:
    del os.environ["MASTER_ADDR"]
    return train_with(folder)


def have_a_rank_twice(folder: Path) -> Callable[[], None]:
    rendezvous.JOIN_SECONDS = REACH_SECONDS
    if os.environ["RANK"] == "3":
        os.environ["RANK"] = "2"
        os.environ["LOCAL_RANK"] = "2"
    return train_with(folder)


def set_another_rate_on_one_node(folder: Path) -> Callable[[], None]:
    is_other = int(os.environ["RANK"]) // NODE_RANKS == 1
    return train_with(folder, learning_rate=0.02 if is_other else 0.01)


def fill_the_disk(folder: Path) -> Callable[[], None]:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, hard))
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
        "missing weights": (
            lambda folder: train_with(folder, init_checkpoint=folder / "none.safetensors"),
            "none.safetensors",
            WRONG_INPUT,
        ),
        "weights of another shape": (
            lambda folder: train_with(folder, init_checkpoint=folder / "other.safetensors"),
            "other.safetensors",
            WRONG_INPUT,
        ),
        "an unreadable vocabulary": (
            lambda folder: train_with(
                folder,
                recipe="masked_lm_text",
                synthetic_data=0,
                input_dir=folder,
                eval_dir=folder,
                tokenizer=folder / "damaged.safetensors",
                optimizer="adamw",
                average_packing_rate=1,
                max_seq_length=32,
                masking_rate=0.15,
                schedule="linear",
            ),
            "damaged.safetensors",
            WRONG_INPUT,
        ),
        "a batch that cannot be divided": (
            lambda folder: train_with(folder, gradient_accumulation_steps=3),
            "3 does not divide BATCHSIZE 4",
            WRONG_INPUT,
        ),
        "a full disk": (fill_the_disk, "File too large", WRONG_INPUT),
        "an output folder that is a file": (
            lambda folder: train_with(folder, output_dir=folder / "damaged.safetensors" / "out"),
            "damaged.safetensors",
            WRONG_INPUT,
        ),
        "kernels for another device": (
            lambda folder: train_with(folder, ops="fmha"),
            "fmha",
            WRONG_INPUT,
        ),
        "another setting on one node": (
            set_another_rate_on_one_node,
            "LR: is 0.02 here, and 0.01 on rank 0",
            WRONG_INPUT,
        ),
        "no address of rank 0": (forget_the_address, "MASTER_ADDR: is not set", WRONG_INPUT),
        "a rank twice": (have_a_rank_twice, "rank 2: is the rank of two processes", WRONG_INPUT),
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


def runs() -> dict[str, Callable[[Path], Callable[[], None]]]:
    """Return runs without a mistake, whose target is missed."""
    return {"two steps": lambda folder: train_with(folder, max_steps=2)}


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
    whatever = defects() | runs() | {name: mistake[0] for name, mistake in mistakes().items()}
    prepare = whatever[kind]

    def run(rank: int) -> None:
        os.environ.clear()
        os.environ.update(rank_environment(rank, ranks, port, min(ranks, NODE_RANKS)))
        prepare(Path(folder))()

    codes = {}
    with _children(ranks, run) as children:
        while len(codes) < ranks:
            child, status = os.wait()
            codes[children[child]] = os.waitstatus_to_exitcode(status)
    Path(folder, "codes.json").write_text(json.dumps([codes[rank] for rank in range(ranks)]))


def lines_and_codes(folder: Path, kind: str, ranks: int = RANKS) -> tuple[list[str], list[int]]:
    """Return all lines that the ranks print, and their exit statuses."""
    (folder / "damaged.safetensors").write_bytes(b"no weights")
    other = {"bert.embeddings.word_embeddings.weight": torch.zeros(40, 8)}
    save_file(other, folder / "other.safetensors")
    environment = rank_environment(0, 1, 1) | {"RES_OPTIONS": "timeout:1 attempts:1"}
    parent = Rank(start_and_wait, (ranks, str(folder), kind), environment, folder / "output.txt")
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
def test_many_ranks_print_one_line_more_than_one_rank_does(tmp_path: Path) -> None:
    """The line says where the ranks run."""
    counts = []
    for ranks in (1, min(RANKS, TRAINING_RANKS)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        lines, codes = lines_and_codes(folder, "two steps", ranks)
        assert codes == [FAILED] + [SUCCEEDED] * (ranks - 1), lines
        counts.append(len(lines))
    assert counts[1] == counts[0] + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", defects())
def test_a_defect_of_all_ranks_has_one_traceback(tmp_path: Path, kind: str) -> None:
    lines, codes = lines_and_codes(tmp_path, kind)
    assert sum("mlbert: error: " in line for line in lines) == 1, lines
    assert sum("Traceback" in line for line in lines) == 1, lines
    assert lines.count("ValueError: a defect") == 1
    assert set(codes) <= {FAILED, LOST_RANK}
