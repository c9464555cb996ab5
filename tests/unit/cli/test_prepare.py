"""`mlbert prepare` from the outside."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlbert.cli.prepare import app
from programs import write_files

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "instances"


def invoke(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        suffix = f"{ended.pid}@{socket.gethostname()}.tmp"
    names = ("vocab.txt", "text/train-00002-of-00004.txt", "eval/shard-00000-of-00001.h5")
    write_files(tmp_path / "set", {f"{name}.{suffix}": "" for name in names})
    options = "--one-per-line --vocab-size 500 --max-seq-length 64 --parts 4 --eval-share 0.3 --workers 1"
    texts = write_files(tmp_path / "texts", {"text.txt": (ASSETS / "text.txt").read_text()})
    invoke("text", "--input", texts, "--out", tmp_path / "set", *options.split())
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
