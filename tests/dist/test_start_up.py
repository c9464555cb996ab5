"""The timed part of a run contains no start-up work:
no first use of a collective, no compilation, no capture.
"""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from capturable import TensorLamb, select_capturable
from harness import start_ranks
from mlbert.cli.main import main
from mlbert.distributed.capture import NoCapture
from mlbert.host import native
from mlbert.recipes import packed_lamb_build
from mlbert.runs.events import MLPerfEvents
from mlbert.training import experiment
from mlbert.training.step import GraphMode, Graphs
from training_settings import train_arguments

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
    "broadcast_object_list",
    "all_gather_object",
)

SHARDED = {"sharded_optimizer": "all", "weights_allgather": "bf16", "exchange_padding": "all"}


class EventLog:
    def __init__(self) -> None:
        self.events: dict[str, list[str]] = {"before": [], "timed": [], "after": []}
        self.phase = "before"

    def add(self, event: str) -> None:
        self.events[self.phase].append(event)

    def watch(self, owner: Any, name: str, describe: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.add(describe(*args, **kwargs))
            return original(*args, **kwargs)

        setattr(owner, name, recorded)

    def switch_phase(self, name: str, phase: str) -> None:
        original = getattr(MLPerfEvents, name)

        def switched(*args: Any) -> None:
            self.phase = phase
            original(*args)

        setattr(MLPerfEvents, name, switched)


def watch_everything(event_log: EventLog) -> None:
    for name in filter(lambda name: hasattr(dist, name), COLLECTIVES):
        event_log.watch(
            dist, name, lambda *_, name=name, group=None, **__: f"{name} in group {_number(group)}"
        )
    for owner, name, event in (
        (dist, "new_group", "a new group"),
        (native, "_compile", "a native library is compiled"),
        (torch, "compile", "torch.compile"),
        (NoCapture, "record", "a capture"),
    ):
        event_log.watch(owner, name, lambda *_, event=event, **__: event)
    if importlib.util.find_spec("triton"):
        knobs = importlib.import_module("triton").knobs
        knobs.runtime.jit_post_compile_hook = lambda **_: event_log.add(
            "a Triton kernel is compiled"
        )
    event_log.switch_phase("start", "timed")
    event_log.switch_phase("stop", "after")


def _number(group: dist.ProcessGroup | None) -> str:
    return "of all ranks" if group is None else str(sorted(dist.get_process_group_ranks(group)))


def record_steps(mode: str) -> None:
    """Run steps as graphs on a CPU, with ops and an optimizer that can be captured."""

    def choose(_: str, method: Any, micro_batches: int, *others: Any) -> Graphs:
        select_capturable()
        return Graphs(GraphMode(mode), method.static_shape, micro_batches, NoCapture)

    experiment.check_device = lambda *_: None
    experiment.choose_graphs = choose
    packed_lamb_build.methods.make = lambda _settings, _base_lr, _distributed, _compute, flat, *_: (
        TensorLamb(flat)
    )


def train(folder: Path, graph_mode: str, arguments: list[str]) -> None:
    event_log = EventLog()
    watch_everything(event_log)
    if graph_mode != "none":
        record_steps(graph_mode)
    try:
        main(arguments)
    finally:
        (folder / f"events_{os.environ['RANK']}.json").write_text(json.dumps(event_log.events))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "changes"),
    [("none", SHARDED), ("full_iteration", {"ops": "plain"})],
    ids=["sharded", "graphs"],
)
def test_no_start_up_work_is_timed(tmp_path: Path, mode: str, changes: dict[str, object]) -> None:
    frequent = {
        "eval_iter_start_samples": 8,
        "eval_iter_samples": 8,
        "save_checkpoint_steps": 2,
        "max_steps": 4,
    }
    words = train_arguments(tmp_path, cuda_graph_mode=mode, **frequent, **changes)
    ranks = start_ranks(train, (tmp_path, mode, words), 2, tmp_path)
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0], "\n".join(outputs)
    for rank in range(2):
        events = json.loads((tmp_path / f"events_{rank}.json").read_text())
        assert "all_reduce in group of all ranks" in events["timed"], "the hooks must be installed"
        assert not set(events["timed"]) - set(events["before"])
        for one_time in (
            "a capture",
            "a new group",
            "a native library is compiled",
            "a Triton kernel is compiled",
        ):
            assert one_time not in events["timed"]
        assert ("a capture" in events["before"]) == (mode != "none")
        assert len(events["timed"]) > 10
