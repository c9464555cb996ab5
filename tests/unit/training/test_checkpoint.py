"""Checkpoints: what is written is read again, also after a kill; damage, a full disk,
other settings, earlier code.
"""

import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mlbert.data.loading import synthetic
from mlbert.distributed.world import World
from mlbert.host.json_files import json_sha256
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.runs.progress import TrainState
from mlbert.runs.step_folders import read_step
from mlbert.training.checkpoint import CheckpointFolder, Snapshots
from programs import words_as_dict
from stored_sets import flip
from training_settings import read_summary
from training_settings import run as run_train
from unsharded import unsharded
from user_errors import assert_error_line, user_error

TENSORS = "tensors.safetensors"
STATE = "state.json"
ASSET = Path(__file__).resolve().parents[2] / "assets/checkpoints/flat_settings"
# Of the run that wrote the checkpoint at step 4 of 8; its commit is c7c9f6d.
SETTINGS = words_as_dict("""
    train_batch_size=4 gradient_accumulation_steps=1 average_packing_rate=1 max_steps=8
    target_mlm_accuracy=none eval_iter_start_samples=8 eval_iter_samples=1000 num_eval_examples=4
    eval_batch_size=4 seed=3 ops=plain
""")


def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2, identity={"model": "a", "ranks": 1})


def tensors(value):
    return {"weights": torch.full((1000,), float(value)), "optimizer.exp_avg": torch.arange(10.0)}


def saved(tmp_path):
    target = folder(tmp_path)
    for step in (1, 2, 3):
        target.save(step, tensors(step), {"step": step})
    return target


def test_newest_good_one_if_any_is_loaded_and_older_ones_go(tmp_path):
    assert folder(tmp_path).load_newest() == (None, [])
    target = saved(tmp_path)
    checkpoint, warnings = target.load_newest()
    assert checkpoint.state == {"step": 3}
    assert torch.equal(checkpoint.tensors["weights"], tensors(3)["weights"])
    assert warnings == []
    assert sorted(p.name for p in target.path.iterdir()) == ["step_00000002", "step_00000003"]
    for file in target.path.glob(f"*/{TENSORS}"):
        flip(file)
    with user_error("checkpoint.damaged", tmp_path / "checkpoints"):
        target.load_newest()


def test_a_checkpoint_is_hashed_while_it_is_written(tmp_path):
    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    before = bytes_read()
    folder(tmp_path).save(1, {"weights": torch.rand(1_000_000)}, {})
    assert bytes_read() - before < 1_000_000, "the four megabytes are not read back"


def edit(**changes):
    """Return a function that changes or, with None, removes entries of a JSON file."""

    def change(file):
        changed = json.loads(file.read_text()) | changes
        file.write_text(
            json.dumps({name: value for name, value in changed.items() if value is not None})
        )

    return change


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(TENSORS, lambda file: os.truncate(file, 100), id="tensors are cut"),
        pytest.param(TENSORS, flip, id="tensors have another bit"),
        pytest.param(TENSORS, Path.unlink, id="tensors are gone"),
        pytest.param(STATE, lambda file: os.truncate(file, 10), id="state is cut"),
        pytest.param(STATE, lambda file: file.write_text("[" * 100_000), id="state is deep"),
        pytest.param(STATE, edit(format="other"), id="another format"),
        pytest.param(STATE, edit(state={"step": 3 ^ 1}), id="one bit"),
        pytest.param(STATE, edit(state={"step": float("nan")}), id="not finite"),
        pytest.param(STATE, lambda file: file.write_text(f"[{file.read_text()}]"), id="a list"),
        pytest.param(STATE, edit(step=7), id="another step"),
        pytest.param(STATE, edit(state=None), id="no state"),
        pytest.param(STATE, edit(identity=None), id="no identity"),
        pytest.param(STATE, edit(record_sha256=None), id="no record_sha256"),
    ],
)
def test_damaged_newest_falls_back_with_a_warning(tmp_path, name, damage):
    target = saved(tmp_path)
    damage(target.path / "step_00000003" / name)
    checkpoint, warnings = target.load_newest()
    assert checkpoint.state == {"step": 2}
    assert len(warnings) == 1
    assert "step_00000003" in warnings[0]


@pytest.mark.parametrize(
    "changes",
    [{"format": "mlbert-checkpoint-3"}, {"format": "mlbert-checkpoint-1", "record_sha256": None}],
    ids=["signed", "unsigned"],
)
def test_a_checkpoint_in_the_format_of_another_version_is_not_called_damaged(tmp_path, changes):
    """It is not skipped either: the run would silently lose the steps since the one before."""
    target = saved(tmp_path)
    path = target.path / "step_00000003" / STATE
    record = {**json.loads(path.read_text()), **changes}
    del record["record_sha256"]
    if "record_sha256" not in changes:
        record["record_sha256"] = json_sha256(record)
    path.write_text(json.dumps(record))
    with user_error("checkpoint.format", "step_00000003"):
        target.load_newest()
    with user_error("checkpoint.format", "step_00000003"):
        read_step(path.parent)
    assert path.exists()


