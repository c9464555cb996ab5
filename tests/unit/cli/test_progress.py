"""Commands that may take long say how far they are in a log file too, and when they will end."""

import re
import statistics
import sys
import time
from types import SimpleNamespace

import pytest

from mlbert.cli.main import main
from mlbert.programs import console
from mlbert.runs import monitor
from simple_logs import write_log
from stored_sets import make_rows, random_lengths, write_set
from training_settings import train, train_arguments


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a stored set, a log, and a run with its weights."""
    folder = tmp_path_factory.mktemp("made")
    write_set(folder / "set", make_rows(random_lengths(2000)))
    write_log(folder / "result_0.txt", logged={"recipe": "packed_lamb"})
    train(folder, "trained")
    return folder


TRAINED = "{made}/trained/run_0"
LINES = {
    "prepare verify {made}/set --workers 1": r"verifying: \d+ % of [\d.]+ .?B",
    "prepare shuffle --input {made}/set --out {new} --workers 1": r"[a-z ]+: \d+ % of \d",
    f"convert torch-to-hf {TRAINED}/weights {{new}}": rf"converting {TRAINED}/weights, \d+ s so far",
    f"convert torch-to-nvidia {TRAINED}/weights {{new}}": rf"converting {TRAINED}/weights, \d+ s so far",
    "submission check {made}/result_0.txt": r"checking: (own checks|official tools|\w+, tool \d of \d), \d+ s so far",
    "train": r"step \d+/12  \d+ samples/s  loss \S+  accuracy \S+  \d+ s, at most \d+ s left",
}


@pytest.mark.parametrize("command", LINES)
def test_a_pipe_gets_lines_of_progress(command, made, tmp_path, run_mlbert, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.002)
    monkeypatch.setattr(monitor, "PLAIN_LINE_SECONDS", 0.0)
    places = {"made": made, "new": tmp_path / "new"}
    words = [word.format(**places) for word in command.split()]
    _, out, err = run_mlbert(*(train_arguments(tmp_path) if command == "train" else words))
    lines = (out + err).splitlines()
    assert any(re.match(LINES[command].format(**places), line) for line in lines), lines


@pytest.mark.slow
def test_the_end_is_predicted_in_the_second_half(tmp_path, monkeypatch):
    write_set(tmp_path / "set", make_rows(random_lengths(40_000)), shards=200)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.02)
    monkeypatch.setattr(console, "short_duration", lambda seconds: f"{seconds:.4f} s")
    written = []
    output = SimpleNamespace(write=lambda text: written.append((time.monotonic(), text)), flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", output)
    started = time.monotonic()
    with pytest.raises(SystemExit) as end:
        main(["prepare", "verify", str(tmp_path / "set"), "--workers", "1"])
    assert not end.value.code
    lines = [(at, text) for at, text in written if text.startswith("verifying: ")]
    end = lines[-1][0]
    assert " in " in lines[-1][1], "the line of the end"
    begun = end - float(re.search(r" in ([\d.]+) s", lines[-1][1])[1])
    assert started <= begun
    predicted = [(at, at + float(left[1])) for at, text in lines if (left := re.search(r", ([\d.]+) s left", text))]
    second_half = [until for at, until in predicted if at >= (begun + end) / 2]
    assert len(second_half) >= 5
    error = statistics.median(abs(until - end) / (end - begun) for until in second_half)
    assert error < 0.2
