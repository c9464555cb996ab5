"""One rank of `test_start_up`: trains, and writes down what begins when: the first use of a collective in a group, a
new group, a kernel or library that is compiled, a capture.

    python start_up_program.py <folder> <CUDA_GRAPH_MODE> <word>...        words as for ``mlbert``
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

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


class Diary:
    """What happened before the clock ran, while it ran, and when it had stopped."""

    def __init__(self) -> None:
        self.events: dict[str, list[str]] = {"before": [], "timed": [], "after": []}
        self.moment = "before"

    def note(self, what: str) -> None:
        self.events[self.moment].append(what)

    def watch(self, owner: Any, name: str, words: Callable[..., str]) -> None:
        """Notes each call of a function."""
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(words(*args, **kwargs))
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    def turn(self, name: str, moment: str) -> None:
        """From a call of this event on it is another moment."""
        original = getattr(MLPerfEvents, name)

        def turned(*args: Any) -> None:
            self.moment = moment
            original(*args)

        setattr(MLPerfEvents, name, turned)


def watch_everything(diary: Diary) -> None:
    """Sets all the traps."""
    for name in filter(lambda name: hasattr(dist, name), COLLECTIVES):
        diary.watch(dist, name, lambda *_, name=name, group=None, **__: f"{name} in group {_number(group)}")
    diary.watch(dist, "new_group", lambda *_, **__: "a new group")
    diary.watch(native, "_compile", lambda *_: "a native library is compiled")
    diary.watch(torch, "compile", lambda *_, **__: "torch.compile")
    diary.watch(NoCapture, "record", lambda *_: "a capture")
    if importlib.util.find_spec("triton"):
        knobs = importlib.import_module("triton").knobs
        knobs.runtime.jit_post_compile_hook = lambda **_: diary.note("a Triton kernel is compiled")
    diary.turn("start", "timed")
    diary.turn("stop", "after")


def _number(group: dist.ProcessGroup | None) -> str:
    return "of all ranks" if group is None else str(sorted(dist.get_process_group_ranks(group)))


def record_steps(mode: str) -> None:
    """Steps as graphs on a CPU, with ops and an optimizer that can be captured."""

    def choose(_: str, method: Any, micro_batches: int, *others: Any) -> Graphs:
        select_capturable()
        return Graphs(GraphMode(mode), method.static_shape, micro_batches, NoCapture)

    experiment.check_device = lambda *_: None
    experiment.choose_graphs = choose
    packed_lamb_build.methods.make = lambda _settings, _base_lr, _distributed, _compute, flat, *_: TensorLamb(flat)


if __name__ == "__main__":
    folder, graph_mode, *words = sys.argv[1:]
    kept = Diary()
    watch_everything(kept)
    if graph_mode != "none":
        record_steps(graph_mode)
    try:
        main(words)
    finally:
        (Path(folder) / f"diary_{os.environ['RANK']}.json").write_text(json.dumps(kept.events))
