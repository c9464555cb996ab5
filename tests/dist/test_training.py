"""Training on 1, 2 and 4 processes with the same global batch gives the same losses,
with dropout.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import run_ranks, start_ranks
from mlbert.cli.main import main
from mlbert.config.bert_config import BertConfig
from mlbert.distributed import world as world_module
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.recipes.assembly import load_on_rank_0
from mlbert.runs.progress import TrainState
from mlbert.runs.step_folders import StepFolders
from mlbert.training.checkpoint import CheckpointFolder, Snapshots
from training_settings import SHAPE, read_metrics, train_arguments

# float32 sums in another order; twelve LAMB steps amplify the difference.
TOLERANCE = 2e-4
GLOBAL_PACKS = 8
SLOW_SECONDS = 3.0  # of a disk, with collectives that may take 2 s
EIGHT_BIT = {
    "precision": "fp8",
    "sharded_optimizer": "all",
    "weights_allgather": "e5m2",
    "gradient_reduction": "bf16",
}


def train_on(world_size, tmp_path, name, accumulation=1, node_size=None, **changes):
    """Train and return rank 0's output. Every run misses its target, which only rank 0 reports."""
    batch = {
        "train_batch_size": GLOBAL_PACKS // world_size,
        "gradient_accumulation_steps": accumulation,
    }
    arguments = train_arguments(tmp_path, name, **batch, **changes)
    ranks = start_ranks(main, (arguments,), world_size, tmp_path, node_size)
    outputs = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1] + [0] * (world_size - 1), "\n".join(outputs)
    return outputs[0]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train_on(1, folder, "out")
    return read_metrics(folder / "out"), read_metrics(folder / "out", "evaluation")[0]


def test_losses_match_one_process(tmp_path, one_process):
    train_on(4, tmp_path, "out", accumulation=2)
    steps = read_metrics(tmp_path / "out")
    assert [s["samples"] for s in steps] == [s["samples"] for s in one_process[0]]
    for ours, alone in zip(steps, one_process[0], strict=True):
        assert ours["loss"] == pytest.approx(alone["loss"], abs=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)
    (evaluation,) = read_metrics(tmp_path / "out", "evaluation")
    alone = one_process[1]["eval_loss"]
    assert evaluation["eval_loss"] == pytest.approx(alone, abs=1e-3), "each sample must count once"
    config = json.loads((tmp_path / "out/run_0/config.json").read_text())
    assert config["provenance"]["ranks"] == 4
    assert [p.name for p in (tmp_path / "out").glob("result_*")] == ["result_0.txt"], (
        "only rank 0 may write"
    )


@pytest.mark.parametrize(
    ("world_size", "node_size", "tolerance", "changes"),
    [
        (2, 2, TOLERANCE, {"exchange_padding": "all", "sharded_optimizer": "all"}),
        (4, 2, TOLERANCE, {"exchange_padding": "group", "sharded_optimizer": "node"}),
        # The relative rounding error is a few times 2^-8:
        # far less than a few updates change the loss.
        (4, 2, 0.01, {"gradient_reduction": "bf16", "sharded_optimizer": "node"}),
    ],
    ids=["over all ranks", "inside two nodes", "bf16 reduction"],
)
def test_each_way_matches_one_process(
    tmp_path, one_process, world_size, node_size, tolerance, changes
):
    train_on(world_size, tmp_path, "out", node_size=node_size, **changes)
    for ours, alone in zip(read_metrics(tmp_path / "out"), one_process[0], strict=True):
        assert ours["loss"] == pytest.approx(alone["loss"], abs=tolerance)


