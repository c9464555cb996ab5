"""Runs whose steps are graphs: the same numbers as without, refusals, and batches that are too large."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from capturable import SHAPE, TensorLamb, select_capturable
from mlbert.data.loading.batches import StaticShape
from mlbert.distributed.capture import NoCapture
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.recipes import assembly
from mlbert.training import experiment
from mlbert.training.protocols import Method
from mlbert.training.step import GraphMode, Graphs, choose_graphs
from recorded_graph import RecordedGraph
from training_settings import read_metrics, run, train
from user_errors import user_error

CUDA = torch.device("cuda")
BUDGET = StaticShape(128, 3, 16, 64, has_labels=False)
pytestmark = pytest.mark.usefixtures("restore_selection")


@pytest.fixture
def graphed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run on the CPU with ops and an optimizer that can be recorded; returns its folder."""

    def start(name: str, mode: str, capture: type = RecordedGraph) -> Path:
        def choose(mode: str, method: Method, micro_batches: int, *_: object) -> Graphs | None:
            select_capturable()
            return Graphs(GraphMode(mode), method.static_shape, micro_batches, capture) if mode != "none" else None

        monkeypatch.setattr(experiment, "check_device", lambda *_: None)
        monkeypatch.setattr(experiment, "choose_graphs", choose)
        monkeypatch.setattr(assembly.methods, "make", lambda *given: TensorLamb(given[4]))  # flat
        train(tmp_path, name, ops="plain", cuda_graph_mode=mode, max_steps=4)
        return tmp_path / name

    return start


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(folder)]


@pytest.mark.parametrize("mode", ["segmented", "full_iteration"])
def test_a_graphed_run_equals_one_without_graphs(graphed, mode, capsys):
    """Bit for bit; batches are filled up in both."""
    replayed = graphed("replayed", mode)
    printed = capsys.readouterr().out
    assert f"CUDA graphs: {mode}" in printed
    assert "without a graph" not in printed
    called = graphed("called", mode, NoCapture)
    assert numbers(replayed) == numbers(called)
    weights = "run_0/weights/model.safetensors"
    assert (replayed / weights).read_bytes() == (called / weights).read_bytes()


def test_a_batch_over_the_budget_runs_without_a_graph(graphed, monkeypatch, capsys):
    monkeypatch.setattr(assembly, "budget_of", lambda *_: BUDGET)
    replayed = graphed("replayed", "segmented")
    assert capsys.readouterr().out.count("step 1 runs without a graph: a batch exceeds StaticShape(") == 1
    assert numbers(replayed) == numbers(graphed("plain", "none"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine trains on a CUDA device")
def test_a_cpu_is_refused(tmp_path, capsys):
    assert run(tmp_path, cuda_graph_mode="segmented") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA_GRAPH_MODE=segmented" in line
    assert "PyTorch finds none" in line


def method(
    obstacle: str | None = None, static_shape: StaticShape | None = BUDGET, can_capture: bool = True
) -> SimpleNamespace:
    model = SimpleNamespace(capture_obstacle=lambda device, max_seqlen: obstacle)
    optimizer = SimpleNamespace(can_capture=can_capture, implementation="plain")
    return SimpleNamespace(model=model, static_shape=static_shape, optimizer=optimizer)


def test_graphs_need_supported_ops():
    assert choose_graphs("none", method("anything", None, False), 1, CUDA, 2) is None
    assert choose_graphs("segmented", method(can_capture=False), 2, CUDA, 2).micro_batches == 2
    assert choose_graphs("segmented", method(), 1, CUDA, 2).smaller == (), "packs"
    lone = StaticShape.of_packs(8, 64, 1, 64, 10)
    assert choose_graphs("segmented", method(static_shape=lone), 1, CUDA, 2).smaller == lone.smaller_ones() != ()
    assert choose_graphs("full_iteration", method(static_shape=lone), 1, CUDA, 1).smaller == lone.smaller_ones()
    for mode, wanting in (
        ("segmented", method("attention reads on the host")),
        ("segmented", method(static_shape=None)),
        ("full_iteration", method(can_capture=False)),
        ("full_iteration", method(static_shape=lone)),
    ):
        with user_error("config.conflict", f"CUDA_GRAPH_MODE={mode}"):
            choose_graphs(mode, wanting, 1, CUDA, 2)
    ops.select("plain")
    assert "on the host" in BertForPreTraining(SHAPE).capture_obstacle(torch.device("cpu"), 8)
