"""Triton attention: exact masks and order, bit-equal runs. See also unit/ops/test_attention.py.

Legend: R rows, C columns.
"""

import itertools

import pytest
import torch
from torch import Tensor

from mlbert.ops import dropout, reference
from unit.ops.op_inputs import packed_qkv

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from mlbert.ops.triton import attention_pairs, mask  # noqa: E402
from mlbert.ops.triton.attention import attention, descending_order, kept_bits_shape  # noqa: E402

pytestmark = pytest.mark.usefixtures("use_triton")

KEY = dropout.dropout_key(1, 2, 3, 4)


def output_and_gradient(
    arguments: tuple[Tensor, Tensor, int, Tensor], key: int | Tensor = KEY
) -> tuple[Tensor, Tensor]:
    """Run the kernels forward and backward with dropout 0.1."""
    qkv, cu_seqlens, longest, rows = arguments
    x = qkv.clone().requires_grad_()
    out = attention(x, cu_seqlens, longest, 0.1, key, rows)
    out.backward(qkv[:, 1])
    return out.detach(), x.grad


@triton.jit
def mask_kernel(
    rows, out, key, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr
):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    hashes = mask.row_hash(mask.load_key(key), tl.load(rows + row))
    stays = mask.keep(hashes, first, COLUMNS, THRESHOLD)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], stays.to(tl.int8))


