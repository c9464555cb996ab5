"""Muon against `torch.optim.Muon`, against the singular value decomposition,
and its two implementations.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mlbert.optim import muon
from mlbert.optim.adamw import AdamW
from mlbert.optim.flat import FlatParameters
from mlbert.optim.muon import Muon, orthogonalize
from mlbert.recipes import packed_lamb
from optimizer_cases import COMMON
from training_settings import configuration
from unsharded import configured, unsharded
from user_errors import user_error

SHAPES = {
    "bert.embeddings.word_embeddings.weight": (40, 24),
    "bert.encoder.layer.0.attention.self.query.weight": (24, 24),
    "bert.encoder.layer.0.attention.self.query.bias": (24,),
    "bert.encoder.layer.0.intermediate.dense.weight": (96, 24),
    "bert.encoder.layer.0.output.dense.weight": (24, 48),
    "bert.encoder.layer.0.output.LayerNorm.weight": (24,),
    "bert.encoder.layer.1.output.dense.weight": (24, 48),
    "classifier.weight": (2, 24),
}
HIDDEN = [name for name, shape in SHAPES.items() if ".encoder." in name and len(shape) == 2]
FORMS = pytest.mark.parametrize("form", ["plain", "native"])


def make_flat() -> FlatParameters:
    numbers = torch.Generator().manual_seed(5)
    flat = FlatParameters(
        (name, nn.Parameter(torch.randn(shape, generator=numbers)))
        for name, shape in SHAPES.items()
    )
    flat.grad.copy_(torch.randn(flat.numel, generator=numbers))
    return flat


def make(flat: FlatParameters, form: str, **changes: float | None) -> Muon:
    return unsharded(Muon, flat, implementation=form, **COMMON | changes)


def train(flat: FlatParameters, optimizer: Muon | AdamW, updates: int) -> dict[str, Tensor]:
    """Run updates with a different gradient each time; return the weights by name."""
    start = flat.grad.clone()
    for update in range(updates):
        flat.grad.copy_(start.roll(97 * update))
        optimizer.step(0.01)
    return {name: weight.clone() for name, weight in flat.views(flat.data).items()}


@pytest.fixture(autouse=True)
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the processor."""
    monkeypatch.setattr(muon, "product_dtype", lambda device: torch.float32)


def iterated(values: Tensor) -> Tensor:
    """Apply Muon's polynomial as often as `orthogonalize` does."""
    a, b, c = muon.COEFFICIENTS
    for _ in range(muon.ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return values


@settings(max_examples=20)
@given(rows=st.integers(1, 40), extra=st.integers(0, 120), seed=st.integers(0, 1000))
def test_orthogonalize_applies_its_polynomial_to_the_singular_values(rows, extra, seed):
    matrix = torch.randn(1, rows, rows + extra, generator=torch.Generator().manual_seed(seed))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = iterated(values / values.norm(dim=-1, keepdim=True))
    expected = left @ (values.unsqueeze(-1) * right)
    torch.testing.assert_close(
        orthogonalize(matrix, torch.float32).double(), expected, rtol=0, atol=1e-3
    )


def test_orthogonalize_moves_singular_values_near_1_unless_they_are_0():
    numbers = iterated(torch.linspace(0.01, 0.9999, 500, dtype=torch.float64))
    assert 0.68 <= float(numbers.min()) <= float(numbers.max()) <= 1.21
    for columns in (4, 9):
        assert not orthogonalize(torch.zeros(2, 3, columns), torch.float32).any()


@FORMS
def test_hidden_matrices_follow_torchs_muon(monkeypatch, form):
    """PyTorch multiplies in bfloat16, so both do here; its products are not grouped by shape."""
    monkeypatch.setattr(muon, "product_dtype", lambda device: torch.bfloat16)
    flat = make_flat()
    peers = {name: nn.Parameter(flat.views(flat.data)[name].clone()) for name in HIDDEN}
    peer = torch.optim.Muon(
        peers.values(),
        lr=0.01,
        weight_decay=0.05,
        momentum=0.9,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    optimizer = make(flat, form, max_grad_norm=None)
    assert optimizer.implementation == form
    start = flat.data.clone()
    grads = flat.grad.clone()
    for update in range(5):
        flat.grad.copy_(grads.roll(97 * update))
        for name, parameter in peers.items():
            parameter.grad = flat.views(flat.grad)[name].clone()
        peer.step()
        optimizer.step(0.01)
    for name, parameter in peers.items():
        moved = flat.views(flat.data)[name] - flat.views(start)[name]
        difference = parameter.detach() - flat.views(flat.data)[name]
        assert float(difference.norm()) <= 0.02 * float(moved.norm()), name


@FORMS
def test_other_parameters_follow_adamw(form):
    ours = make_flat()
    theirs = make_flat()
    found = train(ours, make(ours, form), 4)
    expected = train(theirs, unsharded(AdamW, theirs, implementation="plain", **COMMON), 4)
    for name in SHAPES:
        is_close = torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert is_close == (name not in HIDDEN), name


def test_native_and_plain_agree():
    plain = make_flat()
    native = make_flat()
    expected, found = (
        train(flat, make(flat, form), 4) for flat, form in ((plain, "plain"), (native, "native"))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@FORMS
def test_resumed_run_equals_a_straight_one(form):
    straight = make_flat()
    second = make_flat()
    optimizer = make(straight, form)
    train(straight, optimizer, 2)
    second.data.copy_(straight.data)
    second.grad.copy_(straight.grad)
    resumed = make(second, form)
    resumed.load_state_dict(optimizer.state_dict() | {"num_updates": 2})
    expected = train(straight, optimizer, 2)
    torch.testing.assert_close(train(second, resumed, 2), expected, rtol=0, atol=0)


@pytest.mark.parametrize("sharded", ["node", "all"])
def test_sharding_is_refused(sharded):
    config = configuration(packed_lamb.RECIPE, optimizer="muon", sharded_optimizer=sharded)
    with user_error("config.conflict", "OPTIMIZER=muon"):
        configured(config, make_flat())


def test_a_missing_form_is_named():
    with user_error("ops.unavailable", "triton optimizer"):
        make(make_flat(), "triton")
