"""Reading MLPerf logs."""

import json
from pathlib import Path

from edited_logs import accuracies
from mlbert.mlperf.logs import read_log, unfit
from user_errors import user_error


def test_a_good_log_is_parsed(log: Path) -> None:
    read = read_log(log)
    assert (read.broken, read.status, read.value("seed")) == ([], "success", 1)
    assert read.minutes > 0
    found = [json.loads(line.partition(":::MLLOG ")[2]) for line in log.read_text().splitlines()]
    logged = [fields for fields in found if fields["key"] == "eval_accuracy"]
    assert accuracies(read) == [(fields["metadata"]["epoch_num"], fields["value"]) for fields in logged]
    assert accuracies(read)[-1][1] == 0.721
    assert [event.line for event in read.events] == list(range(1, len(read.events) + 1))


def test_other_lines_are_skipped_and_prefixes_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(
        'hello\n0: :::MLLOG {"time_ms": 5, "key": "seed", "value": 3, "metadata": {}}\n'
        ':::MLLOG {"time_ms": 5, "key": "seed", "value": 3}\n'
        ':::MLLOG {"time_ms": 5, "key"\n:::MLLOG [1]\n:::MLLOG {"key": "a"}\n'
    )
    read = read_log(path)
    assert [(event.line, event.value, event.metadata) for event in read.events] == [(2, 3, {}), (3, 3, None)]
    assert [text.split(":")[0] for text in read.broken] == ["line 4", "line 5", "line 6"]


def test_an_absent_and_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    with user_error("file.unreadable", path):
        read_log(path)
    path.write_text("")
    read = read_log(path)
    assert (read.status, read.minutes, accuracies(read), read.value("seed")) == (None, None, [], None)


def test_a_line_that_would_exhaust_the_stack_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for depth, words in ((20_000, "nested too deeply"), (200, "nested more than 64")):
        value = "[" * depth + "]" * depth
        path.write_text(f':::MLLOG {{"time_ms": 5, "key": "x", "value": {value}, "metadata": {{}}}}\n')
        (found,) = read_log(path).broken
        assert words in found


def test_a_line_that_official_tools_never_finish_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("x" * 60_000 + "\n")
    assert unfit(path) is None
    path.write_text("one\n:::MLLOG " + "x" * 60_000)
    assert unfit(path) == "has 60001 characters in line 2, more than 50000"
    path.write_text(":::MLLOG {}\n" * 20_001)
    assert unfit(path) == "has more than 20000 MLPerf lines"
