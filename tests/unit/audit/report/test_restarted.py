"""Runs that were interrupted and restarted: report,
diff and check give the numbers of the whole run.
"""

import json
import shutil
import signal
from pathlib import Path

import pytest

from interrupted_runs import train
from mlaudit.check import check
from mlaudit.findings import Outcome
from mlaudit.logs import read_log
from mlaudit.planner.cost import Prices
from mlaudit.report.page import report_page
from mlaudit.report.results import INTERRUPTED, MISSED, NO_RUN, UNFINISHED, read_result
from mlaudit.report.runs import read_systems
from mlaudit.result_set import ResultSet, seconds_before, seconds_to_train
from mlaudit.run_files import check_metrics
from programs import write_files
from simple_logs import line, write_log
from user_errors import assert_error_line

STEP = 70  # at which the real run is interrupted, behind its first evaluation


def result_of(*paths):
    (system,) = read_systems(list(paths))
    return read_result(system)


def write_part(path, evaluations, *, before=0, elapsed=None, status=None, resumed=False, end=None):
    """Write the log of a part of a run of this code.

    Args:
        evaluations: (samples, seconds after this part's run_start, accuracy); each takes a second.
        before: samples at run_start.
        elapsed: time to train before this part, as the log records it (None: it does not).
        status: of run_stop (None: the process was killed).
        resumed: True if the part began from a checkpoint.
        end: seconds of run_stop (default: of the last evaluation).
    """
    lines = [line("recipe", -2, "packed_lamb"), line("global_batch_size", -2, 10)]
    if resumed:
        about = {} if elapsed is None else {"elapsed_seconds": elapsed}
        lines.append(line("resumed_from_step", -1, 7, **about))
    lines += [line("run_start", 0), line("epoch_start", 0, epoch_num=before)]
    for samples, at, accuracy in evaluations:
        lines += [
            line("eval_start", at - 1, epoch_num=samples),
            line("eval_stop", at, epoch_num=samples),
            line("eval_accuracy", at, accuracy, epoch_num=samples),
        ]
    stop = evaluations[-1][1] if end is None and evaluations else end
    if status == "success":
        lines.append(line("epoch_stop", stop, epoch_num=evaluations[-1][0]))
        lines.append(line("train_samples", stop, evaluations[-1][0]))
    if status is not None:
        lines.append(line("run_stop", stop, status=status))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_restarted(folder, elapsed):
    """Write a run of 400 samples: killed after 200, continued from a checkpoint at 100 (11 s)."""
    write_part(folder / "result_0.part1.txt", [(100, 11, 0.5), (200, 22, 0.6)])
    return write_part(
        folder / "result_0.txt",
        [(200, 6, 0.61), (400, 17, 0.73)],
        before=100,
        elapsed=elapsed,
        status="success",
        resumed=True,
    )


@pytest.mark.parametrize("elapsed", [11.0, None])
def test_a_run_that_was_killed_and_continued_is_one_run(tmp_path, elapsed, run_mlbert):
    """Logs of earlier versions do not record the time before them;
    then it follows from the summary.
    """
    log = write_restarted(tmp_path, elapsed)
    summary = {"seconds_to_train": 28.0, "samples": 400}
    write_files(tmp_path, {"run_0/summary.json": json.dumps(summary)})
    (run,) = result_of(tmp_path).runs
    assert (run.seconds, run.samples, run.restarts) == (28.0, 400, 1)
    assert run.samples_per_second == pytest.approx(400 / 28)
    assert run.training_samples_per_second == pytest.approx(300 / 15)
    assert [(one.samples, one.seconds) for one in run.evaluations] == [
        (100, 11),
        (200, 17),
        (400, 28),
    ], "the evaluation that the restart repeated counts once"
    assert run.speeds == [(100, 10), (200, 20), (400, 20)]
    assert run.times.evaluation == 3
    status, out, _ = run_mlbert("report", tmp_path)
    assert (status, "restarted" in out, "missed" in out) == (0, True, False)
    assert "28.00 s: time to train of 1 run; it resumed from a checkpoint" in " ".join(out.split())
    named = sorted(tmp_path.glob("result_*.txt"))
    assert [one.source.log.path for one in result_of(*named).runs] == [log]


