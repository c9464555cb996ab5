"""LAMB and AdamW of the TensorFlow 2 implementation against the published ones, PyTorch and Keras."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlbert.optim import adamw, lamb
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.flat import FlatParameters
from unsharded import unsharded
from user_errors import user_error

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed (the tf extra)")

from tf2_bert.optimizers import AdamWeightDecay, Lamb, Optimizer, make_optimizer
from unit.tensorflow2.strategies_program import settings

ASSETS = Path(__file__).parents[2] / "assets/lamb"
INPUTS = np.load(ASSETS / "trajectories.npz")
NAMES = [key.removeprefix("w0/") for key in INPUTS if key.startswith("w0/")]
NUMBERS = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6, "weight_decay_rate": 0.01}
YES, NO = tf.constant(True), tf.constant(False)
SHAPES = {
    "odd.weight": (7, 11),
    "odd.bias": (5,),
    "layer.LayerNorm.weight": (16,),
    "layer.LayerNorm.bias": (16,),
    "zero.weight": (3,),
    "cls.predictions.bias": (9,),
}


def variables(values: Mapping[str, np.ndarray]) -> dict[str, tf.Variable]:
    return {name: tf.Variable(value) for name, value in values.items()}


def random_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    scales = {name: 0.0 if name.startswith("zero") else 0.05 for name in SHAPES}
    return {name: rng.normal(0, scales[name], shape).astype(np.float32) for name, shape in SHAPES.items()}


def random_gradients(update: int) -> list[np.ndarray]:
    rng = np.random.default_rng(100 + update)
    return [rng.normal(0, 10.0 ** rng.integers(-4, 1), shape).astype(np.float32) for shape in SHAPES.values()]


def apply(optimizer: Optimizer, gradients: Sequence[Any], lr: float, finite: tf.Tensor = YES) -> None:
    optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], tf.constant(lr), finite)


@pytest.mark.parametrize(
    ("config", "compiled", "lr", "numbers"),
    [
        ("lamb_default", False, 0.002, {}),
        ("lamb_mlperf8k", True, 0.00288293, {"beta_1": 0.88, "beta_2": 0.88, "weight_decay_rate": 0.0166629}),
    ],
)
def test_lamb_follows_google(config: str, compiled: bool, lr: float, numbers: dict[str, float]) -> None:
    expected = np.load(ASSETS / "tf2_trajectories.npz")
    parameters = variables({name: INPUTS[f"w0/{name}"] for name in NAMES})
    optimizer = Lamb(parameters, **{**NUMBERS, **numbers}, compiled=compiled)
    for update in range(10):
        apply(optimizer, [INPUTS[f"grad/{name}"][update] for name in NAMES], lr)
        for name, weight in parameters.items():
            np.testing.assert_allclose(weight.numpy(), expected[f"{config}/w/{name}"][update], rtol=0, atol=1e-6)
    assert int(optimizer.iterations) == 10


@pytest.mark.parametrize(
    ("ours", "theirs", "epsilon"), [(Lamb, lamb.Lamb, 1e-6), (AdamWeightDecay, adamw.AdamW, 1e-12)]
)
def test_ten_updates_match_pytorch(ours: type[Optimizer], theirs: type, epsilon: float) -> None:
    """PyTorch's AdamW adds epsilon elsewhere, which does not matter if it is tiny."""
    parameters = variables(random_weights())
    flat = FlatParameters((name, torch.nn.Parameter(torch.tensor(w))) for name, w in random_weights().items())
    common = {"betas": (0.9, 0.999), "eps": epsilon, "weight_decay": 0.01, "max_grad_norm": None}
    reference = unsharded(theirs, flat, implementation="plain", **common)
    optimizer = ours(parameters, **{**NUMBERS, "epsilon": epsilon})
    for update in range(10):
        gradients, lr = random_gradients(update), 0.01 * (1 - update / 20)
        for view, gradient in zip(flat.views(flat.grad).values(), gradients, strict=True):
            view.copy_(torch.from_numpy(gradient))
        reference.step(lr)
        apply(optimizer, gradients, lr)
    for name, weight in flat.views(flat.data).items():
        np.testing.assert_allclose(parameters[name].numpy(), weight.numpy(), rtol=0, atol=1e-5, err_msg=name)