def test_rounded_all_gather_affects_training_but_not_the_saved_weights(tmp_path, one_process):
    train_on(2, tmp_path, "out", sharded_optimizer="all", weights_allgather="e5m2")
    steps = read_metrics(tmp_path / "out")
    differences = [
        abs(ours["loss"] - alone["loss"]) for ours, alone in zip(steps, one_process[0], strict=True)
    ]
    assert 5 * TOLERANCE < max(differences) < 0.2, (
        "rounding must show in the loss, but only slightly"
    )
    for weight in load_file(tmp_path / "out/run_0/weights/model.safetensors").values():
        if weight.numel() > 1000:
            assert not torch.equal(weight, weight.to(torch.float8_e5m2).float())


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(EIGHT_BIT, marks=pytest.mark.slow)], ids=["default", "8 bits"]
)
def test_resume_on_two_processes_is_exact(tmp_path, changes):
    train_on(2, tmp_path, "whole", **changes)
    changes = {**changes, "save_checkpoint_steps": 1}
    train_on(2, tmp_path, "parts", max_steps=12, max_samples_termination=60, **changes)
    # The first part ended at its sample limit. Without its summary,
    # it looks like an interrupted run.
    (tmp_path / "parts/run_0/summary.json").unlink()
    assert "resumed at step" in train_on(2, tmp_path, "parts", resume=1, **changes)
    whole, parts = (tmp_path / n / "run_0/weights/model.safetensors" for n in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def interrupt(tmp_path: Path, world_size: int, **changes: Any) -> None:
    """Leave a checkpoint of a run in ``parts`` that has not ended."""
    changes = {**changes, "save_checkpoint_steps": 1}
    train_on(world_size, tmp_path, "parts", max_samples_termination=60, **changes)
    (tmp_path / "parts/run_0/summary.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["off", "all"])
def test_resume_on_another_number_of_ranks_continues_the_same_run(
    tmp_path: Path, sharded: str
) -> None:
    """With another shard layout and other micro-batches, with dropout."""
    train_on(2, tmp_path, "whole", sharded_optimizer=sharded)
    interrupt(tmp_path, 2, sharded_optimizer=sharded)
    output = train_on(4, tmp_path, "parts", 2, 2, resume=1, sharded_optimizer="node")
    assert "resumed at step" in output
    whole, parts = (read_metrics(tmp_path / name) for name in ("whole", "parts"))
    assert [one["samples"] for one in parts] == [one["samples"] for one in whole]
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_clipping": "before"},
        {"recipe": "ddp_adam", "optimizer": "adamw", "average_packing_rate": 1},
    ],
    ids=["clipping on each rank", "ddp_adam"],
)
def test_resume_on_another_number_of_ranks_is_refused_if_the_method_depends_on_it(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    interrupt(tmp_path, 1, **changes)
    words = train_arguments(
        tmp_path, "parts", train_batch_size=GLOBAL_PACKS // 2, resume=1, **changes
    )
    ranks = start_ranks(main, (words,), 2, tmp_path)
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    (line,) = [line for line in outputs[0].splitlines() if "error" in line]
    assert "belongs to a different run: train_batch_size is 8 there and 4 here" in line
    assert "error" not in outputs[1]


def bytes_read() -> int:
    """Return the bytes that this process has read from files, mapped ones left out."""
    return int(Path("/proc/self/io").read_text().split()[1])


def sha256_of(tensors: Mapping[str, torch.Tensor]) -> str:
    content = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(tensors.items()))
    return hashlib.sha256(content).hexdigest()


def load_checkpoint(world: World, folders: list[str]) -> dict[str, Any]:
    """Load the newest checkpoint of this rank's folder; return its step, the sum of its weights,
    and the bytes that this process read from files.
    """
    before = bytes_read()
    checkpoint, warnings = CheckpointFolder(Path(folders[world.rank]), 9, {}).load_newest(world)
    read = bytes_read() - before
    if checkpoint is None:
        return {"step": None}
    weights = checkpoint.tensors["weights"]
    step = int(checkpoint.path.name.removeprefix("step_"))
    return {
        "step": step,
        "sum": float(weights.double().sum()),
        "bytes": read,
        "warnings": len(warnings),
    }


