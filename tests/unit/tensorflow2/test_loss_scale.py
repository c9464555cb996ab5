"""The loss scale of the TensorFlow 2 implementation: same rule as in PyTorch, bounds, state."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim import loss_scale as pytorch_loss_scale

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from tf2_bert.loss_scale import LARGEST, LossScale
from unit.tensorflow2.strategies_program import settings


def after(scale: LossScale, finite: list[bool]) -> list[float]:
    found = []
    for good in finite:
        scale.update(tf.constant(good))
        found.append(float(scale.value))
    return found


def test_scale_matches_pytorch() -> None:
    finite = (np.random.default_rng(0).random(200) > 0.2).tolist()
    reference, expected = pytorch_loss_scale.LossScale(2.0**20, 3, torch.device("cpu")), []
    for good in finite:
        reference.update(torch.tensor(1.0 if good else float("inf"), dtype=torch.float64))
        expected.append(float(reference.value))
    assert min(expected) > 1
    assert after(LossScale(2.0**20, 3, fixed=False), finite) == expected


def test_scale_stays_within_bounds_and_is_removed_in_float32() -> None:
    assert after(LossScale(LARGEST / 2, 1, fixed=False), [True] * 3) == [LARGEST] * 3
    assert after(LossScale(2.0, 1, fixed=False), [False] * 3) == [1, 1, 1]
    assert LARGEST == pytorch_loss_scale.LARGEST
    scale = LossScale(1024.0, 1, fixed=False)
    (gradient,) = scale.unscale([tf.constant([2.0**-14], tf.float16)])
    assert gradient.dtype == tf.float32
    assert float(gradient[0]) == 2.0**-24
    assert float(scale.scale(tf.constant(0.5))) == 512


def test_state_is_restored(tmp_path: Path) -> None:
    first, second = LossScale(8.0, 3, fixed=False), LossScale(2.0, 3, fixed=False)
    after(first, [False, True])
    path = tf.train.Checkpoint(loss_scale=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(loss_scale=second).read(path).assert_consumed()
    finite = [True, True, True, False]
    assert after(second, finite) == after(first, finite) == [4, 8, 8, 4]


def test_settings_select_the_scale() -> None:
    def made(**changes: object) -> LossScale | None:
        config = settings(**changes)
        return LossScale.of(config[ComputeConfig], config[TensorFlowConfig])

    assert made(precision="fp32") is None
    assert made(precision="bf16") is None
    fixed = made(precision="fp16", loss_scale=64, loss_scale_fixed=1)
    assert after(fixed, [False]) == [64]
    dynamic = made(precision="fp16", loss_scale=64, loss_scale_window=1, loss_scale_fixed=0)
    assert after(dynamic, [False, True, True]) == [32, 64, 128]