def test_adamw_matches_keras() -> None:
    """Epsilon is large enough to show where it is added."""
    numbers = {"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-3}
    parameters = variables(random_weights())
    keras_weights = [tf.Variable(value, name=name.replace(".", "_")) for name, value in random_weights().items()]
    keras = tf.keras.optimizers.AdamW(learning_rate=0.01, weight_decay=0.1, **numbers)
    keras.exclude_from_weight_decay(var_names=["LayerNorm", "bias"])
    optimizer = AdamWeightDecay(parameters, **numbers, weight_decay_rate=0.1)
    for update in range(10):
        gradients = [tf.constant(gradient) for gradient in random_gradients(update)]
        keras.apply_gradients(zip(gradients, keras_weights, strict=True))
        apply(optimizer, gradients, 0.01)
    for (name, weight), reference in zip(parameters.items(), keras_weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), reference.numpy(), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("cls", [Lamb, AdamWeightDecay])
def test_non_finite_gradient_changes_nothing(cls: type[Optimizer]) -> None:
    parameters = variables(random_weights())
    optimizer = cls(parameters, **NUMBERS)
    apply(optimizer, random_gradients(0), 0.01)
    everything = [*parameters.values(), *optimizer.variables]
    before = [variable.numpy() for variable in everything]
    apply(optimizer, [np.full(shape, np.nan, np.float32) for shape in SHAPES.values()], 0.01, NO)
    np.testing.assert_equal([variable.numpy() for variable in everything], before)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize(("ours", "theirs"), [(Lamb, lamb.Lamb), (AdamWeightDecay, adamw.AdamW)])
def test_logged_hyperparameters_match_pytorch(ours: type[Optimizer], theirs: type) -> None:
    flat = FlatParameters([("w.weight", torch.nn.Parameter(torch.zeros(2)))])
    numbers = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    reference = unsharded(theirs, flat, implementation="plain", **numbers)
    found, expected = [], []
    ours(variables(random_weights()), **NUMBERS, max_grad_norm=1.0).hyperparameters(lambda *pair: found.append(pair))
    reference.hyperparameters(lambda *pair: expected.append(pair))
    assert found == expected


def test_checkpoint_has_the_state_without_weights(tmp_path: Path) -> None:
    parameters = variables(random_weights())
    optimizer = Lamb(parameters, **NUMBERS)
    for update in range(2):
        apply(optimizer, random_gradients(update), 0.01)
    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "checkpoint"))
    keys = [key.split("/")[1] for key, _ in tf.train.list_variables(path) if key.startswith("optimizer/")]
    assert sorted(keys) == sorted(["iterations", *["m", "v"] * len(SHAPES)])
    other = Lamb(variables({name: weight.numpy() for name, weight in parameters.items()}), **NUMBERS)
    tf.train.Checkpoint(optimizer=other).read(path).assert_consumed()
    for one in (optimizer, other):
        apply(one, random_gradients(2), 0.01)
    for name, value in other.m.items():
        np.testing.assert_array_equal(value.numpy(), optimizer.m[name].numpy())


def test_settings_select_the_optimizer() -> None:
    def chosen(parameters: dict[str, tf.Variable], **changes: object) -> Optimizer:
        return make_optimizer(settings(**changes)[OptimizerConfig], parameters, compiled=False)

    made = chosen(variables(random_weights()), optimizer="lamb", max_grad_norm=0.5)
    assert type(made) is Lamb
    assert (tuple(made.betas), made.eps, made.weight_decay, made.max_grad_norm) == ((0.9, 0.999), 1e-6, 0.01, 0.5)
    assert type(chosen({}, optimizer="adamw")) is AdamWeightDecay
    with user_error("config.choice", "OPTIMIZER"):
        chosen({}, optimizer="madgrad")
