"""What a person sees, on a terminal and without one, the metrics file, the curve, limits,
and a checkpoint's state.
"""

import dataclasses
import io
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mlbert.host.metrics_file import read_points
from mlbert.runs import monitor as module
from mlbert.runs.monitor import Monitor
from mlbert.runs.progress import Limits, Pace, TrainState
from mlbert.runs.run_folder import curve, write_curve
from programs import write_files
from training_settings import train
from user_errors import user_error

LIMITS = Limits(
    target_accuracy=0.5, max_steps=10, max_samples=1000, max_seconds=60.0, max_skipped_steps=2
)
FOREIGN = [
    b'{"step": 1}',
    b'{"kind": "step", "step": "1"}',
    b"[" * 9999,
    b"NaN",
    b"3",
    b'{"kind": []}',
]
BINARY = st.binary(max_size=30).filter(lambda line: b"\n" not in line)

SUMMARY = {"status": "success", "accuracy": 0.25, "seconds_to_train": 9.0, "target_accuracy": 0.235}
STEP = {"kind": "step", "step": 1, "samples": 10, "seconds": 1.0, "loss": 5.0}
EVALUATION = {"kind": "evaluation", "step": 1, "samples": 10, "seconds": 1.5, "eval_accuracy": 0.25}


def watch(path, terminal=False, append=False, every=10):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150)
    return Monitor(path, LIMITS, every, console, append), out


@pytest.mark.parametrize("terminal", [True, False])
def test_step_rate_loss_accuracy_and_time_left_are_shown(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(module, "PLAIN_LINE_SECONDS", 0.0)
    monitor, out = watch(tmp_path / "metrics.jsonl", terminal)
    state = TrainState()
    monitor.open(state, ["n1", "n2", "n3"])
    state.step = 1
    state.samples = 10
    state.train_seconds = 1.0
    monitor.step(state, 7.0, 0.01, 1.5)
    assert "accuracy 0" not in out.getvalue()  # nothing is known before an evaluation
    assert "loader" not in out.getvalue()  # it was not measured, as in TensorFlow
    state.step = 50
    state.samples = 500
    state.train_seconds = 2.0
    state.loader_seconds = 0.125
    state.accuracy = 0.125
    monitor.step(state, 6.25, 0.01, 1.5, [0.25, 0.75, 0.5])
    monitor.evaluation(state, {"mlm_accuracy": 0.125, "loss": 5.5}, 3.0)
    monitor.close()
    text = out.getvalue()
    for piece in (
        "step 50",
        "250 samples/s",
        "loss 6.250",
        "loader 6.2%",
        "target 0.5",
        "accuracy 0.1250 of 0.5",
        "left",
        "evaluation at 500 samples",
        "loss 5.5000",
    ):
        assert piece in text
    slowest = "slowest: rank 1 on n2, 0.750 s a step (median 0.500, least 0.250)"
    assert terminal or slowest in text.replace("\n", " ")
    assert ("\x1b" in text) == terminal
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [point["kind"] for point in points] == ["step", "step", "evaluation"]
    assert points[1]["loader_share"] == 0.0625
    assert read_points(tmp_path / "metrics.jsonl") == (points, 0), "readers accept all of them"


@pytest.mark.parametrize(("columns", "has_bar"), [(80, False), (120, True)])
def test_the_line_of_a_terminal_is_not_cut(tmp_path, columns, has_bar):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=columns)
    limits = dataclasses.replace(LIMITS, target_accuracy=0.235)
    monitor = Monitor(tmp_path / "metrics.jsonl", limits, 10, console)
    monitor.open(TrainState())
    state = TrainState(step=4300, samples=60002, train_seconds=64.0, accuracy=0.2165)
    monitor.step(state, 5.644, 0.01, 1.5)
    monitor.close()
    last = out.getvalue().splitlines()[-2]
    assert "accuracy 0.2165 of 0.235" in last
    assert "left" in last
    assert "…" not in last
    assert ("━" in last) == ("loss 5.644" in last) == has_bar


def test_other_ranks_are_silent(tmp_path):
    monitor, out = watch(None)
    monitor.open(TrainState())
    monitor.step(TrainState(step=1), 1.0, 0.1, 1.0)
    monitor.say("something")
    monitor.close()
    assert out.getvalue() == ""


def test_log_points(tmp_path):
    for every, points in ((10, [1, 10, 20]), (0, [])):
        monitor, _ = watch(tmp_path / "m", every=every)
        assert [step for step in range(1, 25) if monitor.should_log(step)] == points


def resume(path):
    """Open the metrics of a run that resumes after step 1, and return what is printed."""
    monitor, out = watch(path, append=True)
    monitor.open(TrainState(step=1))
    monitor.close()
    return out.getvalue()


def test_resuming_drops_lines_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, second = (
        f'{{"kind": "step", "step": {n}, "samples": 4, "seconds": 1.5, "loss": NaN}}'
        for n in (1, 2)
    )
    path.write_text(f'{first}\n{second}\n{{"kind": "st')
    out = resume(path)
    assert path.read_text() == f"{first}\n"
    assert out == ""