def test_rank_0_reads_a_checkpoint_and_sends_it(tmp_path: Path) -> None:
    """The other machines need not have the folder; a tensor takes several messages."""
    numel = world_module.BROADCAST_BYTES // 4 + 5
    mine = tmp_path / "mine"
    for step in (1, 2):
        tensors = {"weights": torch.full((numel,), float(step)), "scale": torch.tensor(3.0)}
        CheckpointFolder(mine, 9, {}).save(step, tensors, {"step": step})
    folders = [str(mine), *[str(tmp_path / "nowhere")] * 2]
    ranks = run_ranks(load_checkpoint, 3, tmp_path, node_size=1, folders=folders)
    assert [rank["step"] for rank in ranks] == [2, 2, 2]
    assert [rank["sum"] for rank in ranks] == [2.0 * numel] * 3
    assert [rank["bytes"] > numel for rank in ranks] == [True, False, False]
    (mine / "step_00000002/state.json").write_text("damaged")
    ranks = run_ranks(load_checkpoint, 2, tmp_path, node_size=1, folders=folders)
    assert [(rank["step"], rank["warnings"]) for rank in ranks] == [(1, 1), (1, 0)]
    none = run_ranks(load_checkpoint, 2, tmp_path, folders=[str(tmp_path / "nowhere")] * 2)
    assert none == [{"step": None}] * 2


def start_from(world: World, checkpoint: str) -> dict[str, Any]:
    """Load rank 0's checkpoint; return whether this rank has a report of it, a checksum of the
    weights, and the bytes that it read from files.
    """
    model = BertForPreTraining(BertConfig(**SHAPE))
    model.initialize(seed=world.rank)
    before = bytes_read()
    own = checkpoint if world.rank == 0 else "nowhere.safetensors"
    report = load_on_rank_0(model, own, world)
    read = bytes_read() - before
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    return {"report": report is not None, "sha256": sha256_of(parameters), "bytes": read}


def test_rank_0_reads_the_starting_weights_and_sends_them(tmp_path: Path) -> None:
    """The other machines need not have the file."""
    model = BertForPreTraining(BertConfig(**SHAPE))
    model.initialize(seed=9)
    file = tmp_path / "model.safetensors"
    save_file(to_huggingface(model), file)
    ranks = run_ranks(start_from, 3, tmp_path, node_size=1, checkpoint=str(file))
    expected = sha256_of({name: one.detach() for name, one in model.named_parameters()})
    assert [rank["sha256"] for rank in ranks] == [expected] * 3
    assert [rank["report"] for rank in ranks] == [True, False, False]
    size = file.stat().st_size
    assert max(rank["bytes"] for rank in ranks[1:]) < size / 2


def wait_for_slow_disks(world: World, folder: str) -> list[int]:
    """Save and load on a disk that is slower than a collective may be;
    return the steps that were loaded.
    """

    def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (time.sleep(SLOW_SECONDS), method(*arguments))[1]

    StepFolders.save = slowed(StepFolders.save)
    StepFolders.load_newest = slowed(StepFolders.load_newest)
    world_module.ROUND_SECONDS = 0.5
    flat = SimpleNamespace(data=torch.zeros(3), layout=[])
    stateless = {"state_dict": dict, "load_state_dict": lambda state: None}
    optimizer = SimpleNamespace(exact_weights=contextlib.nullcontext, **stateless)
    source = SimpleNamespace(**stateless)
    model = SimpleNamespace(derived_state=dict, load_derived_state=lambda state: None)
    method = SimpleNamespace(
        flat=flat, optimizer=optimizer, model=model, source=source, loss_scale=None
    )
    steps = []
    for saves in (1, 2):
        state = TrainState()
        run = Snapshots(CheckpointFolder(Path(folder), 2, {}), method, state, 1, world)
        if run.load(lambda line: None):
            steps.append(state.step)
        for _ in range(saves):  # the second save waits for the first one
            state.step += 1
            run.save({})
        run.wait()
        run.close()
    return steps


def test_ranks_wait_for_a_disk_that_is_slower_than_a_collective_may_be(tmp_path):
    folder = str(tmp_path / "checkpoints")
    assert run_ranks(wait_for_slow_disks, 2, tmp_path, collective_timeout_s=2.0, folder=folder) == [
        [1],
        [1],
    ]
