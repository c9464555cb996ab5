"""Checkpoints: what is written comes back, also after a kill; damage, a full disk and another run's folder."""

import json
import os
import resource
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mlbert.distributed.world import World
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.runs.progress import TrainState
from mlbert.training.checkpoint import CheckpointFolder, Snapshots
from programs import run_checked
from unsharded import unsharded
from user_errors import user_error


def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2, identity={"model": "a", "ranks": 1})


def tensors(value):
    return {"weights": torch.full((1000,), float(value)), "optimizer.exp_avg": torch.arange(10.0)}


def saved(tmp_path):
    target = folder(tmp_path)
    for step in (1, 2, 3):
        target.save(step, tensors(step), {"step": step})
    return target


def test_newest_if_any_is_loaded_and_older_ones_go(tmp_path):
    assert folder(tmp_path).load_newest() == (None, [])
    target = saved(tmp_path)
    checkpoint, warnings = target.load_newest()
    assert checkpoint.state == {"step": 3}
    assert torch.equal(checkpoint.tensors["weights"], tensors(3)["weights"])
    assert warnings == []
    assert sorted(p.name for p in target.path.iterdir()) == ["step_00000002", "step_00000003"]


def test_a_checkpoint_is_hashed_while_it_is_written(tmp_path):
    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    before = bytes_read()
    folder(tmp_path).save(1, {"weights": torch.rand(1_000_000)}, {})
    assert bytes_read() - before < 1_000_000, "the four megabytes are not read back"


TENSORS, STATE = "tensors.safetensors", "state.json"


def flip(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


def record(**changes):
    def change(content):
        changed = {**json.loads(content), **changes}
        return json.dumps({name: value for name, value in changed.items() if value is not None}).encode()

    return change


DAMAGES = {
    "tensors are cut": (TENSORS, lambda content: content[:100]),
    "tensors have another bit": (TENSORS, flip),
    "tensors are gone": (TENSORS, None),
    "state is cut": (STATE, lambda content: b'{"format": '),
    "state is deep": (STATE, lambda content: b"[" * 100_000),
    "another format": (STATE, record(format="other")),
    "one bit": (STATE, record(state={"step": 3 ^ 1})),
    "negative": (STATE, record(state={"step": -1})),
    "not finite": (STATE, record(state={"step": float("nan")})),
    "text": (STATE, record(state={"step": "3"})),
    "renamed": (STATE, record(state={"steps": 3})),
    "a list": (STATE, lambda content: b"[" + content + b"]"),
    "another step": (STATE, record(step=7)),
    **{f"no {name}": (STATE, record(**{name: None})) for name in ("state", "identity", "record_sha256")},
}


@pytest.mark.parametrize(("name", "change"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_newest_falls_back_with_a_warning(tmp_path, name, change):
    target = saved(tmp_path)
    file = target.path / "step_00000003" / name
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    checkpoint, warnings = target.load_newest()
    assert checkpoint.state == {"step": 2}
    assert len(warnings) == 1
    assert "step_00000003" in warnings[0]


def test_all_damaged_is_an_error_that_names_the_folder(tmp_path):
    target = saved(tmp_path)
    for file in target.path.glob(f"*/{TENSORS}"):
        file.write_bytes(flip(file.read_bytes()))
    with user_error("checkpoint.damaged", tmp_path / "checkpoints"):
        target.load_newest()


def snapshots(checkpoints, numel=1000):
    """Return `Snapshots` of a LAMB optimizer, the run's progress, and the weights."""
    flat = FlatParameters([("w", nn.Parameter(torch.zeros(numel)))])
    optimizer = unsharded(Lamb, flat, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, max_grad_norm=None)
    model = SimpleNamespace(derived_state=dict, load_derived_state=lambda state: None)
    source = SimpleNamespace(load_state_dict=lambda state: None)
    method = SimpleNamespace(optimizer=optimizer, flat=flat, model=model, loss_scale=None, source=source)
    state = TrainState()
    return Snapshots(checkpoints, method, state, 1, World()), state, flat.data


def test_training_continues_while_its_state_of_before_is_written(tmp_path):
    checkpoints, may_write = folder(tmp_path), threading.Event()
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
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000, "the 120 MB are 29,297 pages"
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


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from test_checkpoint import folder, snapshots
dice, target = random.Random(5), folder(Path(sys.argv[1]))
run, state, weights = snapshots(target, 500_000)
state.step = 1
weights.fill_(1)
run.save({})
run.close()
child, newest, started = 0, 1, time.monotonic()
while time.monotonic() - started < 4:
    if not (child := os.fork()):
        run, state, weights = snapshots(target, 500_000)
        for state.step in range(newest + 1, newest + 1000):
            weights.fill_(state.step)
            run.save({})
    time.sleep(dice.uniform(0.02, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run, state, weights = snapshots(target, 500_000)
    assert run.load(print) and bool((weights == state.step).all()) and state.step >= newest
    newest = state.step
print(newest)
"""


def test_a_kill_at_any_moment_leaves_the_checkpoint_before(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = run_checked(sys.executable, "-c", KILLED, tmp_path, env=environment, timeout=100)
    assert "damaged" not in done.stdout
    assert int(done.stdout.split()[-1]) >= 3
