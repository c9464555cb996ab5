"""A rank that dies, hangs or fails is named, and the others end soon."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlbert
from harness import run_ranks, start_ranks
from mlbert.distributed.health import HANG_SECONDS
from mlbert.distributed.lifecycle import LOST_RANK, WRONG_INPUT
from stored_sets import VOCAB_SIZE, make_rows, random_lengths, write_set
from training_settings import read_metrics, train_arguments
from watch_programs import BAD_STEP, train_slowly, train_with_many_files


def run_and_read_status(tmp_path, what, victim, check=False):
    """Return the logged status by the file of the rank that logged it, and the results of all ranks."""
    options = {"folder": str(tmp_path), "what": what, "victim": victim}
    results = run_ranks("watch_programs:train", 3, tmp_path, check=check, **options)
    return {path.stem: path.read_text() for path in tmp_path.glob("story_*.txt")}, results


def node_to_exclude(story):
    """Return the node that run.sub takes to be lost for this reason, of the node that the reason names and another."""
    launch = Path(mlbert.__file__).parents[1] / "launch/lost_nodes.sh"
    program = 'source "$1"; nodes=("$2" other); named_node "$3"'
    words = ["bash", "-c", program, "bash", str(launch), story.split()[3], story]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("what", "victim"), [("dies", 2), ("dies", 0), ("hangs", 1), ("fails", 0)])
def test_lost_rank_is_named_and_the_others_end(tmp_path, what, victim):
    logged, results = run_and_read_status(tmp_path, what, victim)
    assert all(result.returncode != 0 for result in results)
    reporter = 1 if (what, victim) == ("dies", 0) else 0
    assert set(logged) == {f"story_{reporter}"}
    status, _, story = logged[f"story_{reporter}"].partition(": ")
    assert status == "aborted"
    assert story.startswith(f"rank {victim} on ")
    # When rank 0 dies, rank 1 only knows its own step, which it may not have begun.
    assert any(f"after step {step}" in story for step in (BAD_STEP, BAD_STEP - reporter))
    assert {"dies": "died", "hangs": "hangs", "fails": "ValueError: record 17 is damaged"}[what] in story
    if what == "hangs":
        assert "READ" in story
    assert node_to_exclude(story) == ("" if what == "fails" else story.split()[3])
    assert results[reporter].returncode == (1 if (what, victim) == ("fails", 0) else LOST_RANK)
    assert story in results[reporter].output


def test_a_death_is_named_before_the_signals_that_it_causes(tmp_path: Path) -> None:
    logged, results = run_and_read_status(tmp_path, "dies and ends the others", 2)
    assert results[0].returncode == LOST_RANK
    assert f"died after step {BAD_STEP}" in logged["story_0"]


def test_wrong_input_of_one_rank_is_the_status_of_all(tmp_path: Path) -> None:
    logged, results = run_and_read_status(tmp_path, "is mistaken", 1)
    assert [result.returncode for result in results] == [WRONG_INPUT] * 3
    story = logged["story_0"].removeprefix("aborted: ")
    assert "failed after step 4: train.h5: record 17 is damaged. Restore it. [data.damaged]" in story
    assert node_to_exclude(story) == ""


def test_wrong_input_of_all_ranks_is_the_status_of_the_launcher(tmp_path: Path, tree_root: Path) -> None:
    """Rank 0 reports it, although torchrun ends all ranks when the first one exits."""
    for name in ("train", "eval"):
        write_set(tmp_path / name, make_rows(random_lengths(64)))
    data = {"synthetic_data": 0, "input_dir": tmp_path / "train", "eval_dir": tmp_path / "eval"}
    settings = train_arguments(tmp_path, num_eval_examples=100, shape={"vocab_size": VOCAB_SIZE}, **data)[1:]
    program = tree_root / "benchmarks/bert/implementations/cpu_demo/run_pretraining.py"
    words = [sys.executable, "-m", "mlbert", "launch", "local", "-n", "2", str(program), *settings]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == WRONG_INPUT, done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        f"mlbert: error: {tmp_path / 'eval'}: it holds 64 examples, 100 are asked for. "
        "Set NUM_EVAL_EXAMPLES from 1 to 64. [config.range]"
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_suspended_rank_that_wakes_up_reports_nobody_as_lost(tmp_path, victim):
    logged, results = run_and_read_status(tmp_path, "stops", victim)
    assert [result.returncode for result in results] == [LOST_RANK] * 3
    (story,) = logged.values()
    assert story.startswith(f"aborted: rank {victim} on ")
    assert "is silent" in story
    assert node_to_exclude(story.removeprefix("aborted: ")) == story.split()[4]
    error_lines = [line for result in results for line in result.output.splitlines() if "mlbert: error: rank" in line]
    assert error_lines
    assert all(f"error: rank {victim} on " in line for line in error_lines)


@pytest.mark.parametrize("victim", [0, 2])
def test_warning_signal_on_one_rank_ends_all_in_the_same_step(tmp_path, victim):
    logged, results = run_and_read_status(tmp_path, "warned", victim)
    assert [result.returncode for result in results] == [128 + signal.SIGUSR1] * 3
    assert logged == {"story_0": "aborted: SIGUSR1"}


def test_sigterm_on_one_rank_ends_all(tmp_path):
    logged, results = run_and_read_status(tmp_path, "ended", 2)
    assert [result.returncode for result in results] == [LOST_RANK] * 3
    assert f"failed after step {BAD_STEP}: Terminated: SIGTERM" in logged["story_0"]


def test_sigterm_on_all_ranks_names_no_failed_rank(tmp_path):
    logged, results = run_and_read_status(tmp_path, "cancelled", -1)
    assert logged == {"story_0": "aborted: SIGTERM"}
    assert results[0].returncode == 128 + signal.SIGTERM
    assert "mlbert: error: rank" not in "".join(result.output for result in results)


def test_successful_run_is_not_disturbed(tmp_path):
    """If the health monitor cannot read its connection, a rank is reported as silent after the hang timeout."""
    logged, results = run_and_read_status(tmp_path, "many files", 0, check=True)
    assert [result.value for result in results] == [6, 6, 6]
    assert logged == {"story_0": "success: None"}


@pytest.mark.slow
def test_ranks_with_a_thousand_open_files_are_not_lost(tmp_path: Path) -> None:
    limits = {"max_steps": 10**9, "max_samples_termination": 10**15, "max_seconds": HANG_SECONDS + 15}
    words = train_arguments(tmp_path, **limits, eval_iter_start_samples=10**15, log_freq=0)
    ranks = start_ranks(train_with_many_files, (words,), 2, tmp_path)
    outputs = [rank.communicate(120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0], "\n".join(outputs)
    assert f"stopped: MAX_SECONDS {limits['max_seconds']} reached" in outputs[0]
    assert "Traceback" not in "".join(outputs)


def test_slowest_rank_is_named_although_all_ranks_wait_for_it(tmp_path: Path) -> None:
    ranks = start_ranks(train_slowly, (train_arguments(tmp_path, max_steps=9, log_freq=3), 1), 3, tmp_path)
    outputs = [rank.communicate(120) for rank in ranks]
    assert ranks[0].returncode == 1, outputs[0]
    points = read_metrics(tmp_path / "out")
    assert [point["step"] for point in points] == [1, 3, 6, 9]
    assert {(point["slowest_rank"], point["slowest_host"]) for point in points[1:]} == {(1, "n1")}
    for point in points[1:]:
        assert point["slowest_rank_seconds"] >= 0.4, "two micro-batches"
        assert point["fastest_rank_seconds"] <= point["median_rank_seconds"] < point["slowest_rank_seconds"] - 0.2
