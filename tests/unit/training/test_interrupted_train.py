"""``mlbert train`` after Ctrl-C: a checkpoint, one line, and a run that continues."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from programs import wait_for
from training_settings import run, train_arguments

pytestmark = pytest.mark.usefixtures("one_cpu")
LONG = {"max_steps": 100_000, "save_checkpoint_steps": 50_000}


def interrupt(folder: Path, **changes: object) -> tuple[int, str, str]:
    """Start a long run, interrupt it after its first steps,
    and return its exit status and output.
    """
    command = [sys.executable, "-m", "mlbert", *train_arguments(folder, **LONG | changes)]
    metrics = folder / "out/run_0/metrics.jsonl"
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(
            lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size), 120
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ctrl_c_saves_a_checkpoint_from_which_the_run_continues(tmp_path: Path) -> None:
    status, out, err = interrupt(tmp_path)
    assert status == 130, err
    assert err == ""
    last = out.splitlines()[-1]
    assert last.startswith("interrupted: step ")
    assert last.endswith(" is saved, and RESUME=1 continues from it")
    (saved,) = (tmp_path / "out/run_0/checkpoints").glob("step_*")
    steps = int(saved.name.removeprefix("step_"))
    assert f"step {steps:,} is saved" in last
    assert run(tmp_path, resume=1, max_steps=steps + 3, learning_rate=0.01) in (0, 1)
    assert (tmp_path / "out/run_0/summary.json").exists()


def test_the_same_command_continues_if_it_resumes(tmp_path: Path) -> None:
    status, out, err = interrupt(tmp_path, resume=1)
    assert (status, err) == (130, "")
    assert out.splitlines()[-1].endswith(" is saved, and the same command continues from it")


def test_without_checkpoints_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    status, _, err = interrupt(tmp_path, save_checkpoint_steps=0)
    assert (status, err) == (130, "mlbert: interrupted\n")
    assert not list((tmp_path / "out/run_0").glob("checkpoints/*"))
