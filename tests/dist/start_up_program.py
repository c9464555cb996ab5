"""Rank program for `test_start_up`: record collectives and their groups, new groups, compilation and captures."""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from capturable import TensorLamb, select_capturable
from mlbert.cli.main import main
from mlbert.distributed.capture import NoCapture
from mlbert.host import native
from mlbert.recipes import packed_lamb_build
from mlbert.runs.events import MLPerfEvents
from mlbert.training import experiment
from mlbert.training.step import GraphMode, Graphs

COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "barrier", "reduce", "gather", "scatter", "all_to_all"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "all_gather_into_tensor", "all_gather_single"),
    *("all_to_all_single", "send", "recv", "isend", "irecv", "broadcast_object_list", "all_gather_object"),
)


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
        event_log.watch(dist, name, lambda *_, name=name, group=None, **__: f"{name} in group {_number(group)}")
    for owner, name, event in (
        *((dist, "new_group", "a new group"), (native, "_compile", "a native library is compiled")),
        *((torch, "compile", "torch.compile"), (NoCapture, "record", "a capture")),
    ):
        event_log.watch(owner, name, lambda *_, event=event, **__: event)
    if importlib.util.find_spec("triton"):
        knobs = importlib.import_module("triton").knobs
        knobs.runtime.jit_post_compile_hook = lambda **_: event_log.add("a Triton kernel is compiled")
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
    packed_lamb_build.methods.make = lambda _settings, _base_lr, _distributed, _compute, flat, *_: TensorLamb(flat)


def train(folder: Path, graph_mode: str, arguments: list[str]) -> None:
    event_log = EventLog()
    watch_everything(event_log)
    if graph_mode != "none":
        record_steps(graph_mode)
    try:
        main(arguments)
    finally:
        (folder / f"events_{os.environ['RANK']}.json").write_text(json.dumps(event_log.events))
