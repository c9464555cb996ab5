"""Commands that may take long say how far they are in a log file too, and when they will end."""

import random
import re

import pytest

from mlbert.host import console
from mlbert.runs import monitor
from programs import write_files
from simple_logs import write_log
from stored_sets import make_rows, random_lengths, write_set
from training_settings import train, train_arguments

TRAINED = "{made}/trained/run_0"
CONVERTING = rf"converting {TRAINED}/weights, \d+ s so far"
LINES = {
    "prepare text --input {made}/texts --out {new} --workers 1 --vocab-size 300": (
        r"(reading the text|training the vocabulary|making the training samples), \d+ s so far"
    ),
    "prepare verify {made}/set --workers 1": r"verifying: \d+ % of [\d.]+ .?B",
    "prepare shuffle --input {made}/set --out {new} --workers 1": r"[a-z ]+: \d+ % of \d",
    f"convert torch-to-hf {TRAINED}/weights {{new}}": CONVERTING,
    f"convert torch-to-nvidia {TRAINED}/weights {{new}}": CONVERTING,
    "submission check {made}/result_0.txt": (
        r"checking: (own checks|official tools|\w+, tool \d of \d), "
        r"\d+ s so far"
    ),
    "train": (
        r"step \d+/12  \d+ samples/s  loss \S+  loader \S+%  "
        r"(target \S+|accuracy \S+ of \S+)?  \d+ s, at most \d+ s left"
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a stored set, a log, text, and a run with its weights."""
    folder = tmp_path_factory.mktemp("made")
    write_set(folder / "set", make_rows(random_lengths(2000)))
    write_log(folder / "result_0.txt", logged={"recipe": "packed_lamb"})
    draw = random.Random(1)
    words = ["river", "house", "engine", "letter", "garden", "builds", "finds", "slowly", "twice"]
    documents = (
        "".join(f"{' '.join(draw.choices(words, k=9))} {draw.random()}.\n" for _ in range(5))
        for _ in range(400)
    )
    write_files(folder, {"texts/text.txt": "\n".join(documents)})
    train(folder, "trained")
    return folder


@pytest.mark.parametrize("command", LINES)
def test_a_pipe_gets_lines_of_progress(command, made, tmp_path, run_mlbert, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.002)
    monkeypatch.setattr(monitor, "PLAIN_LINE_SECONDS", 0.0)
    places = {"made": made, "new": tmp_path / "new"}
    words = [word.format(**places) for word in command.split()]
    _, out, err = run_mlbert(*(train_arguments(tmp_path) if command == "train" else words))
    lines = (out + err).splitlines()
    assert any(re.match(LINES[command].format(**places), line) for line in lines), lines
