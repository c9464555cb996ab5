"""Runs whose steps are graphs: the same numbers as without, refusals, and batches that are too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from capturable import TensorLamb, select_capturable
from mlbert import ops
from mlbert.cli.main import main
from mlbert.core.errors import UserError
from mlbert.dist.capture import NoCapture
from mlbert.dist.world import World
from mlbert.feed.budget import Budget
from mlbert.optim import methods
from mlbert.recipes import packed_lamb
from mlbert.train import experiment, graphs
from recorded_graph import RecordedGraph
from training_settings import read_metrics, train_arguments

CUDA = torch.device("cuda")
BUDGET = Budget(128, 3, 16, 64)
FAST = {"attention": "flash"}
MODES = ("segmented", "full_iteration")


@pytest.fixture(autouse=True)
def choose_ops_anew() -> Iterator[None]:
    yield
    ops.select("auto")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run on the CPU with ops and an optimizer that can be recorded; returns its folder."""

    def start(name: str, mode: str, capture: type = RecordedGraph) -> Path:
        monkeypatch.setattr(experiment, "check_graph_mode", lambda *_: select_capturable())
        monkeypatch.setattr(graphs, "CudaCapture", lambda device: capture())
        monkeypatch.setitem(methods.OPTIMIZERS, "lamb", lambda flat, layout, **numbers: TensorLamb(flat, **numbers))
        with pytest.raises(SystemExit) as end:
            main(train_arguments(tmp_path, name, ops="plain", precision="fp32", cuda_graph_mode=mode, max_steps=4))
        assert end.value.code == 1  # the target is out of reach
        return tmp_path / name

    return start


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(folder)]


def weights(folder: Path) -> bytes:
    return (folder / "run_0/weights/model.safetensors").read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_graphed_run_equals_one_without_graphs(run: Callable[..., Path], mode: str, capsys) -> None:
    """Bit for bit; batches are filled up in both."""
    graphed = run("graphed", mode)
    said = capsys.readouterr().out
    assert f"CUDA graphs: {mode}" in said
    assert "without a graph" not in said
    called = run("called", mode, NoCapture)
    assert numbers(graphed) == numbers(called)
    assert weights(graphed) == weights(called)


def test_a_batch_over_the_budget_runs_without_a_graph(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(packed_lamb, "_budget", lambda *_: BUDGET)
    graphed = run("graphed", "segmented")
    assert capsys.readouterr().out.count("step 1 runs without a graph: a batch exceeds Budget(") == 1
    assert numbers(graphed) == numbers(run("plain", "none"))


@pytest.mark.parametrize("mode", MODES)
def test_a_cpu_is_refused(tmp_path: Path, mode: str, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine trains on a CUDA device")
    with pytest.raises(SystemExit) as end:
        main(train_arguments(tmp_path, cuda_graph_mode=mode))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"CUDA_GRAPH_MODE={mode}" in line
    assert "CUDA_GRAPH_MODE=none" in line


def test_plain_attention_is_refused() -> None:
    graphs.check_graph_mode("none", CUDA, {"attention": "plain"}, 64)
    graphs.check_graph_mode("segmented", CUDA, FAST, 64)
    with pytest.raises(UserError, match="OPS=auto"):
        graphs.check_graph_mode("segmented", CUDA, {"attention": "plain"}, 64)


def test_heads_that_run_plain_are_refused() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    graphs.check_graph_mode("segmented", CUDA, {"attention": "triton"}, 64)
    with pytest.raises(UserError, match="heads of 48"):
        graphs.check_graph_mode("segmented", CUDA, {"attention": "triton"}, 48)


def test_what_a_whole_iteration_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that decides on the host, and a recipe without a budget, are refused."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: NoCapture())
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))
    flat = SimpleNamespace(grad=torch.zeros(3))
    host = SimpleNamespace(can_capture=False, implementation="plain")
    device = SimpleNamespace(can_capture=True, implementation="triton")

    def make(mode: str, optimizer: SimpleNamespace, budget: Budget | None = BUDGET) -> object:
        return graphs.graphed_step(mode, model, flat, optimizer, None, budget, 1, World())

    assert make("none", host) is None
    assert make("segmented", host) is not None
    assert make("full_iteration", device) is not None
    with pytest.raises(UserError, match="'plain' decides on the host"):
        make("full_iteration", host)
    with pytest.raises(UserError, match="no fixed sizes"):
        make("segmented", device, None)
