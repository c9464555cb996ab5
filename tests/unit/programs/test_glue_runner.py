"""Jobs as real processes: order, devices, failure, and that no child outlives the program."""

import itertools
import json
import operator
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.data.formats.glue_tasks import TASKS, score
from mlbert.programs import glue_runner
from mlbert.programs.glue_runner import (
    GlueJob,
    GlueProgress,
    Runner,
    State,
    aggregate,
    best_trials,
    job_list,
    make_slots,
    write_scores,
)
from mlbert.programs.glue_trials import Trial
from programs import wait_for

JOBS = job_list({"mnli": [1, 2], "cola": [1], "rte": [1], "stsb": [1]})
FIRST = JOBS[0]
# Labels, rate, decay, batch, epochs, steps between evaluations
PUBLISHED = {
    "mnli": (3, 5e-5, 5e-6, 48, 3, 2300),
    "rte": (2, 1e-5, 1e-5, 16, 3, 100),
    "qqp": (2, 3e-5, 3e-6, 16, 5, 2000),
    "cola": (2, 5e-5, 5e-6, 32, 10, 250),
    "mrpc": (2, 8e-5, 8e-6, 32, 10, 100),
    "qnli": (2, 1e-5, 1e-6, 16, 10, 1000),
    "sst2": (2, 3e-5, 3e-6, 16, 3, 500),
    "stsb": (1, 3e-5, 3e-6, 32, 10, 200),
}


class Jobs:
    """Shell commands that note when they begin and end, and on which GPU."""

    def __init__(self, folder: Path, bodies: dict[GlueJob, str] | None = None) -> None:
        self.base = folder
        self.bodies = bodies or {}
        slots = make_slots(4, None, sorted(os.sched_getaffinity(0)), 2)
        self.runner = Runner(
            JOBS, (), slots, self.prepare, self.folder, {**os.environ}, lambda task: {}
        )

    def folder(self, job: GlueJob) -> Path:
        return job.folder(self.base)

    def prepare(self, job: GlueJob) -> list[str]:
        self.folder(job).mkdir(parents=True, exist_ok=True)
        words = f"$1 {job.task} {job.seed} $CUDA_VISIBLE_DEVICES"
        note = f"note() {{ echo {words} >> {self.base}/notes; }}"
        return ["sh", "-c", f"{note}; note begin; {self.bodies.get(job, 'sleep 0.1')}; note end"]


def test_all_run_side_by_side_and_wait_for_mnli_only(tmp_path: Path) -> None:
    # The second mnli job, for which nobody waits, goes on until rte is done.
    jobs = Jobs(tmp_path, {JOBS[1]: f"until grep 'end rte' {tmp_path}/notes; do sleep 0.05; done"})
    states = jobs.runner.states
    changes = []
    jobs.runner.run(lambda job: changes.append((job, states.get(job))))
    assert changes[0] == (FIRST, State.RUNNING)
    assert set(states.values()) == {State.DONE}
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    places = [note[:3] for note in notes]
    assert places.index(["begin", "rte", "1"]) > places.index(["end", "mnli", "1"])
    running = itertools.accumulate(1 if what == "begin" else -1 for what, *_ in places)
    assert max(running) == 2
    assert {note[3] for note in notes} == {"0", "1"}


def test_a_line_for_each_change_and_the_share_of_all_training(tmp_path: Path) -> None:
    """The first job is resumed: its first 1,000 of 4,000 samples are no work of this program."""
    jobs = Jobs(tmp_path)
    printed = []
    advanced = []
    run = jobs.folder(FIRST) / "run_0"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"samples": 900}\n{"samples": 1000}\n')
    runner = jobs.runner
    samples = {FIRST: 4000, **dict.fromkeys(JOBS[1:], 10)}
    progress = GlueProgress(printed.append, samples, jobs.folder, {})
    assert progress.total == 3000 + 40

    def show(job: GlueJob | None) -> None:
        # The last line is being written.
        (run / "metrics.jsonl").write_text('{"samples": 4000}\n{"samp')
        progress.show(runner, job, advanced.append)

    runner.run(show)
    assert printed[0] == "[0/5] mnli seed 1 running on GPU 0"
    assert re.fullmatch(r"\[5/5\] \w+ seed \d done after \d s: ", printed[-1])
    assert (advanced[0], sum(advanced)) == (3000, 3040)


def test_a_failed_job_is_named_and_only_those_that_need_it_do_not_start(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, {FIRST: "echo much; echo 'mlbert: error: no such thing' >&2; exit 2"})
    jobs.runner.run(print)
    found = {
        (job.task, job.seed): state
        for job, state in jobs.runner.states.items()
        if state is not State.DONE
    }
    blocked = {("rte", 1): State.BLOCKED, ("stsb", 1): State.BLOCKED}
    assert found == {("mnli", 1): State.FAILED, **blocked}, "the second mnli job and cola are done"
    assert jobs.runner.last_line(FIRST) == "mlbert: error: no such thing"
    assert (jobs.folder(FIRST) / glue_runner.LOG).read_text().splitlines()[0] == "much"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_ends_the_children(
    tmp_path: Path, tree_root: Path, number: int, status: int
) -> None:
    folders = [str(tree_root / "tests/unit/programs"), str(tree_root / "tests")]
    trap = f"trap 'kill $!; echo >> {tmp_path}/ended; exit' TERM"
    code = f"""
import sys; sys.path[:0] = {folders}
from pathlib import Path
from test_glue_runner import JOBS, Jobs
body = "{trap}; sleep 60 & echo >> {tmp_path}/begun; wait"
Jobs(Path({str(tmp_path)!r}), dict.fromkeys(JOBS, body)).runner.run(print)
"""

    def both(name: str) -> bool:
        return (tmp_path / name).exists() and (tmp_path / name).read_text() == "\n\n"

    program = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: both("begun"), 60)
    program.send_signal(number)
    assert program.wait(30) == status
    wait_for(lambda: both("ended"), 60)