def test_the_time_of_a_restarted_run_is_unknown_without_its_record(tmp_path):
    """Its target counts as reached nevertheless."""
    log = write_restarted(tmp_path, None)
    (run,) = result_of(tmp_path).runs
    assert (run.succeeded, run.seconds, seconds_to_train(read_log(log))) == (True, None, None)
    assert result_of(tmp_path).marks == {}


def test_a_run_that_began_again_at_step_0_has_only_its_own_points(tmp_path):
    write_part(tmp_path / "result_0.part1.txt", [(100, 11, 0.5)])
    write_part(tmp_path / "result_0.txt", [(90, 10, 0.5), (190, 21, 0.73)], status="success")
    (run,) = result_of(tmp_path).runs
    assert (run.seconds, run.restarts) == (21, 1)
    assert [one.samples for one in run.evaluations] == [90, 190]


def test_a_checkpoint_older_than_the_last_restart_drops_what_came_after_it(tmp_path):
    write_part(tmp_path / "result_0.part1.txt", [(100, 11, 0.5), (200, 22, 0.6)])
    write_part(
        tmp_path / "result_0.part2.txt", [(300, 11, 0.6)], before=200, elapsed=22, resumed=True
    )
    write_part(
        tmp_path / "result_0.part10.txt", [(210, 11, 0.6)], before=100, elapsed=11, resumed=True
    )
    write_part(
        tmp_path / "result_0.txt",
        [(310, 11, 0.73)],
        before=210,
        elapsed=22,
        status="success",
        resumed=True,
    )
    (run,) = result_of(tmp_path).runs
    assert [(one.samples, one.seconds) for one in run.evaluations] == [
        (100, 11),
        (210, 22),
        (310, 33),
    ]
    assert run.restarts == 3


@pytest.mark.parametrize(
    ("status", "ended", "mark"),
    [(None, False, UNFINISHED), ("aborted", False, INTERRUPTED), ("aborted", True, MISSED)],
)
def test_a_run_that_ends_early_did_not_miss_its_target(tmp_path, status, ended, mark, run_mlbert):
    log = write_part(tmp_path / "result_0.txt", [(100, 11, 0.5)], status=status)
    if ended:  # at a limit
        log.write_text(log.read_text().replace('"key": "run_stop"', '"key": "epoch_stop"'))
        log.write_text(log.read_text() + line("run_stop", 11, status="aborted") + "\n")
    result = result_of(tmp_path)
    assert result.marks == {"0": mark}
    code, out, _ = run_mlbert("report", tmp_path)
    assert (code, "missed" in out, "interrupted" in out) == (1, ended, not ended)
    page = report_page([result], Prices())
    assert ("missed the target" in page) == ended


def test_a_restart_that_failed_before_run_start_keeps_the_numbers_of_the_run(tmp_path):
    write_part(tmp_path / "result_0.part1.txt", [(100, 11, 0.5)])
    (tmp_path / "result_0.txt").write_text(line("init_start", 0) + "\n")
    result = result_of(tmp_path)
    assert (result.marks, result.runs[0].samples) == ({"0": UNFINISHED}, 100)
    (tmp_path / "result_0.part1.txt").unlink()
    assert result_of(tmp_path).marks == {"0": NO_RUN}


