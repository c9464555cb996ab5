"""SIGUSR1: the step is finished, a checkpoint written, and the next start continues as if nothing had been."""

import signal
import subprocess
import sys
import time

from training_settings import train_arguments

LONG = {"max_steps": 150, "save_checkpoint_steps": 0}


def start(tmp_path, name, **changes):
    arguments = train_arguments(tmp_path, name, **{**LONG, **changes})
    command = [sys.executable, "-m", "mlbert", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_warned_run_leaves_a_checkpoint_and_continues_exactly(tmp_path):
    assert start(tmp_path, "whole").wait(120) == 1
    process = start(tmp_path, "parts")
    metrics = tmp_path / "parts/run_0/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, output
    log = tmp_path / "parts/result_0.txt"
    assert '"reason": "SIGUSR1", "status": "aborted"' in log.read_text()
    (checkpoint,) = (tmp_path / "parts/run_0/checkpoints").glob("step_*")
    assert not (tmp_path / "parts/run_0/summary.json").exists()
    rest = start(tmp_path, "parts", resume=1)
    output, _ = rest.communicate(timeout=120)
    assert rest.returncode == 1
    assert f"resumed at step {int(checkpoint.name.removeprefix('step_'))}" in output
    whole, parts = (tmp_path / name / "run_0/weights/model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
