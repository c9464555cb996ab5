"""Predictions from a sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.data.prepare import shuffle
from mlbert.data.prepare.sizing import BENCHMARK_INSTANCES, MeasuredStep, _steps, _take_sample, estimate
from user_errors import user_error


def test_everything_grows_with_the_tokens() -> None:
    made = MeasuredStep(seconds=2.0, base_bytes=100, peak_bytes=300, disk_bytes=1000, count=50, tokens=5000)
    packed = MeasuredStep(seconds=1.0, base_bytes=100, peak_bytes=200, disk_bytes=1100, count=50, tokens=5000)
    instances, pack = _steps(made, packed, grow=10, sequences=1000, parts=4, part_ratio=3)
    assert instances.core_seconds == 20
    assert (instances.seconds(2), instances.seconds(16)) == (10, 5)
    assert (instances.disk_bytes, instances.peak_disk_bytes, instances.worker_bytes) == (10_000, 10_000, 700)
    assert pack.core_seconds == 10
    assert pack.disk_bytes == 11_000
    assert pack.peak_disk_bytes == 10_000 + (10_000 + 8 * 1000) + 11_000
    assert pack.worker_bytes == 100 + 100 * 10  # fewer sequences than a shard holds: all of them


def test_a_worker_holds_one_shard_at_most() -> None:
    step = MeasuredStep(seconds=1.0, base_bytes=0, peak_bytes=1000, disk_bytes=1, count=1000, tokens=1000)
    _, pack = _steps(step, step, grow=1e6, sequences=1_000_000_000, parts=500, part_ratio=1)
    assert pack.worker_bytes == max(shuffle.SHARD, shuffle.PIECE)


def test_the_sample_ends_with_a_document(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_text("one\ntwo\n\nthree\nfour\n\nfive\n")
    sample = tmp_path / "sample"
    assert _take_sample([part], sample, 12) == len(sample.read_bytes())
    assert sample.read_text() == "one\ntwo\n\nthree\nfour\n\n"
    _take_sample([part, part], sample, 1_000_000)
    assert sample.read_text() == 2 * (part.read_text() + "\n")


def test_a_small_text_is_predicted_as_it_comes_out(assets: Path, tmp_path: Path) -> None:
    text = (assets / "text.txt").read_text()
    part = tmp_path / "part"
    part.write_text(text)
    measured, (here, benchmark) = estimate([part, part], assets / "vocab.txt")
    assert here.num_sequences == pytest.approx(measured["sequences"], rel=0.01)
    assert here.text_bytes == 2 * len(text.encode())
    assert benchmark.num_sequences == BENCHMARK_INSTANCES
    for item in (here, benchmark):
        assert [step.name for step in item.steps] == ["instances", "pack"]
        assert all(0 < step.disk_bytes <= step.peak_disk_bytes and step.seconds(2) > 0 for step in item.steps)


def test_the_command_prints_json(assets: Path) -> None:
    command = [sys.executable, "-m", "mlbert", "prepare", "estimate", "--input", str(assets / "text.txt")]
    command += ["--vocab", str(assets / "vocab.txt"), "--workers", "2"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert [set(step["seconds"]) for item in document["estimates"] for step in item["steps"]] == [{"2", "16"}] * 4
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "156,726,829 instances" in table


def test_missing_input_is_named(tmp_path: Path, assets: Path) -> None:
    with user_error("file.unreadable", tmp_path / "none"):
        estimate([tmp_path / "none"], assets / "vocab.txt")
