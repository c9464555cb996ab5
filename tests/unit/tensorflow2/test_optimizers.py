"""LAMB and AdamW against the published ones and Keras, and the loss scale:
same rule as in PyTorch, bounds, state.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.ops.config import ComputeConfig
from mlbert.optim import adamw, lamb
from mlbert.optim import loss_scale as pytorch_loss_scale
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.flat import FlatParameters
from unsharded import unsharded
from user_errors import user_error

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from tf2_bert.loss_scale import LARGEST, LossScale
from tf2_bert.optimizers import AdamWeightDecay, Lamb, Optimizer, make_optimizer
from unit.tensorflow2.strategies_program import settings

ASSETS = Path(__file__).parents[2] / "assets/lamb"
INPUTS = np.load(ASSETS / "trajectories.npz")
NAMES = [key.removeprefix("w0/") for key in INPUTS if key.startswith("w0/")]
NUMBERS = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6, "weight_decay_rate": 0.01}
YES = tf.constant(True)
NO = tf.constant(False)


def start() -> dict[str, tf.Variable]:
    return {name: tf.Variable(INPUTS[f"w0/{name}"]) for name in NAMES}


def gradients(update: int) -> list[np.ndarray]:
    return [INPUTS[f"grad/{name}"][update] for name in NAMES]


def after(scale: LossScale, finite: Sequence[bool]) -> list[float]:
    """Return the scale after each update."""
    found = []
    for good in finite:
        scale.update(tf.constant(good))
        found.append(float(scale.value))
    return found


def apply(
    optimizer: Optimizer, found: Sequence[np.ndarray], lr: float, finite: tf.Tensor = YES
) -> None:
    optimizer.apply([tf.convert_to_tensor(gradient) for gradient in found], tf.constant(lr), finite)


@pytest.mark.parametrize(
    ("config", "compiled", "lr", "numbers"),
    [
        ("lamb_default", False, 0.002, {}),
        (
            "lamb_mlperf8k",
            True,
            0.00288293,
            {"beta_1": 0.88, "beta_2": 0.88, "weight_decay_rate": 0.0166629},
        ),
    ],
)
def test_lamb_follows_google(
    config: str, compiled: bool, lr: float, numbers: dict[str, float]
) -> None:
    expected = np.load(ASSETS / "tf2_trajectories.npz")
    parameters = start()
    optimizer = Lamb(parameters, **NUMBERS | numbers, compiled=compiled)
    for update in range(10):
        apply(optimizer, gradients(update), lr)
        for name, weight in parameters.items():
            np.testing.assert_allclose(
                weight.numpy(), expected[f"{config}/w/{name}"][update], rtol=0, atol=1e-6
            )
    assert int(optimizer.iterations) == 10


def test_adamw_matches_keras() -> None:
    """Epsilon is large enough to show where it is added."""
    numbers = {"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-3}
    parameters = start()
    peers = [
        tf.Variable(weight, name=name.replace("|", "_")) for name, weight in parameters.items()
    ]
    keras = tf.keras.optimizers.AdamW(learning_rate=0.01, weight_decay=0.1, **numbers)
    keras.exclude_from_weight_decay(var_names=["LayerNorm", "bias"])
    optimizer = AdamWeightDecay(parameters, **numbers, weight_decay_rate=0.1)
    for update in range(10):
        keras.apply_gradients(zip(map(tf.constant, gradients(update)), peers, strict=True))
        apply(optimizer, gradients(update), 0.01)
    for (name, weight), peer in zip(parameters.items(), peers, strict=True):
        np.testing.assert_allclose(weight.numpy(), peer.numpy(), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("cls", [Lamb, AdamWeightDecay])
def test_non_finite_gradient_changes_nothing(cls: type[Optimizer]) -> None:
    parameters = start()
    optimizer = cls(parameters, **NUMBERS)
    apply(optimizer, gradients(0), 0.01)
    everything = [*parameters.values(), *optimizer.variables]
    before = [variable.numpy() for variable in everything]
    apply(optimizer, [np.full_like(gradient, np.nan) for gradient in gradients(1)], 0.01, NO)
    np.testing.assert_equal([variable.numpy() for variable in everything], before)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize(("ours", "theirs"), [(Lamb, lamb.Lamb), (AdamWeightDecay, adamw.AdamW)])
def test_logged_hyperparameters_match_pytorch(ours: type[Optimizer], theirs: type) -> None:
    flat = FlatParameters([("w.weight", torch.nn.Parameter(torch.zeros(2)))])
    numbers = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    reference = unsharded(theirs, flat, implementation="plain", **numbers)
    found = []
    expected = []
    ours(start(), **NUMBERS, max_grad_norm=1.0).hyperparameters(lambda *pair: found.append(pair))
    reference.hyperparameters(lambda *pair: expected.append(pair))
    assert found == expected


def test_settings_select_the_optimizer() -> None:
    made = make_optimizer(
        settings(optimizer="lamb", max_grad_norm=0.5)[OptimizerConfig], {}, compiled=False
    )
    assert type(made) is Lamb
    assert (tuple(made.betas), made.eps, made.weight_decay, made.max_grad_norm) == (
        (0.9, 0.999),
        1e-6,
        0.01,
        0.5,
    )
    assert (
        type(make_optimizer(settings(optimizer="adamw")[OptimizerConfig], {}, compiled=False))
        is AdamWeightDecay
    )
    with user_error("config.choice", "OPTIMIZER"):
        make_optimizer(settings(optimizer="madgrad")[OptimizerConfig], {}, compiled=False)


def test_scale_matches_pytorch() -> None:
    finite = (np.random.default_rng(0).random(200) > 0.2).tolist()
    reference = pytorch_loss_scale.LossScale(2.0**20, 3, torch.device("cpu"))
    expected = []
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
