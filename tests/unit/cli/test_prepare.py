"""`mlbert prepare` from the outside, killed at random times too."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlbert.cli.prepare import app

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "instances"
PROGRAM = "from mlbert.cli.prepare import app; app()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A few thousand different sentences in 40 files."""
    out, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = (ASSETS / "text.txt").read_text().split()
    for number in range(40):
        lines = [" ".join(rng.choices(words, k=12)) for _ in range(100)]
        (out / f"{number:02d}.txt").write_text("\n".join(lines))
    return out


def arguments(folder: Path, out: Path) -> list[str]:
    options = (
        "--one-per-line --vocab-size 500 --max-seq-length 64 --dupe-factor 10 --parts 4 --workers 1 --eval-share 0.1"
    )
    return ["text", "--input", str(folder), "--out", str(out), *options.split()]


def invoke(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def digests(out: Path) -> str:
    return invoke("digest", out / "train", out / "eval")


def test_killed_at_random_and_started_again(folder, tmp_path):
    invoke(*arguments(folder, tmp_path / "straight"))
    expected, rng, kills = digests(tmp_path / "straight"), random.Random(1), 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments(folder, tmp_path / "killed")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "killed" / "text").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.05, 2))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        if (tmp_path / "killed" / "prepared.json").exists():
            break
    invoke(*arguments(folder, tmp_path / "killed"))
    assert kills >= 1
    assert digests(tmp_path / "killed") == expected
    assert not list((tmp_path / "killed").rglob("*.tmp"))


def test_instances_and_digest(tmp_path):
    vocab, text = ASSETS / "vocab.txt", ASSETS / "text.txt"
    invoke("instances", "--input", text, "--vocab", vocab, "--out", tmp_path / "set")
    sha256, name, count = invoke("digest", tmp_path / "set").split()
    assert (sha256[:8], name, count) == ("05705079", "shard-00000-of-00001.h5", "217")
    assert "nothing to do" in invoke("instances", "--input", text, "--vocab", vocab, "--out", tmp_path / "set")


@pytest.mark.parametrize("command", ["python-text", "text", "instances", "digest"])
def test_help(command):
    assert "--help" in invoke(command, "--help")
