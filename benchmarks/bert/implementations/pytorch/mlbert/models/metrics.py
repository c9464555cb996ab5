"""Metrics of an evaluation from sums over its samples, so that batches and ranks add up. Where one is undefined (no
positive label, no variation) it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Confusion = Sequence[Sequence[float]]


def accuracy(confusion: Confusion) -> float:
    """Right predictions over all; confusion[i][j] counts samples of label i that are taken for j."""
    return _ratio(sum(row[i] for i, row in enumerate(confusion)), sum(map(sum, confusion)))


def f1(confusion: Confusion) -> float:
    """2 tp / (2 tp + fp + fn) of two classes, of which 1 is the positive one."""
    (_, false_positive), (false_negative, true_positive) = confusion
    return _ratio(2 * true_positive, 2 * true_positive + false_positive + false_negative)


def matthews_correlation(confusion: Confusion) -> float:
    """Correlation of labels and predictions, for any number of classes (Gorodkin, 2004, R_K)."""
    labels, taken = [sum(row) for row in confusion], [sum(column) for column in zip(*confusion, strict=True)]
    total, right = sum(labels), sum(row[i] for i, row in enumerate(confusion))
    covariance = right * total - sum(a * b for a, b in zip(labels, taken, strict=True))
    variances = (total**2 - sum(b * b for b in taken)) * (total**2 - sum(a * a for a in labels))
    return _ratio(covariance, math.sqrt(variances))


def pearson(count: float, x: float, y: float, xx: float, yy: float, xy: float) -> float:
    """Correlation of two variables from their number and the sums of x, y, x^2, y^2 and x y."""
    covariance = count * xy - x * y
    variances = max(0.0, count * xx - x * x) * max(0.0, count * yy - y * y)
    return _ratio(covariance, math.sqrt(variances))


def spearman(x: Tensor, y: Tensor) -> float:
    """Correlation of the ranks of two float64 vectors [n]; equal values share the mean of their ranks."""
    a, b = _ranks(x), _ranks(y)
    return pearson(len(a), *(float(value.sum()) for value in (a, b, a * a, b * b, a * b)))


def _ranks(values: Tensor) -> Tensor:
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[place]


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