@settings(max_examples=30)
@given(st.lists(st.sampled_from(FOREIGN) | BINARY, min_size=1, max_size=4))
def test_foreign_lines_are_left_out_with_a_warning(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    own = b'{"kind": "skipped", "step": 1, "samples": 4}\n'
    path.write_bytes(own + b"".join(line + b"\n" for line in lines) + own)
    out = resume(path)
    assert path.read_bytes() == own + own
    assert f"{len(lines)} lines that are not metrics of a run" in out


def test_seconds_do_not_count_a_checkpoints_time_twice_and_without_time_there_is_no_rate(tmp_path):
    monitor, _ = watch(tmp_path / "metrics.jsonl", every=1)
    state = TrainState(elapsed_seconds=100.0)
    monitor.open(state)
    state.elapsed_seconds = 150.0  # a checkpoint writes the time so far into the state
    state.samples = 5
    monitor.step(state, 1.0, 0.1, 1.0)
    monitor.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert 100.0 <= line["seconds"] < 120.0
    assert line["samples_per_second"] == 0.0, "no time was spent on training"


def test_a_missing_folder_and_a_full_disk_are_one_error_that_names_the_file(tmp_path):
    monitor, _ = watch(tmp_path / "no/metrics.jsonl")
    with user_error("file.unwritable", tmp_path / "no/metrics.jsonl"):
        monitor.open(TrainState())
    monitor, _ = watch(Path("/dev/full"), every=1)
    monitor.open(TrainState())
    with user_error("file.unwritable", "full"):
        monitor.step(TrainState(step=1), 1.0, 0.1, 1.0)


def test_the_first_steps_rate_counts_its_time(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 0.25).__next__)
    monkeypatch.setattr("mlbert.training.loop.time", clock)
    lines = train(tmp_path, ops="plain", max_steps=3)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:  # a quarter of a second between two looks at the clock, and two looks a step
        assert line["samples_per_second"] == round(line["samples"] / (0.25 * line["step"]), 1)


def test_the_curve_names_run_result_target_and_baselines():
    figure = curve("run_0", [STEP, EVALUATION], SUMMARY, {"bigram": 0.1447})
    assert figure.get_suptitle() == "run_0: success, accuracy 0.2500 after 9.0 s"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "target 0.235",
        "bigram 0.145",
    ]


@pytest.mark.parametrize(
    ("baselines", "target"),
    [
        ("{", 0.2),
        ("[1]", 0.2),
        ('{"bigram_accuracy": "0.1", "most_frequent_accuracy": 1e308}', 0.2),
        (None, None),
    ],
)
def test_damaged_files_cost_their_part_of_the_picture(tmp_path, baselines, target):
    lines = f"{json.dumps(STEP)}\nnoise\n{json.dumps(EVALUATION)[:-5]}"
    files = {} if baselines is None else {"data/baselines.json": baselines}
    write_files(tmp_path, files | {"run_0/metrics.jsonl": lines})
    write_curve(tmp_path / "run_0", SUMMARY | {"target_accuracy": target})
    assert (tmp_path / "run_0/curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("state", "seconds", "reason"),
    [
        (TrainState(step=9, samples=999, skipped_steps=2), 59.9, None),
        (TrainState(step=10), 0, "MAX_STEPS 10 reached"),
        (TrainState(samples=1000), 0, "MAX_SAMPLES_TERMINATION 1000 reached"),
        (TrainState(), 60.0, "MAX_SECONDS 60.0 reached"),
        (TrainState(skipped_steps=3), 0, "3 steps had non-finite gradients"),
    ],
)
def test_limits(state, seconds, reason):
    assert LIMITS.reached(state, seconds) == reason
    assert dataclasses.replace(LIMITS, max_seconds=None).reached(TrainState(), 1e9) is None


@pytest.mark.parametrize("value", [None, "1", True, -1, math.nan, math.inf, [1]])
@pytest.mark.parametrize("name", ["step", "next_eval_samples", "train_seconds"])
def test_state_survives_json_and_a_wrong_entry_changes_nothing(name, value):
    state = TrainState(step=3)
    saved = TrainState(step=9, samples=77, accuracy=0.123456789, train_seconds=1.5)
    with pytest.raises(ValueError, match=name):
        state.restore({**saved.to_json(), name: value})
    assert state == TrainState(step=3)
    state.restore(json.loads(json.dumps(saved.to_json())))
    assert state == saved
    earlier = {key: entry for key, entry in saved.to_json().items() if key != "loader_seconds"}
    state.restore(earlier)
    assert state == saved


@given(st.floats(0.1, 1e4), st.floats(0, 1e4))
def test_slow_evaluations_leave_time_to_train(every, took):
    pace = Pace(100.0, 0.1, 0.5, every, 60.0)
    assert not pace.evaluates(0.99 * every, took)
    assert not pace.evaluates(9.9 * took, took) or took == 0
    assert pace.evaluates(1.01 * max(every, 10 * took), took)
