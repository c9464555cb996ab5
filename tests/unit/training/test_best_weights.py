"""The weights of the best evaluation, from a metric that is not always a number."""

import math
from pathlib import Path

import torch

from mlbert.training.best_weights import BestWeights


def test_a_metric_that_is_not_a_number_is_the_worst(tmp_path: Path) -> None:
    weights = [torch.full((3,), float(number)) for number in range(5)]
    best = BestWeights(tmp_path / "best", patience=2)
    best.evaluated(1, math.nan, weights[1])
    assert best.stop_reason(1) is None
    best.evaluated(2, -5.0, weights[2])
    assert best.step == 2
    best.evaluated(3, math.nan, weights[3])
    resumed = BestWeights(tmp_path / "best", patience=2)
    resumed.resume()
    assert resumed.stop_reason(3) is None
    resumed.evaluated(4, math.nan, weights[4])
    assert resumed.stop_reason(4) == "no better evaluation since step 2"
    assert torch.equal(resumed.load(), weights[2])
