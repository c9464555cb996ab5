"""The metrics of a run, each declared once.

The screen and ``metrics.jsonl`` have whatever an objective returns. What is declared here decides
the rest: a metric with a title has a figure on the report's page, and one of evaluations also a
column in the report's table and a key in its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlbert.host.metric import Metric

EVALUATION_PREFIX = "eval_"  # of a metric of evaluations in metrics.jsonl
# By the keys of steps in metrics.jsonl (`mlbert.runs.monitor`).
STEP_METRICS: Mapping[str, Metric] = {
    "loss": Metric("Loss"),
    "learning_rate": Metric("Learning rate"),
}
# By the keys that an objective's ``metrics`` returns. The accuracy that counts is in the log, and a
# report draws it from there.
EVALUATION_METRICS: Mapping[str, Metric] = {
    "mlm_accuracy": Metric(logger_name="MaskedAccuracy"),
    "loss": Metric(logger_name="LanguageCrossEntropy"),
}


def titles() -> dict[str, str]:
    """Return the titles of the metrics that a report has, by their keys in ``metrics.jsonl``."""
    found = {name: metric.title for name, metric in STEP_METRICS.items() if metric.title}
    return found | evaluation_titles()


def evaluation_titles() -> dict[str, str]:
    """Return the titles of the metrics of evaluations, as `titles`."""
    return {
        f"{EVALUATION_PREFIX}{name}": metric.title
        for name, metric in EVALUATION_METRICS.items()
        if metric.title
    }


def logger_name(name: str) -> str:
    """Return the name of a metric of evaluations in TensorBoard and Weights & Biases."""
    metric = EVALUATION_METRICS.get(name, Metric())
    return metric.logger_name or name
