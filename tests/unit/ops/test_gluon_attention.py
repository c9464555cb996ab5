"""Attention in Gluon: its source in a model of the GPU's barriers, and the order of its work."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime.jit import JITFunction

from mlbert.ops import dropout, reference
from mlbert.ops.triton import (
    attention_pairs,
    gluon_attention,
    gluon_attention_forward,
    gluon_key_value_gradient,
    gluon_query_gradient,
)
from mlbert.ops.triton.attention import kept_bits_shape
from unit.ops.gluon_model import ModelError, Pointer, run_kernel

HEADS = 2
SHARED_BYTES = 227 << 10  # of a block on Hopper
QUERIES = gluon_attention_forward.CONSUMERS * gluon_attention_forward.ROWS
KEY = dropout.dropout_key(1, 2, 3, 4)
THRESHOLD = 26
TAIL = 70  # tokens after the last sequence
# Shorter and longer than a block and a pair, and exact multiples of them.
STAGES = 3  # fewer than on a GPU: the ring is full more often
LENGTHS = (64, 0, 300, 1, 128, 129, 65)
SEEDS = range(20)


def pairs_of(lengths: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return what `attention_pairs.pairs_of` returns after its first row."""
    starts = [0, *itertools.accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    return [
        (starts[sequence], lengths[sequence], first, sequence)
        for sequence in order
        for first in range(0, lengths[sequence], QUERIES)
    ]


class Problem:
    """Tensors of an attention over packed sequences, and its results."""

    def __init__(self, lengths: tuple[int, ...], threshold: int, window: int | None) -> None:
        tokens = sum(lengths) + TAIL
        generator = torch.Generator().manual_seed(tokens)
        head_size = gluon_attention_forward.HEAD_SIZE
        self.lengths = lengths
        self.threshold = threshold
        self.window = window
        self.qkv = torch.randn(tokens, 3, HEADS, head_size, generator=generator).bfloat16()
        self.bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        self.rows = torch.randperm(tokens, generator=generator).int() + 1000
        self.out = torch.full((tokens, HEADS, head_size), torch.nan).bfloat16()
        self.log_sums = torch.full((HEADS, tokens), torch.nan)
        self.bits: Tensor | None = None
        if threshold:
            shape = kept_bits_shape(tokens, len(lengths), HEADS, max(lengths))
            self.bits = torch.full(shape, -1, dtype=torch.int32)

    def run(self, **how: Any) -> int:
        """Run forward in the model, and return the bytes of shared memory."""
        own = [Pointer(self.rows), KEY, self._pointer("out"), self._pointer("log_sums")]
        arguments = [*self._inputs(), *own, self._pointer("bits"), *self._settings()]
        return run_kernel(gluon_attention_forward.gluon_attention_kernel, arguments, **how)

    def run_backward(self, left_out: tuple[str, str, str] | None = None, **how: Any) -> list[int]:
        """Run backward in the model, and return the bytes of shared memory of its kernels.

        ``left_out``: a kernel, and `run_kernel`'s.
        """
        generator = torch.Generator().manual_seed(5)
        self.d_out = torch.randn(self.out.shape, generator=generator).bfloat16()
        self.d_qkv = torch.full(self.qkv.shape, torch.nan).bfloat16()
        self.delta = torch.full(self.log_sums.shape, torch.nan)
        rest = [self._pointer(name) for name in ("d_out", "log_sums", "delta", "d_qkv")]
        rest += self._settings()
        bits = self._pointer("bits")
        out = self._pointer("out")
        found = []
        for kernel, own in (
            (gluon_query_gradient.gluon_query_gradient_kernel, [bits, out]),
            (gluon_key_value_gradient.gluon_key_value_gradient_kernel, [bits]),
        ):
            is_named = left_out is not None and left_out[0] in kernel.fn.__name__
            line = left_out[1:] if is_named else None
            found.append(run_kernel(kernel, [*self._inputs(), *own, *rest], left_out=line, **how))
        return found

    def _pointer(self, name: str) -> Pointer | None:
        tensor = getattr(self, name)
        return None if tensor is None else Pointer(tensor.view(-1))

    def table(self) -> Tensor:
        """Return what `attention_pairs.pairs_of` returns."""
        pairs = pairs_of(self.lengths)
        return torch.tensor([(len(pairs), 0, 0, 0), *pairs], dtype=torch.int32)

    def _inputs(self) -> list[Pointer]:
        return [Pointer(tensor.flatten()) for tensor in (self.qkv, self.bounds, self.table())]

    def _settings(self) -> list[Any]:
        return [
            self.qkv.shape[0],
            len(self.lengths),
            -(-max(self.lengths) // 64),
            HEADS,
            gluon_attention_forward.HEAD_SIZE**-0.5,
            self.threshold,
            self.window,
            STAGES,
            gluon_attention_forward.ROWS,
            gluon_attention_forward.KEYS,
            gluon_attention_forward.HEAD_SIZE,
        ]

    def gradients_differ(self) -> list[str]:
        """Return the gradients that differ from the reference's."""
        qkv = self.qkv.float().requires_grad_()
        self.reference(qkv).backward(self.d_out.float())
        assert qkv.grad is not None
        found = []
        for part, name in enumerate(("queries", "keys", "values")):
            wanted = qkv.grad[:, part]
            # Weights and the gradients of scores are rounded to 8 bits.
            if not (self.d_qkv[:, part] - wanted).norm() <= 6e-3 * wanted.norm():
                found.append(f"gradient of {name}")
        end = sum(self.lengths)
        delta = (self.d_out.float() * self.out.float()).sum(2).t() * ((256 - self.threshold) / 256)
        if not torch.allclose(self.delta[:, :end], delta[:, :end], atol=1e-4):
            found.append("delta")
        return found

    def reference(self, qkv: Tensor) -> Tensor:
        return reference.attention(
            qkv,
            self.bounds,
            max(self.lengths),
            self.threshold / 256,
            KEY,
            self.rows,
            window=self.window,
        )

    def differences(self) -> list[str]:
        """Return the results that differ from the reference's."""
        found = []
        wanted = self.reference(self.qkv.float())
        # Weights are rounded to 8 bits.
        if not (self.out - wanted).norm() <= 4e-3 * wanted.norm():
            found.append("out")
        for sequence, (start, stop) in enumerate(itertools.pairwise(self.bounds.tolist())):
            if start == stop:
                continue
            wanted = self._log_sums(start, stop)
            if not torch.allclose(self.log_sums[:, start:stop], wanted, atol=1e-4, rtol=0):
                found.append(f"sums of sequence {sequence}")
            if self.bits is not None and not self._bits_agree(sequence, start, stop):
                found.append(f"bits of sequence {sequence}")
        return found

    def _log_sums(self, start: int, stop: int) -> Tensor:
        """Return log2 of the sums of exponentials, float32 [N, L]."""
        q, k, _ = self.qkv[start:stop].float().permute(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2) * gluon_attention_forward.HEAD_SIZE**-0.5
        place = torch.arange(stop - start)
        if self.window is not None:
            is_far = (place[:, None] - place).abs() > self.window
            scores = scores.masked_fill(is_far, -torch.inf)
        return scores.logsumexp(2) * torch.tensor(2.0).log().reciprocal()

    def _bits_agree(self, sequence: int, start: int, stop: int) -> bool:
        """Compare bits with the mask, where both a query and a key that it sees exist.

        The place of a bit is in `mask.pack_masks`, that of a sequence in
        `attention_forward.bits_start`.
        """
        assert self.bits is not None
        length = stop - start
        rows = self.rows[start:stop]
        kept = dropout.attention_keep_mask(KEY, rows, HEADS, length, self.threshold / 256)
        row = torch.arange(length)[:, None]
        key = torch.arange(length)
        number = (start // 16 + sequence) * 8 + row // 16 * 8 + row % 8
        column = key // 64 * 4 + key % 16 // 4
        bit = 16 * (row // 8 % 2) + 8 * (key % 2) + 2 * (key // 16 % 4) + key // 2 % 2
        found = self.bits[:, number, column] >> bit & 1
        if self.window is None:
            return torch.equal(found.bool(), kept)
        is_seen = (row - key).abs() <= self.window
        return torch.equal(found.bool() & is_seen, kept & is_seen)


def differences(threshold: int, window: int | None, **how: Any) -> list[str]:
    problem = Problem(LENGTHS, threshold, window)
    problem.run(**how)
    return problem.differences()


@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize("threshold", [0, THRESHOLD])
@pytest.mark.parametrize("programs", [1, 3])
def test_kernel_equals_reference_in_any_order(threshold, window, programs):
    problem = Problem(LENGTHS, threshold, window)
    problem.run(programs=programs, seed=1)
    assert problem.differences() == []
    problem.run_backward(programs=programs, seed=2)
    assert problem.gradients_differ() == []


@pytest.mark.parametrize(("threshold", "window"), [(THRESHOLD, None), (0, 40)])
def test_op_runs_the_kernels_forward_and_backward(threshold, window, monkeypatch):
    """The op starts them with what they need."""
    started = []

    def run(self, *given, grid, warmup, num_warps):
        assert not warmup
        started.append(self.fn.__name__)
        tensors = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in given]
        run_kernel(self, tensors, grid[0], seed=1)

    problem = Problem(LENGTHS, threshold, window)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(gluon_attention, "pairs_of", lambda *_: problem.table())
    qkv = problem.qkv.requires_grad_()
    order = torch.arange(len(LENGTHS), dtype=torch.int32)
    out = gluon_attention.attention(
        qkv,
        problem.bounds,
        max(LENGTHS),
        threshold / 256,
        KEY,
        problem.rows,
        window=window,
        order=order,
    )
    out.backward(out.detach())
    wide = problem.qkv.detach().float().requires_grad_()
    wanted = problem.reference(wide)
    wanted.backward(out.detach().float())
    assert wide.grad is not None
    assert qkv.grad is not None
    assert (out - wanted).norm() <= 4e-3 * wanted.norm()
    assert (qkv.grad - wide.grad).norm() <= 6e-3 * wide.grad.norm()
    assert len(started) == 3


def test_program_without_work_ends():
    problem = Problem((0, 5), 0, None)
    problem.run(programs=4, seed=0)
    assert problem.differences() == []


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("produce", "mbarrier.wait(q_empty.index(which), (number & 1) ^ 1)"),
        ("copy_blocks", "mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)"),
        ("copy_blocks", "async_copy.mbarrier_arrive(full.index(slot), increment_count=False)"),
        ("pass_block", "mbarrier.arrive(empty.index(slot), count=1)"),
        ("pass_block", "mbarrier.arrive(turns.index(1 - WHICH), count=1)"),
        ("consume", "mbarrier.wait(q_full.index(WHICH), number & 1)"),
        ("consume", "number += 1"),
        ("consume", "step += own_blocks"),
        ("begin_scores", "mbarrier.wait(full.index(slot), (step // STAGES) & 1)"),
        ("begin_scores", "fence_async_shared()"),
        ("attend_half", "scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))"),
        ("attend_half", "scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))"),
        ("attend_half", "mbarrier.arrive(empty.index(previous), count=1)"),
        ("attend_half", "mbarrier.arrive(empty.index(slot), count=1)"),
        ("attend_half", "result *= rescale[:, None]"),
    ],
)
def test_model_finds_a_missing_line(function, line):
    """Each of these lines is needed: without it there is an order that fails."""
    found = False
    for seed in SEEDS:
        try:
            wrong = differences(0, 40, programs=1, seed=seed, left_out=(function, line))
        except (ModelError, IndexError):
            wrong = ["stopped"]
        found = found or bool(wrong)
        if found:
            break
    assert found


@pytest.mark.parametrize(
    ("kernel", "function", "line"),
    [
        ("query", "produce", "mbarrier.wait(q_empty.index(which), (number & 1) ^ 1)"),
        ("query", "consume", "mbarrier.wait(q_full.index(WHICH), number & 1)"),
        (
            "query",
            "query_gradient_half",
            "scores, d_weights = warpgroup_mma_wait(num_outstanding=1, deps=(scores, d_weights))",
        ),
        ("query", "query_gradient_half", "mbarrier.arrive(empty.index(previous), count=1)"),
        (
            "key",
            "produce",
            "mbarrier.wait(kv_empty.index(place), ((number // PLACES) & 1) ^ 1)",
        ),
        ("key", "produce", "mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)"),
        ("key", "consume", "mbarrier.arrive(kv_empty.index(place), count=1)"),
        (
            "key",
            "key_value_gradient_half",
            "scores, d_weights = warpgroup_mma_wait(num_outstanding=2, deps=(scores, d_weights))",
        ),
        ("key", "key_value_gradient_half", "mbarrier.arrive(empty.index(previous), count=1)"),
    ],
)
def test_model_finds_a_missing_line_of_backward(kernel, function, line):
    problem = Problem(LENGTHS, 0, 40)
    problem.run(programs=1, seed=0)
    found = False
    for seed in SEEDS:
        try:
            problem.run_backward(left_out=(kernel, function, line), programs=1, seed=seed)
            found = bool(problem.gradients_differ())
        except (ModelError, IndexError):
            found = True
        if found:
            break
    assert found


def test_shared_memory_suffices(monkeypatch):
    monkeypatch.setitem(globals(), "STAGES", gluon_attention_forward.STAGES)
    problem = Problem((1,), 0, None)
    for needed in (problem.run(programs=1, seed=0), *problem.run_backward(programs=1, seed=0)):
        # The results of two consumers wait to be stored.
        assert needed + 2 * 64 * 64 * 2 <= SHARED_BYTES


@given(tasks=st.integers(0, 1000), programs=st.integers(1, 160))
def test_every_task_is_done_once(tasks, programs):
    turns = -(-tasks // programs)
    task_of = attention_pairs.task_of.fn
    done = [
        task_of(turn, program, programs) for turn in range(turns) for program in range(programs)
    ]
    assert sorted(task for task in done if task < tasks) == list(range(tasks))
