"""The eight tasks of GLUE (without WNLI, as usual): their files, columns and labels,
and the published way to train each.

Learning rates, weight decay, batch sizes, epochs and evaluation intervals are those of MosaicML's
published fine-tuning jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlbert.data.formats.glue import GlueTask

# Columns of MNLI's files before the labels that only some of them have, and of STS-B's files.
_MNLI = (
    "index",
    "promptID",
    "pairID",
    "genre",
    "sentence1_binary_parse",
    "sentence2_binary_parse",
    "sentence1_parse",
    "sentence2_parse",
    "sentence1",
    "sentence2",
    "label1",
)
_STSB = (
    "index",
    "genre",
    "filename",
    "year",
    "old_index",
    "source1",
    "source2",
    "sentence1",
    "sentence2",
    "score",
)
_ENTAILMENT = ("entailment", "not_entailment")  # labels of RTE and QNLI
# Folder, learning rate, weight decay, sequences per step, epochs, steps between evaluations;
# then the files.
TASKS: Mapping[str, GlueTask] = {
    "mnli": GlueTask(
        "MNLI",
        5e-5,
        5e-6,
        48,
        3,
        2300,
        columns=(*_MNLI, "gold_label"),
        dev_columns=(*_MNLI, "label2", "label3", "label4", "label5", "gold_label"),
        label="gold_label",
        classes=("entailment", "neutral", "contradiction"),
        metrics=("accuracy", "mismatched_accuracy"),
        evaluations={"": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
    ),
    "rte": GlueTask(
        "RTE",
        1e-5,
        1e-5,
        16,
        3,
        100,
        columns=("index", "sentence1", "sentence2", "label"),
        classes=_ENTAILMENT,
        after_mnli=True,
    ),
    "qqp": GlueTask(
        "QQP",
        3e-5,
        3e-6,
        16,
        5,
        2000,
        columns=("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        texts=("question1", "question2"),
        label="is_duplicate",
        metrics=("accuracy", "f1"),
    ),
    "cola": GlueTask(
        "CoLA",
        5e-5,
        5e-6,
        32,
        10,
        250,
        columns=("source", "label", "mark", "sentence"),
        has_header=False,
        texts=("sentence",),
        metrics=("matthews_correlation",),
    ),
    "mrpc": GlueTask(
        "MRPC",
        8e-5,
        8e-6,
        32,
        10,
        100,
        columns=("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        texts=("#1 String", "#2 String"),
        label="Quality",
        metrics=("accuracy", "f1"),
        after_mnli=True,
    ),
    "qnli": GlueTask(
        "QNLI",
        1e-5,
        1e-6,
        16,
        10,
        1000,
        columns=("index", "question", "sentence", "label"),
        texts=("question", "sentence"),
        classes=_ENTAILMENT,
    ),
    "sst2": GlueTask(
        "SST-2", 3e-5, 3e-6, 16, 3, 500, columns=("sentence", "label"), texts=("sentence",)
    ),
    "stsb": GlueTask(
        "STS-B",
        3e-5,
        3e-6,
        32,
        10,
        200,
        columns=_STSB,
        label="score",
        classes=(),
        metrics=("spearman",),
        after_mnli=True,
    ),
}


def score(task: str, metrics: Mapping[str, float]) -> float:
    """Return the task's score: 100 times the mean of its metrics."""
    values = [metrics[name] for name in TASKS[task].metrics]
    return 100.0 * sum(values) / len(values)