def test_train_samples_before_training_is_a_plan(tmp_path, run_mlbert):
    """Programs that log it there, and count evaluations or epochs instead of samples."""
    for index, plan in enumerate((500, 100)):
        write_log(tmp_path / f"result_{index}.txt", logged={"train_samples": plan, "seed": index})
    runs = result_of(tmp_path).runs
    assert [run.samples for run in runs] == [200, 200]
    assert [run.samples_per_second for run in runs] == [10, 10]
    findings = check(tmp_path)
    assert not [one for one in findings if "but trained on" in one.words]
    diff = json.loads(
        run_mlbert("submission", "diff", runs[0].source.log.path, tmp_path, "--json")[1]
    )
    speeds = [measure for measure in diff["measures"] if measure["name"] == "speed"]
    assert speeds[0]["b"] == [run.training_samples_per_second for run in runs]


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (5, 6), (0.5, 0.75)])
def test_numbers_of_evaluations_or_epochs_are_not_samples(tmp_path, counts):
    evaluations = [(counts[0], 10.0, 0.5), (counts[1], 20.0, 0.72)]
    log = write_log(tmp_path / "result_0.txt", evaluations)
    (run,) = result_of(log).runs
    assert (run.samples, run.samples_to_target, run.samples_per_second) == (None, None, None)
    assert (run.speeds, [one.samples for one in run.evaluations]) == ([], [None, None])
    text = log.read_text().splitlines()
    text.insert(-1, line("train_samples", 20.0, 200))
    log.write_text("\n".join(text) + "\n")
    (run,) = result_of(log).runs
    assert (run.samples, run.samples_to_target, run.samples_per_second) == (200, 200, 10)
    report_page([result_of(log)], Prices())


@pytest.fixture(scope="module")
def restarted(tmp_path_factory) -> Path:
    """Return the LOGDIR of a real run that was interrupted and continued."""
    folder = tmp_path_factory.mktemp("restarted")
    assert train(folder, "run", signal.SIGUSR1, STEP, max_steps=100) == 128 + signal.SIGUSR1
    assert train(folder, "run", resume=1, max_steps=100) == 0
    return folder / "run"


def test_every_command_gives_the_numbers_of_the_run_s_summary(restarted, tmp_path, run_mlbert):
    summary = json.loads((restarted / "run_0/summary.json").read_text())
    page = tmp_path / "page.html"
    status, out, _ = run_mlbert("report", restarted, "--json", "--html", page)
    assert status == 0
    (run,) = json.loads(out)[0]["runs"]
    assert (run["samples"], run["restarts"]) == (summary["samples"], 1)
    assert run["seconds"] == pytest.approx(summary["seconds_to_train"], abs=0.1)
    assert not any(word in page.read_text() for word in ("missed the target", "No result"))
    points = [json.loads(text) for text in (restarted / "run_0/metrics.jsonl").open()]
    evaluations = [point for point in points if point["kind"] == "evaluation"]
    assert [one["samples"] for one in run["evaluations"]] == [
        point["samples"] for point in evaluations
    ]
    assert [one["seconds"] for one in run["evaluations"]] == pytest.approx(
        [point["seconds"] for point in evaluations], abs=0.1
    )
    diff = json.loads(run_mlbert("submission", "diff", restarted, restarted, "--json")[1])
    numbers = {measure["name"]: measure["a"] for measure in diff["measures"]}
    assert diff["runs"] == [1, 1]
    assert numbers["time to train"] == [pytest.approx(run["seconds"] / 60)]
    assert numbers["speed"] == [pytest.approx(run["training_samples_per_second"])]
    assert any("were restarted" in note for note in diff["notes"])
    logs = sorted(restarted.glob("result_*.txt"))
    assert len(logs) == 2
    status, out, _ = run_mlbert("submission", "check", *logs, "--json", "-")
    checked = {finding["path"] for finding in json.loads(out)["findings"]}
    assert (status, checked) == (0, {str(restarted / "result_0.txt")})
    findings = check(restarted)
    assert not [one for one in findings if one.outcome is Outcome.ERROR]
    (time,) = [one for one in findings if one.check == "time to train"]
    assert time.words == f"{run['seconds'] / 60:.4g} minutes"


def test_a_summary_with_another_time_is_an_error_and_the_run_cannot_be_repeated(
    restarted, tmp_path, run_mlbert
):
    folder = shutil.copytree(restarted, tmp_path / "run")
    log = folder / "result_0.txt"
    path = folder / "run_0/summary.json"
    summary = json.loads(path.read_text())
    before = seconds_before(read_log(log))
    assert 0 < before < summary["seconds_to_train"]
    summary["seconds_to_train"] += 10
    path.write_text(json.dumps(summary))
    results = ResultSet([read_log(log)])
    assert any("seconds_to_train is" in complaint.text for complaint in check_metrics(results))
    status, _, error = run_mlbert("submission", "repeat", log)
    assert status == 2
    assert_error_line(error, "log.incomplete", log.name)
