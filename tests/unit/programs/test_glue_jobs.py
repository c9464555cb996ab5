"""GLUE's jobs and scores against numbers worked out by hand, and the published hyper-parameters."""

from __future__ import annotations

import pytest

from mlbert.data.formats.glue import TASKS, score
from mlbert.programs.mosaic.glue_runner import SEEDS, GlueJob, aggregate, job_list

# labels, rate, decay, batch, epochs, steps between evaluations
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


def test_hyper_parameters_are_the_published_ones() -> None:
    found = {
        name: (t.num_labels, t.learning_rate, t.weight_decay, t.batch, t.epochs, t.eval_steps)
        for name, t in TASKS.items()
    }
    assert found == PUBLISHED


def test_the_default_is_25_jobs_with_mnli_first() -> None:
    jobs = job_list(
        {task: SEEDS.get(task, (19,)) for task in ("cola", "rte", "qqp", "mnli", "stsb", "mrpc", "qnli", "sst2")}
    )
    assert len(jobs) == 25
    assert jobs[0] == GlueJob("mnli", 19, waits=False)
    assert [job.waits for job in jobs] == [False] * 10 + [True] * 15
    assert {job.task for job in jobs if job.waits} == {"rte", "mrpc", "stsb"}
    assert jobs[0].name("base_1") == "base_1_task=mnli_seed=19"


def test_without_mnli_nobody_waits() -> None:
    assert [job.waits for job in job_list({"rte": [1], "cola": [2]})] == [False, False]


def test_scores_by_hand() -> None:
    results = {
        GlueJob("mnli", 1, False): {"accuracy": 0.80, "mismatched_accuracy": 0.82, "loss": 9.0},
        GlueJob("qqp", 1, False): {"accuracy": 0.9, "f1": 0.86},
        GlueJob("cola", 1, False): {"matthews_correlation": 0.5, "accuracy": 0.8},
        GlueJob("cola", 2, False): {"matthews_correlation": 0.6, "accuracy": 0.7},
        GlueJob("stsb", 1, True): {"spearman": -0.1, "pearson": 0.9},
    }
    expected = {"mnli": 81.0, "qqp": 88.0, "cola": 55.0, "stsb": -10.0, "glue": (81.0 + 88.0 + 55.0 - 10.0) / 4}
    assert aggregate(results) == pytest.approx(expected)
    assert aggregate({}) == {}
    assert score("mrpc", {"accuracy": 0.7, "f1": 0.8}) == pytest.approx(75.0)
