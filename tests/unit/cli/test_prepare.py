"""`mlbert prepare` from the outside, killed at random times too."""

import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlbert.cli.prepare import app
from programs import write_files

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "instances"
PROGRAM = "from mlbert.cli.prepare import app; app()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write 4000 different sentences in 40 files."""
    out, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = (ASSETS / "text.txt").read_text().split()
    for number in range(40):
        lines = [" ".join(rng.choices(words, k=12)) for _ in range(100)]
        (out / f"{number:02d}.txt").write_text("\n".join(lines))
    return out


def arguments(folder: Path, out: Path) -> list[str]:
    options = "--one-per-line --vocab-size 500 --max-seq-length 64 --dupe-factor 10 --parts 4 --eval-share 0.1"
    return ["text", "--input", str(folder), "--out", str(out), "--workers", "1", *options.split()]


def invoke(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def start(words: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_killed_at_random_and_started_again(folder, tmp_path):
    straight, killed, begin = tmp_path / "straight", tmp_path / "killed", time.monotonic()
    assert start(arguments(folder, straight)).wait() == 0
    seconds, kills, rng = time.monotonic() - begin, 0, random.Random(1)
    for _ in range(12):
        process = start(arguments(folder, killed))
        time.sleep(rng.uniform(0.2, 0.8) * seconds)
        process.kill()
        if process.wait() == 0:  # faster than the first one, which had no caches: kill it earlier
            seconds *= 0.7
            shutil.rmtree(killed)
        elif (kills := kills + 1) == 2:
            break
    assert kills
    invoke(*arguments(folder, killed))
    results = [invoke("digest", out / "train", out / "eval") for out in (killed, straight)]
    assert results[0] == results[1]
    assert not list(killed.rglob("*.tmp"))


def test_temporary_files_of_a_killed_process_are_removed(folder, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        suffix = f"{ended.pid}@{socket.gethostname()}.tmp"
    names = ("vocab.txt", "text/train-00002-of-00004.txt", "eval/shard-00000-of-00001.h5")
    write_files(tmp_path / "set", {f"{name}.{suffix}": "" for name in names})
    invoke(*arguments(folder, tmp_path / "set"))
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["part-00000-of-00001.tfrecord", "shard-00000-of-00001.h5"])
def test_instances_and_digest(tmp_path, name):
    form = ("--format", "tfrecord") if name.endswith("tfrecord") else ()
    words = ("--input", ASSETS / "text.txt", "--vocab", ASSETS / "vocab.txt", "--out", tmp_path / "set", *form)
    assert "217 instances" in invoke("instances", *words)
    for place in (tmp_path / "set", tmp_path / "set" / name):
        sha256, named, count = invoke("digest", place).split()
        assert (sha256[:8], named, count) == ("05705079", name, "217")
    assert "nothing to do" in invoke("instances", *words)


def test_bad_parts_are_listed(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\n")
    words = ("--vocab", ASSETS / "vocab.txt", "--out", tmp_path / "set", "--skip-bad")
    said = invoke("instances", "--input", ASSETS / "text.txt", "--input", tmp_path / "bad.txt", *words)
    assert "1 of 2 parts skipped" in said
    assert "bad.txt: line 2 is not UTF-8" in said
    assert "217 instances" in said