@pytest.mark.parametrize("key", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, KEY])
def test_mask_equals_the_reference(key):
    rows = torch.randint(
        0, 2**31 - 1, (64,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    rows[:4] = torch.tensor([0, 1, 511, 2**31 - 1])
    for first, probability in ((0, 0.1), (64, 0.5), (512, 0.99)):
        out = torch.empty(64, 64, dtype=torch.int8)
        threshold = dropout.dropout_threshold(probability)
        mask_kernel[(1,)](rows, out, mask.key_argument(key), first, 64, 64, threshold)
        want = dropout.keep_mask(key, rows, first + 64, probability)[:, first:]
        assert torch.equal(out.bool(), want)


@triton.jit
def bits_kernel(
    rows, out, key, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr
):
    """Write the mask as int8 [3, R, C]: as forward uses it, then unpacked from its bits,
    at once and in halves.
    """
    row = tl.arange(0, ROWS)
    place = mask.key_places(COLUMNS)
    hashes = mask.row_hash(mask.load_key(key), tl.load(rows + row))
    signs = mask.keep_signs(hashes, first, COLUMNS, THRESHOLD)
    ones = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
    kept, masks = mask.keep_pairs(ones, signs, ROWS, COLUMNS)
    bits = mask.pack_masks(masks, ROWS, COLUMNS)
    here = out + row[:, None] * COLUMNS
    tl.store(here + place[None, :], (kept == 1.0).to(tl.int8))
    here += ROWS * COLUMNS
    tl.store(here + place[None, :], mask.kept_bits(bits, first, ROWS, COLUMNS).to(tl.int8))
    here += ROWS * COLUMNS
    for half in tl.static_range(COLUMNS // 32):
        places = half * 32 + mask.key_places(32)
        tl.store(
            here + places[None, :], mask.kept_bits(bits, first + half * 32, ROWS, 32).to(tl.int8)
        )


@pytest.mark.parametrize("threshold", [1, 26, 128, 129, 255])
def test_packed_bits_equal_the_mask(threshold):
    rows = torch.randint(
        0, 2**31 - 1, (32,), dtype=torch.int32, generator=torch.Generator().manual_seed(3)
    )
    for first in (0, 192):
        out = torch.empty(3, 32, 64, dtype=torch.int8)
        bits_kernel[(1,)](rows, out, mask.key_argument(KEY), first, 32, 64, threshold)
        want = dropout.keep_mask(KEY, rows, first + 64, threshold / 256)[:, first:]
        for name, got in zip(("kept", "bits", "halves"), out.bool(), strict=True):
            assert torch.equal(got, want), name


def test_selectors_of_prmt_follow_the_ptx_manual():
    """Digit i of prmt's last operand selects the source of byte i;
    its fourth bit replicates the sign eight times.

    The interpreted and the compiled mask use the same digits.
    """
    for digits, sources in zip(mask.CHOSEN_BYTES.value, ((0, 0, 1, 1), (2, 2, 3, 3)), strict=True):
        assert tuple((digits >> (4 * i)) & 7 for i in range(4)) == sources
        assert all((digits >> (4 * i)) & 8 for i in range(4))


def test_mask_is_saved_for_backward_only():
    """It has the documented size, and is not saved without gradients or without dropout."""
    qkv, cu_seqlens, longest, rows = packed_qkv([70, 3, 0], 2, 32, tail=5)
    out = attention(qkv.requires_grad_(), cu_seqlens, longest, 0.1, KEY, rows)
    bits = out.grad_fn.saved_tensors[4]
    assert bits.shape == kept_bits_shape(78, 3, 2, 70) == (2, 8 * (4 + 3), 4 * 2)
    assert attention(qkv, cu_seqlens, longest, 0.0, KEY, rows).grad_fn.saved_tensors[4] is None
    with torch.no_grad():
        assert attention(qkv, cu_seqlens, longest, 0.1, KEY, rows).grad_fn is None


def test_longest_sequences_run_first():
    generator = torch.Generator().manual_seed(2)
    for count in (0, 1, 5, 64, 150):
        lengths = torch.randint(0, 9, (count,), generator=generator)
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
        assert torch.equal(
            descending_order(cu_seqlens).long(), lengths.argsort(descending=True, stable=True)
        )


@pytest.mark.parametrize(
    "lengths", [[], [0, 0], [1], [128, 129, 0, 5, 300, 127], [7 * n % 200 for n in range(150)]]
)
def test_pairs_are_the_blocks_of_the_longest_sequences_first(lengths):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    found = attention_pairs.pairs_of(bounds, sum(lengths) + 9, 128)
    order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    wanted = [
        [int(bounds[sequence]), lengths[sequence], first, sequence]
        for sequence in order
        for first in range(0, lengths[sequence], 128)
    ]
    count = int(found[0, 0])
    assert found[1 : 1 + count].tolist() == wanted
    assert len(found) > count


def test_runs_are_bit_equal_also_with_a_key_on_the_device():
    qkv, *rest = packed_qkv([64, 1, 30], 2, 32)
    key = 0xF1234567
    on_device = torch.tensor([mask.key_argument(key)], dtype=torch.int32)
    first, *others = (
        output_and_gradient((qkv.bfloat16(), *rest), key=k) for k in (key, key, on_device)
    )
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_max_seqlen_can_be_larger_than_the_longest_sequence():
    qkv, cu_seqlens, longest, rows = packed_qkv([40, 3], 1, 32)
    results = [
        output_and_gradient((qkv.bfloat16(), cu_seqlens, bound, rows)) for bound in (longest, 512)
    ]
    assert all(map(torch.equal, *results))


def test_other_head_sizes_and_float64_equal_the_reference():
    for head_size, dtype in ((12, torch.float32), (32, torch.float64)):
        qkv, cu_seqlens, longest, rows = packed_qkv([5, 9], 2, head_size)
        qkv = qkv.to(dtype)
        found = attention(qkv, cu_seqlens, longest, 0.1, KEY, rows)
        expected = reference.attention(qkv, cu_seqlens, longest, 0.1, KEY, rows)
        assert torch.equal(found, expected)


def test_invalid_arguments_raise():
    qkv, cu_seqlens, longest, _ = packed_qkv([5, 9], 2, 32)
    with pytest.raises(AssertionError, match="needs rows"):
        attention(qkv, cu_seqlens, longest, 0.1, KEY, None)
    with pytest.raises(AssertionError, match="int64"):
        attention(qkv, cu_seqlens.long(), longest, 0.0, KEY, None)
    with pytest.raises(AssertionError, match="slopes"):
        attention(qkv, cu_seqlens, longest, 0.0, KEY, None, torch.ones(3))
