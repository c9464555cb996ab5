"""The Gluon product: its source in a model of the GPU's barriers, and its host functions."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from mlbert.ops import fp8_casts
from mlbert.ops.fp8_scaling import padded_tokens
from mlbert.ops.triton import gluon_product
from unit.ops.gluon_model import Descriptor, ModelError, Pointer, run_kernel

SHARED_BYTES = 227 << 10  # of a block on Hopper
SCRATCH_BYTES = 4 << 10  # of sums and maxima over a tile, which the compiler adds
SEEDS = range(20)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value])


def kernel_arguments(tokens: int, inner: int, columns: int, is_backward: bool) -> dict[str, Any]:
    """Return tensors of a product, by name."""
    generator = torch.Generator().manual_seed(tokens + inner)
    first = torch.float8_e5m2 if is_backward else torch.float8_e4m3fn
    pre = torch.full((tokens, columns), 7.0, dtype=torch.bfloat16)
    if is_backward:
        pre = torch.randn(tokens, columns, generator=generator).bfloat16()
    tiles = 2 * -(-tokens // 128)
    return {
        "a": torch.randn(tokens, inner, generator=generator).to(first),
        "b": torch.randn(columns, inner, generator=generator).to(torch.float8_e4m3fn),
        "pre": pre,
        "rows": torch.full((tokens, columns), 5.0).to(first),
        "columns": torch.full((columns, padded_tokens(tokens)), 5.0).to(first),
        "bias": torch.randn(columns, generator=generator),
        "amax": scalar(0.0),
        "partial": torch.full((tiles * columns,), torch.nan) if is_backward else None,
    }


def launch(
    given_: dict[str, Any], programs: int, seed: int, left_out: tuple[str, str] | None = None
) -> int:
    """Run the kernel in the model, and return the bytes of shared memory."""
    tokens, columns = given_["pre"].shape
    rows = (gluon_product.ROWS, gluon_product.COLUMNS)
    partial = given_["partial"]
    arguments = [
        Descriptor(given_["a"], (gluon_product.ROWS, gluon_product.INNER)),
        Descriptor(given_["b"], (gluon_product.COLUMNS, gluon_product.INNER)),
        Descriptor(given_["pre"], rows),
        Descriptor(given_["rows"], rows),
        Descriptor(given_["columns"], rows[::-1]),
        Pointer(scalar(0.25)),
        Pointer(scalar(0.125)),
        Pointer(given_["bias"]),
        Pointer(scalar(2.0)),
        Pointer(given_["amax"]),
        None if partial is None else Pointer(partial),
        tokens,
        columns,
        columns // gluon_product.COLUMNS,
        given_["a"].shape[1] // gluon_product.INNER,
        gluon_product.FORWARD_STAGES if partial is None else gluon_product.BACKWARD_STAGES,
        gluon_product.ROWS,
        gluon_product.COLUMNS,
        gluon_product.INNER,
    ]
    return run_kernel(gluon_product.gluon_product_kernel, arguments, programs, seed, left_out)


def differences(tokens: int, inner: int, columns: int, is_backward: bool, **how: Any) -> list[str]:
    """Return the results of the kernel that differ from the reference's."""
    given_ = kernel_arguments(tokens, inner, columns, is_backward)
    a, b, pre, bias = (given_[name].float() for name in ("a", "b", "pre", "bias"))
    total = a @ b.t() * (0.25 * 0.125)
    amax = torch.zeros(())
    scale = torch.tensor(2.0)
    wanted: dict[str, torch.Tensor] = {"pre": pre}
    if is_backward:
        copies, sums = fp8_casts.plain_gelu_backward(
            total, pre, bias, False, scale, amax, torch.float8_e5m2
        )
        wanted["partial"] = sums
    else:
        copies = fp8_casts.plain_gelu(total, bias, False, scale, amax, torch.float8_e4m3fn)
        wanted["pre"] = total.bfloat16()
    launch(given_, **how)
    wanted |= {"rows": copies.rows, "columns": copies.columns, "amax": amax[None]}
    if is_backward:
        given_["partial"] = given_["partial"].view(-1, columns).sum(0)
    return [
        name
        for name, right in wanted.items()
        if not (given_[name].float() - right.float()).norm() <= 2e-3 * right.float().norm()
    ]


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("tokens", "inner", "columns", "programs"),
    [(1, 128, 128, 1), (150, 256, 256, 4), (700, 1024, 128, 1), (520, 384, 256, 2)],
)
def test_kernel_equals_reference_in_any_order(tokens, inner, columns, programs, is_backward):
    for seed in (1, 100, 200):
        assert differences(tokens, inner, columns, is_backward, programs=programs, seed=seed) == []


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("produce", "mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)"),
        ("consume", "mbarrier.wait(b_full, 0)"),
        ("consume", "mbarrier.wait(turn.index(WHICH), (number & 1) ^ (1 - WHICH))"),
        ("consume", "mbarrier.wait(full.index(slot), ((step + k) // STAGES) & 1)"),
        ("consume", "mbarrier.wait(pre_full.index(WHICH), number & 1)"),
        ("consume", "mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)"),
        ("consume", "mbarrier.arrive(turn.index(1 - WHICH), count=1)"),
        ("consume", "total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))"),
        ("consume", "step += PAIR * STEPS"),
    ],
)
def test_model_finds_a_missing_line(function, line):
    """Each of these lines is needed: without it there is an order that fails."""
    found = False
    for seed in SEEDS:
        try:
            wrong = differences(
                700, 512, 128, True, programs=1, seed=seed, left_out=(function, line)
            )
        except (ModelError, IndexError):
            wrong = ["stopped"]
        found = found or bool(wrong)
        if found:
            break
    assert found


@pytest.mark.parametrize("is_backward", [False, True])
def test_shared_memory_suffices(is_backward):
    arguments = kernel_arguments(1, 1024, 128, is_backward)
    needed = launch(arguments, programs=1, seed=0)
    # The last KiB of alignment is in the record of the compiled kernel.
    assert needed + (SCRATCH_BYTES if is_backward else 0) <= SHARED_BYTES


@given(tokens=st.integers(1, 30_000), blocks=st.integers(1, 200), processors=st.integers(1, 160))
def test_programs_cover_every_tile_once(tokens, blocks, processors):
    columns = blocks * gluon_product.COLUMNS
    programs = gluon_product.num_programs(tokens, columns, processors)
    pairs = -(-tokens // (gluon_product.CONSUMERS * gluon_product.ROWS))
    assert programs % blocks == 0
    assert programs <= max(processors, blocks)
    per_block = programs // blocks
    seen = [pair for first in range(per_block) for pair in range(first, pairs, per_block)]
    assert sorted(seen) == list(range(pairs))
    # No program without work.
    assert per_block <= pairs


@pytest.mark.parametrize(
    ("inner", "columns", "fits"),
    [
        (1024, 4096, True),
        (768, 3072, True),
        (1152, 4096, False),
        (64, 128, False),
        (128, 64, False),
    ],
)
def test_shapes_that_fit(inner, columns, fits):
    assert gluon_product.fits(inner, columns) == fits