def snapshots(checkpoints, numel=1000):
    """Return `Snapshots` of a LAMB optimizer, the run's progress, and the weights."""
    flat = FlatParameters([("w", nn.Parameter(torch.zeros(numel)))])
    optimizer = unsharded(
        Lamb, flat, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, max_grad_norm=None
    )
    model = SimpleNamespace(derived_state=dict, load_derived_state=lambda state: None)
    source = SimpleNamespace(load_state_dict=lambda state: None)
    method = SimpleNamespace(
        optimizer=optimizer, flat=flat, model=model, loss_scale=None, source=source
    )
    state = TrainState()
    return Snapshots(checkpoints, method, state, 1, World()), state, flat.data


def test_training_continues_while_its_state_of_before_is_written(tmp_path):
    checkpoints = folder(tmp_path)
    may_write = threading.Event()
    save = checkpoints.save
    checkpoints.save = lambda *arguments: may_write.wait(20) and save(*arguments)
    run, state, weights = snapshots(checkpoints)
    run.prepare()
    weights.fill_(1.0)
    state.step = 1
    run.save({})
    weights.fill_(2.0)
    state.step = 2
    second = threading.Thread(target=run.save, args=({},))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "it may not change the copies that are being written"
    assert not checkpoints.path.exists()
    may_write.set()
    second.join(20)
    run.wait()
    for step in (2, 1):
        other, found, values = snapshots(checkpoints)
        assert other.load(print)
        assert (found.step, values.unique().tolist()) == (step, [step])
        shutil.rmtree(checkpoints.path / f"step_{step:08d}")


def test_saving_reuses_its_memory(tmp_path):
    run, _, _ = snapshots(folder(tmp_path), 10_000_000)
    run.prepare()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run.save({})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000, (
        "the 120 MB are 29,297 pages"
    )
    run.wait()


def test_a_failed_save_is_reported_by_the_next_one_and_at_the_end(tmp_path):
    run, state, _ = snapshots(saved(tmp_path))
    # A file in the way makes the write fail as a full disk does: with an OSError in the middle.
    (tmp_path / "checkpoints/.partial_step_00000004").write_text("in the way")
    state.step = 4
    run.save({})
    for call in (lambda: run.save({}), run.wait):
        with user_error("file.unwritable", tmp_path / "checkpoints/step_00000004"):
            call()
    run.close()
    assert folder(tmp_path).load_newest()[0].state == {"step": 3}


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """A writer is killed before its first call that changes a file,
    the next one before its second, and so on.
    """
    target = saved(tmp_path)
    newest = 3
    status = -1
    stage = 0
    while status != 0:
        if not (child := os.fork()):
            calls = iter(range(stage))

            def kill(event, arguments, calls=calls):
                if (
                    event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove")
                    and next(calls, None) is None
                ):
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(kill)
            try:
                target.save(newest + 1, tensors(newest + 1), {"step": newest + 1})
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        checkpoint, warnings = target.load_newest()
        assert (checkpoint.state["step"] - newest, warnings) in [(0, []), (1, [])]
        newest = checkpoint.state["step"]
        assert torch.equal(checkpoint.tensors["weights"], tensors(newest)["weights"])
        stage += 1
    assert newest > 4
    assert stage > 10


def test_the_resumed_run_ends_as_the_whole_one_and_has_its_settings(tmp_path, capsys, monkeypatch):
    """Within rounding: the first four steps ran on another processor."""
    # The version that made the checkpoint drew lengths between the quantiles on straight lines.
    monkeypatch.setattr(synthetic, "POWER", 1.0)
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    settings = {**SETTINGS, "shape": json.loads((ASSET / "shape.json").read_text())}
    shutil.copytree(ASSET / "step_00000004", resumed / "run_0/checkpoints/step_00000004")
    assert run_train(tmp_path, "resumed", **settings, resume=1, opt_lamb_beta_1=0.8) == 2
    assert_error_line(capsys.readouterr().err, "run.other-settings", "step_00000004")
    assert (
        run_train(tmp_path, "whole", **settings)
        == run_train(tmp_path, "resumed", **settings, resume=1)
        == 0
    )
    assert read_summary(whole)["steps"] == read_summary(resumed)["steps"] == 8
    expected, found = (
        load_file(folder / "run_0/weights/model.safetensors") for folder in (whole, resumed)
    )
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.numpy() == pytest.approx(expected[name].numpy(), abs=1e-5), name
    assert '"resumed_from_step", "value": 4' in (resumed / "result_0.txt").read_text()