def test_slots() -> None:
    gpus = make_slots(2, "GPU-a, 7", [0, 1, 2, 3], 25)
    assert [slot.exports["CUDA_VISIBLE_DEVICES"] for slot in gpus] == ["GPU-a", "7"]
    assert [sorted(slot.cores) for slot in gpus] == [[0, 2], [1, 3]]
    assert [slot.exports["OMP_NUM_THREADS"] for slot in gpus] == ["2", "2"]
    cpus = make_slots(0, None, [4, 5], 25)
    found = [(slot.name, sorted(slot.cores), slot.exports["CUDA_VISIBLE_DEVICES"]) for slot in cpus]
    assert found == [("CPU 0", [4], ""), ("CPU 1", [5], "")]
    assert len(make_slots(8, None, [0], 1)) == 1


def test_hyper_parameters_are_the_published_ones() -> None:
    values_of = operator.attrgetter(
        "num_labels", "learning_rate", "weight_decay", "batch", "epochs", "eval_steps"
    )
    assert {name: values_of(task) for name, task in TASKS.items()} == PUBLISHED


def test_the_default_is_25_jobs_with_mnli_first() -> None:
    tasks = ("cola", "rte", "qqp", "mnli", "stsb", "mrpc", "qnli", "sst2")
    jobs = job_list({task: glue_runner.SEEDS.get(task, (19,)) for task in tasks})
    assert len(jobs) == 25
    assert jobs[0] == GlueJob("mnli", 19, waits=False)
    assert [job.waits for job in jobs] == [False] * 10 + [True] * 15
    assert {job.task for job in jobs if job.waits} == {"rte", "mrpc", "stsb"}
    assert jobs[0].name("base_1") == "base_1_task=mnli_seed=19"
    assert [job.waits for job in job_list({"rte": [1], "cola": [2]})] == [False, False], (
        "there is no mnli"
    )


def test_scores_by_hand() -> None:
    results = {
        GlueJob("mnli", 1, False): {"accuracy": 0.80, "mismatched_accuracy": 0.82, "loss": 9.0},
        GlueJob("qqp", 1, False): {"accuracy": 0.9, "f1": 0.86},
        GlueJob("cola", 1, False): {"matthews_correlation": 0.5, "accuracy": 0.8},
        GlueJob("cola", 2, False): {"matthews_correlation": 0.6, "accuracy": 0.7},
        GlueJob("stsb", 1, True): {"spearman": -0.1, "pearson": 0.9},
    }
    expected = {
        "mnli": 81.0,
        "qqp": 88.0,
        "cola": 55.0,
        "stsb": -10.0,
        "glue": (81.0 + 88.0 + 55.0 - 10.0) / 4,
    }
    assert aggregate(results) == pytest.approx(expected)
    assert aggregate({}) == {}
    assert score("mrpc", {"accuracy": 0.7, "f1": 0.8}) == pytest.approx(75.0)


def test_a_search_waits_for_all_trials_and_starts_if_one_succeeded(tmp_path: Path) -> None:
    trials = [Trial(1e-5, 1e-6, epochs) for epochs in (1, 2)]
    searched = [GlueJob("mnli", 1, False, trial) for trial in trials]
    searched.append(GlueJob("rte", 1, True, trials[0]))

    def run(bodies: list[str]) -> list[State]:
        def prepare(job: GlueJob) -> list[str]:
            job.folder(tmp_path).mkdir(parents=True, exist_ok=True)
            return ["sh", "-c", bodies[searched.index(job)]]

        slots = make_slots(2, None, [0], 2)
        folder = operator.methodcaller("folder", tmp_path)
        runner = Runner(searched, (), slots, prepare, folder, {**os.environ}, lambda task: {})
        runner.run(lambda job: None)
        return list(runner.states.values())

    slow = f"sleep 0.5; touch {tmp_path}/slow"
    assert run(["exit 1", slow, f"test -e {tmp_path}/slow"]) == [
        State.FAILED,
        State.DONE,
        State.DONE,
    ]
    assert run(["exit 1", "exit 1", "true"]) == [State.FAILED, State.FAILED, State.BLOCKED]


def test_the_best_trial_of_each_task_counts(tmp_path: Path) -> None:
    low = Trial(1e-5, 1e-6, 1)
    high = Trial(8e-5, 1e-6, 1)
    results = {
        GlueJob("rte", 1, False, low): {"accuracy": 0.9},
        GlueJob("rte", 2, False, low): {"accuracy": 0.5},
        GlueJob("rte", 1, False, high): {"accuracy": 0.8},
        GlueJob("cola", 1, False, low): {"matthews_correlation": 0.4},
    }
    best = best_trials(results)
    assert [(job.task, job.trial) for job in best] == [("rte", high), ("cola", low)]
    assert best_trials({GlueJob("rte", 1, False): {"accuracy": 0.5}})
    equal = {GlueJob("rte", 1, False, trial): {"accuracy": 0.5} for trial in (high, low)}
    assert [job.trial for job in best_trials(equal)] == [low]
    write_scores(tmp_path, results, [])
    found = json.loads((tmp_path / glue_runner.SCORES).read_text())
    assert found["tasks"] == {"rte": pytest.approx(80), "cola": pytest.approx(40)}
    assert found["jobs"][2]["learning_rate"] == 8e-5
    assert len(found["jobs"]) == 4
