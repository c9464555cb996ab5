"""Each implementation of each optimizer against the published programs, torch,
and the float64 specifications.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlaudit.call_sites import Sources
from mlaudit.keys import SETTINGS_OF
from mlaudit.logs import Log
from mlbert.optim import optimizers as methods
from mlbert.optim.acclip import ACClip
from mlbert.optim.adamw import Adam, AdamW, DecoupledAdamW, DecoupledStableAdamW, StableAdamW
from mlbert.optim.config import OPTIMIZERS, OptimizerConfig
from mlbert.optim.flat import FlatParameters, is_decayed
from mlbert.optim.lamb import Lamb
from mlbert.optim.madgrad import Madgrad
from mlbert.optim.optimizer import FlatOptimizer
from mlbert.optim.sgd import SGD
from mlbert.recipes import packed_lamb
from optimizer_cases import COMMON, METHODS, assert_follows
from training_settings import configuration
from unsharded import AnyOptimizer, configured, unsharded
from user_errors import user_error

ASSETS = Path(__file__).parents[2] / "assets"
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda cls: cls.name)
CONSTANT = [1.0] * 10
CHANGING = [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.02]
# Method, base rate, rates, beta_2, decay and other settings of each run in tests/assets/lamb and
# tests/assets/adamw.
PUBLISHED = {
    "lamb_default": (Lamb, 0.002, CONSTANT, 0.999, 0.01, {}),
    "lamb_mlperf8k": (Lamb, 0.00288293, CONSTANT, 0.88, 0.0166629, {"betas": (0.88, 0.88)}),
    "lamb_clip_inside": (Lamb, 0.01, CONSTANT, 0.999, 0.01, {"max_grad_norm": 1.0}),
    "adamw_no_bias_correction": (AdamW, 0.001, CONSTANT, 0.999, 0.01, {"bias_correction": False}),
    "mosaic_default_const": (DecoupledAdamW, 0.0005, CONSTANT, 0.98, 1e-5, {"base_lr": 0.0005}),
    "mosaic_sched_wd1e-2": (DecoupledAdamW, 0.0005, CHANGING, 0.98, 0.01, {"base_lr": 0.0005}),
    "decoupled_stableadamw_modernbert": (
        DecoupledStableAdamW,
        0.0008,
        CHANGING,
        0.98,
        1e-5,
        {"base_lr": 0.0008},
    ),
    "decoupled_wd1e-2": (DecoupledStableAdamW, 0.0008, CHANGING, 0.98, 0.01, {"base_lr": 0.0008}),
    "stableadamw_wd1e-2": (StableAdamW, 0.003, CHANGING, 0.99, 0.01, {}),
    "stableadamw_wd0": (StableAdamW, 0.003, CHANGING, 0.99, 0.0, {}),
}
# Two updates calculated by hand from a method's formulas: rate, both gradients and both resulting
# weights. ACClip: m = 0.5, tau = 0.25, u = 0.25 / 0.625 x 0.5 = 0.2; then m = 0.0625, tau =
# 0.28125, so m is not clipped.
ACCLIP = [
    (0.5, (1.0, 1.0), (2 - 0.5 * (0.2 + 0.5), 2 - 0.5 * 0.2)),
    (1.0, (-0.375, -0.375), (1.65 - (0.0625 + 0.25 * 1.65), 1.9 - 0.0625)),
]
# With its decay the weight's gradient is 1 too. lambda = 8: s = nu = 8, z = 2 - 8 / (2 + 2) = 0.
# Then lambda = 19: s = nu = 27, z = 2 - 27 / (3 + 2) = -3.4.
MADGRAD = [
    (8.0, (0.5, 1.0), (1.5, 1.5)),
    (19 / math.sqrt(2), (1 - 0.25 * 1.5, 1.0), (0.75 * 1.5 - 0.25 * 3.4, 0.75 * 1.5 - 0.25 * 3.4)),
]
# m = 1, then 0.5 - 0.25.
MOMENTUM = [
    (0.5, (1.0, 1.0), (2 - 0.5 * (1 + 0.5), 2 - 0.5)),
    (0.25, (-0.25, -0.25), (1.25 - 0.25 * (0.25 + 0.3125), 1.5 - 0.25 * 0.25)),
]


@each_method
def test_optimizer_has_the_implementations_that_it_declares(make_flat, method, monkeypatch):
    assert {"plain", "native", "triton"} <= set(method.IMPLEMENTATIONS)
    monkeypatch.setattr(method, "IMPLEMENTATIONS", ("plain",))
    optimizer = make_one(method, make_flat(), "auto")
    assert (optimizer.implementation, optimizer.reason) == (
        "plain",
        f"{method.name} has no native implementation",
    )
    with user_error("ops.unavailable", "native optimizer", wording=False):
        make_one(method, make_flat(), "native")


def assert_follows_published(
    name: str, make: Callable[[FlatParameters], FlatOptimizer], decayed
) -> None:
    """Run ten updates on the published gradients and compare the weights after 1, 2, 5 and 10."""
    published = {}
    _, base, rates, *_ = PUBLISHED[name]
    for folder in ("lamb", "adamw"):
        published |= np.load(ASSETS / folder / "trajectories.npz", allow_pickle=False)
    start = {key.removeprefix("w0/"): published[key] for key in published if key.startswith("w0/")}
    pairs = [
        (parameter, nn.Parameter(torch.from_numpy(array))) for parameter, array in start.items()
    ]
    flat = FlatParameters(pairs, decayed=decayed)
    optimizer = make(flat)
    saved = [1, 2, 5, 10]
    for update, rate in enumerate(rates, start=1):
        for parameter, grad in flat.views(flat.grad).items():
            grad.copy_(torch.from_numpy(published[f"grad/{parameter}"][update - 1]))
        optimizer.step(base * rate)
        if update not in saved:
            continue
        for parameter, weight in flat.views(flat.data).items():
            expected = published[f"{name}/w/{parameter}"][saved.index(update)]
            # The published float32 programs themselves differ from float64 by 5.6e-7.
            np.testing.assert_allclose(
                weight.numpy(), expected, rtol=0, atol=1e-6, err_msg=parameter
            )


@pytest.mark.parametrize("config", PUBLISHED)
def test_follows_the_published_program(config, implementation):
    """All but LAMB and the first AdamW decay every tensor, including LayerNorm and biases."""
    cls, _, _, beta_2, decay, own = PUBLISHED[config]
    settings = {
        "betas": (0.9, beta_2),
        "eps": 1e-6,
        "weight_decay": decay,
        "max_grad_norm": None,
        **own,
    }

    def make(flat: FlatParameters) -> Adam:
        optimizer = unsharded(cls, flat, implementation=implementation, **settings)
        assert optimizer.implementation == implementation
        return optimizer

    decays_all = "lamb" not in config and "no_bias" not in config
    assert_follows_published(config, make, (lambda name: True) if decays_all else is_decayed)


@pytest.mark.parametrize("decay_all", ["1", "0", "none"])
def test_decay_all_matches_the_published_decoupled_adamw(decay_all):
    """Without DECAY_ALL, biases and LayerNorm differ from the published run."""
    numbers = {
        "optimizer": "decoupled_adamw",
        "learning_rate": "0.0005",
        "weight_decay_rate": "0.01",
    }
    config = configuration(packed_lamb.RECIPE, **numbers, max_grad_norm="none", decay_all=decay_all)
    equal = (
        pytest.raises(AssertionError, match=r"LayerNorm|bias")
        if decay_all != "1"
        else nullcontext()
    )
    with equal:
        decayed = methods.decayed(config[OptimizerConfig])
        assert_follows_published("mosaic_sched_wd1e-2", partial(configured, config), decayed)


def make_one(
    method: type[AnyOptimizer], flat: FlatParameters, implementation: str, **changes: Any
) -> AnyOptimizer:
    return unsharded(
        method, flat, implementation=implementation, **METHODS[method][0], **COMMON | changes
    )


def run(flat: FlatParameters, optimizer: FlatOptimizer, updates: int) -> FlatOptimizer:
    """Run updates with a different gradient each time, and return the optimizer."""
    start = flat.grad.clone()
    for update in range(updates):
        flat.grad.copy_(start.roll(update))
        optimizer.step(0.01)
    return optimizer


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in METHODS),
        *((method, {"bias_correction": False}) for method in METHODS if issubclass(method, Adam)),
    ],
)
def test_matches_the_specification_in_float64(make_flat, method, implementation, changes):
    own, specification = METHODS[method]
    flat = make_flat()
    weights = {name: view.double() for name, view in flat.views(flat.data).items()}
    reference = specification(weights, **own, **COMMON | changes)
    assert_follows(
        make_one(method, flat, implementation, **changes), reference, 4, [0.01, 0.02, 0.005]
    )


def test_madgrad_root_is_accurate_for_all_magnitudes(implementation):
    """The first update from 0 at rate 1 without momentum and decay is -g / cbrt(g^2),
    or 0 if g^2 overflows.

    The norm is computed in float64, so a gradient whose square overflows float32 is not skipped.
    """
    flat = FlatParameters([("w.bias", nn.Parameter(torch.zeros(5001)))])
    numbers = {"betas": (0.0, 0.0), "eps": 1e-12, "weight_decay": 0.0, "max_grad_norm": None}
    optimizer = unsharded(Madgrad, flat, **numbers, implementation=implementation)
    flat.grad.copy_(torch.logspace(-17, 19, 5001, dtype=torch.float64))
    flat.grad[-1] = 1e25
    grad = flat.grad.double()
    optimizer.step(1.0)
    expected = -grad / (grad ** (2 / 3) + 1e-12)
    expected[-1] = 0.0
    torch.testing.assert_close(flat.data.double(), expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "betas", "eps", "steps"),
    [
        (ACClip, (0.5, 0.75), 0.125, ACCLIP),
        (Madgrad, (0.75, 0.0), 2.0, MADGRAD),
        (SGD, (0.5, 0.0), 0.0, MOMENTUM),
    ],
)
def test_first_two_steps_by_hand(method, betas, eps, steps, implementation):
    """A decayed weight and a bias start equal; all numbers except MADGRAD's last are exact in
    binary.
    """
    flat = FlatParameters(
        (name, nn.Parameter(torch.tensor([2.0]))) for name in ("w.weight", "w.bias")
    )
    numbers = {"betas": betas, "eps": eps, "weight_decay": 0.25, "max_grad_norm": None}
    optimizer = unsharded(method, flat, **numbers, implementation=implementation)
    for lr, grads, expected in steps:
        flat.grad.copy_(torch.tensor(grads))
        optimizer.step(lr)
        torch.testing.assert_close(flat.data, torch.tensor(expected), rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("method", "torchs", "lr", "decay"),
    [
        (AdamW, partial(torch.optim.AdamW, betas=(0.9, 0.98), eps=1e-6), 0.01, 0.05),
        (SGD, partial(torch.optim.SGD, momentum=0.9), 0.1, 0.0),  # torch defines decay differently
    ],
)
def test_matches_torch(make_flat, method, torchs, lr, decay, implementation):
    """Weights of 0.02 may differ by rounding."""
    flat = make_flat()
    parameters = {name: nn.Parameter(view.clone()) for name, view in flat.views(flat.data).items()}
    groups = [
        {"params": [p], "weight_decay": decay * is_decayed(name)} for name, p in parameters.items()
    ]
    theirs = torchs(groups, lr=lr)
    ours = make_one(method, flat, implementation, weight_decay=decay)
    start = flat.grad.clone()
    for update in range(5):
        flat.grad.copy_(start.roll(update))
        for name, view in flat.views(flat.grad).items():
            parameters[name].grad = view.clone()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        theirs.step()
        assert float(ours.step(lr)) == pytest.approx(float(norm), rel=1e-5)
    for name, view in flat.views(flat.data).items():
        torch.testing.assert_close(view, parameters[name].data, rtol=1e-5, atol=3e-7)


@each_method
def test_native_is_independent_of_the_number_of_threads(make_flat, method):
    results: list[Tensor] = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        flat = make_flat()
        optimizer = run(flat, make_one(method, flat, "auto"), 3)
        results.append(flat.data)
    assert torch.equal(results[1], results[3]), (
        "runs with the same number of threads must be bit-equal"
    )
    if optimizer.implementation == "native":
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize(
    ("method", "bad"),
    # All methods share the kernel of the norm, but each has its own update kernel.
    [*((method, float("nan")) for method in METHODS), (Lamb, float("inf")), (Lamb, -float("inf"))],
)
def test_non_finite_gradient_changes_nothing(make_flat, method, implementation, bad):
    flat = make_flat()
    optimizer = run(flat, make_one(method, flat, implementation), 1)
    buffers = (flat.data, *(getattr(optimizer, key) for key in method.STATE))
    before = [buffer.clone() for buffer in buffers]
    flat.grad[12345] = bad
    skipped = optimizer.step(0.01)
    assert optimizer.num_updates == 1
    assert all(map(torch.equal, buffers, before))
    flat.grad[12345] = 0.0
    assert optimizer.step(0.01).isfinite()
    assert not skipped.isfinite(), "the next update must not change the norm of this one"


def test_gradient_clipped_elsewhere_is_not_clipped_again(make_flat, implementation):
    flat = make_flat()
    optimizer = make_one(AdamW, flat, implementation, clipped_before=True)
    optimizer.step(0.01)
    torch.testing.assert_close(optimizer.exp_avg, flat.grad * 0.1)


def test_without_gradient_and_decay_lamb_changes_nothing(make_flat, implementation):
    flat = make_flat()
    before = flat.data.clone()
    flat.grad.zero_()
    make_one(Lamb, flat, implementation, weight_decay=0.0).step(0.01)
    torch.testing.assert_close(flat.data, before, rtol=0, atol=0)


def test_known_norm_is_used(make_flat, implementation):
    """The optimizer clips by the known norm, and skips the update if that norm is not finite."""
    flat = make_flat()
    norm = torch.tensor(4.0, dtype=torch.float64)
    optimizer = make_one(AdamW, flat, implementation, known_norm=norm, max_grad_norm=1.0)
    assert optimizer.step(0.01) == 4.0
    torch.testing.assert_close(optimizer.exp_avg, flat.grad * 0.1 / 4.0)
    norm.fill_(float("inf"))
    weights = flat.data.clone()
    optimizer.step(0.01)
    assert torch.equal(flat.data, weights)
    assert optimizer.num_updates == 1


@each_method
def test_resume_with_any_implementation(make_flat, method, implementation):
    """Resuming is bit-equal with the same implementation, and close with another."""
    straight = make_flat()
    first = make_flat()
    run(straight, run(straight, make_one(method, straight, implementation), 2), 1)
    optimizer = run(first, make_one(method, first, implementation), 2)
    state = {
        k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state_dict().items()
    }
    for other, atol in ((implementation, 0.0), ("plain", 1e-8)):
        second = make_flat()
        second.data.copy_(first.data)
        second.grad.copy_(first.grad)
        resumed = make_one(method, second, other)
        resumed.load_state_dict(state)
        run(second, resumed, 1)
        assert resumed.num_updates == 3
        torch.testing.assert_close(second.data, straight.data, rtol=0, atol=atol)


@each_method
def test_launch_equals_step(use_triton, make_flat, method):
    """`launch`, which graphs capture, with the rate on the device equals `step`;
    both write the weights' copy.
    """
    flat = make_flat()
    other = make_flat()
    run(flat, make_one(method, flat, "triton"), 2)
    optimizer = make_one(method, other, "triton", copy_dtype=torch.bfloat16)
    assert optimizer.can_capture
    optimizer.set_learning_rate(0.01)
    start = other.grad.clone()
    address = other.padded_copy.data_ptr()
    for update in range(2):
        other.grad.copy_(start.roll(update))
        optimizer.launch()
    assert torch.equal(other.data, flat.data)
    assert optimizer.grad_norm.isfinite()
    for gradient in (1.0, torch.nan):
        assert torch.equal(other.padded_copy, other.padded_data.bfloat16())
        other.grad[3] = gradient
        run(other, optimizer, 1)
    assert torch.equal(other.padded_copy, other.padded_data.bfloat16())
    assert other.padded_copy.data_ptr() == address, "graphs rely on the address"


def test_copy_in_another_dtype(make_flat, implementation):
    """The copy is valid after updates and after loading a checkpoint;
    an optimizer without a copy removes it.
    """
    flat = make_flat()
    optimizer = make_one(Lamb, flat, implementation, copy_dtype=torch.bfloat16)
    state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state_dict().items()}
    start = flat.data.clone()
    run(flat, optimizer, 2)
    assert not torch.equal(flat.data, start)
    copies = [parameter.place.copy for parameter in flat.parameters]
    for parameter, copy in zip(flat.parameters, copies, strict=True):
        assert torch.equal(copy, parameter.bfloat16())
    flat.data.copy_(start)
    optimizer.load_state_dict({**state, "num_updates": 0})
    assert torch.equal(flat.padded_copy, flat.padded_data.bfloat16())
    make_one(Lamb, flat, implementation)
    assert all(parameter.place.copy is None for parameter in flat.parameters)


def test_state_of_another_model_is_an_error(make_flat):
    lamb = make_one(Lamb, make_flat(), "plain")
    other = make_one(Lamb, FlatParameters([("w", nn.Parameter(torch.zeros(3)))]), "plain")
    for state in (other.state_dict(), {"num_updates": 1}):
        with user_error("checkpoint.shape", "optimizer state"):
            lamb.load_state_dict(state)


def test_one_rank_does_not_copy_weights_or_state(make_flat):
    lamb = make_one(Lamb, make_flat(), "plain")
    assert lamb.weights.shard.data_ptr() == lamb.flat.data.data_ptr()
    assert lamb.state_dict()["exp_avg"].data_ptr() == lamb.exp_avg.data_ptr()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_create_each_optimizer(make_flat, name):
    """Settings become log entries, each logged once by a line in which the audit finds its key."""
    flat = make_flat()
    events = []
    root = Path(__file__).parents[3]
    sources = Sources(root, Log(Path("result_0.txt"), ()))

    def event(key: str, value: object) -> None:
        events.append((key, value))
        caller = inspect.stack()[1]
        assert sources.call_of(
            Path(caller.filename).relative_to(root).as_posix(), caller.lineno, key
        ), key

    optimizer = configured(configuration(packed_lamb.RECIPE, optimizer=name), flat)
    optimizer.hyperparameters(event)
    found = dict(events)
    assert len(found) == len(events)
    prefix = f"opt_{getattr(optimizer, 'LOGGED_AS', name)}_"
    assert found.pop("opt_epsilon", 1e-6) == 1e-6
    values = {"epsilon": 1e-6, "beta_1": 0.9, "beta_2": 0.98, "momentum": 0.9}
    values |= {"weight_decay": 0.01, "weight_decay_rate": 0.01}
    logged = ("epsilon", "beta_1", "beta_2", "weight_decay_rate")
    if name != "lamb":
        logged = getattr(optimizer, "LOGGED", ("epsilon", "beta_1", "beta_2", "weight_decay"))
    expected = {prefix + key: values[key] for key in logged}
    assert set(expected) <= {*SETTINGS_OF, "opt_lamb_beta_1", "opt_lamb_beta_2"}, (
        "the log tracer must know these keys"
    )
    assert found == {"opt_name": name, "opt_gradient_clip_norm": 1.0, **expected}
    assert optimizer.step(0.01).isfinite()
