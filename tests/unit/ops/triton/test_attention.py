"""The Triton attention: masks and order bit for bit, error rule on ugly shapes, ALiBi, bit-equal runs, empty tails.

Legend: T tokens, N heads, H head size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlbert.ops import api as ops
from mlbert.ops import dropout, reference
from unit.ops.attention_cases import stream
from unit.ops.conftest import check_errors

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from mlbert.ops.triton import device, mask  # noqa: E402
from mlbert.ops.triton.attention import attention, descending_order, kept_bits_shape  # noqa: E402

pytestmark = pytest.mark.usefixtures("use_triton")

# Blocks are of 128 and 64 tokens in 16-bit types, of 32 in float32.
UGLY = {
    "one token": [1],
    "tiny": [1, 2, 3, 5],
    "around a block": [63, 64, 65],
    "two blocks": [130],
    "many of one token": [1] * 6,
    "empty tail": [20, 33, 0, 0],
    "empty between": [0, 20, 0, 33],
    "nothing": [0, 0],
}
KEY = dropout.dropout_key(1, 2, 3, 4)


def both(
    arguments: tuple[Tensor, Tensor, int, Tensor], *more: object, key: int | Tensor = KEY
) -> tuple[Tensor, Tensor]:
    """Output and gradient of the kernels, dropout 0.1."""
    qkv, cu_seqlens, longest, rows = arguments
    x = qkv.clone().requires_grad_()
    out = attention(x, cu_seqlens, longest, 0.1, key, rows, *more)
    out.backward(qkv[:, 1])
    return out.detach(), x.grad


@triton.jit
def mask_kernel(rows, out, key, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    hashes = mask.row_hash(mask.load_key(key), tl.load(rows + row))
    stays = mask.keep(hashes, first, COLUMNS, THRESHOLD)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], stays.to(tl.int8))


@pytest.mark.parametrize("key", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, KEY])
def test_mask_equals_the_plain_twin_bit_for_bit(key: int) -> None:
    rows = torch.randint(0, 2**31 - 1, (64,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    rows[:4] = torch.tensor([0, 1, 511, 2**31 - 1])
    for first, probability in ((0, 0.1), (64, 0.5), (512, 0.99)):
        out = torch.empty(64, 64, dtype=torch.int8)
        threshold = dropout.dropout_threshold(probability)
        mask_kernel[(1,)](rows, out, mask.key_argument(key), first, 64, 64, threshold)
        want = dropout.keep_mask(key, rows, first + 64, probability)[:, first:]
        assert torch.equal(out.bool(), want)


@triton.jit
def bits_kernel(rows, out, key, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr):
    """What backward reads of the mask that forward packed: int8 [2, R, C], of all keys and of halves of 64."""
    row, place = tl.arange(0, ROWS), mask.key_places(COLUMNS)
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
        tl.store(here + places[None, :], mask.kept_bits(bits, first + half * 32, ROWS, 32).to(tl.int8))


@pytest.mark.parametrize("threshold", [1, 26, 128, 129, 255])
def test_stored_bits_are_the_mask(threshold: int) -> None:
    rows = torch.randint(0, 2**31 - 1, (32,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    for first in (0, 192):
        out = torch.empty(3, 32, 64, dtype=torch.int8)
        bits_kernel[(1,)](rows, out, mask.key_argument(KEY), first, 32, 64, threshold)
        want = dropout.keep_mask(KEY, rows, first + 64, threshold / 256)[:, first:]
        for name, got in zip(("kept", "bits", "halves"), out.bool(), strict=True):
            assert torch.equal(got, want), name


def test_bytes_of_the_mask_are_chosen_as_the_instruction_does() -> None:
    """By prmt's description (PTX ISA): digit i of the last operand chooses byte i's source; its fourth bit copies the
    sign eight times. The interpreter's way and the assembly's share the digits."""
    for digits, sources in zip(mask.CHOSEN_BYTES.value, ((0, 0, 1, 1), (2, 2, 3, 3)), strict=True):
        assert tuple((digits >> (4 * i)) & 7 for i in range(4)) == sources
        assert all((digits >> (4 * i)) & 8 for i in range(4))


def test_the_mask_is_kept_for_a_backward_pass_only() -> None:
    """Its size is the documented one; without gradients, or without dropout, there is none."""
    qkv, cu_seqlens, longest, rows = stream([70, 3, 0], 2, 32, tail=5)
    out = attention(qkv.requires_grad_(), cu_seqlens, longest, 0.1, KEY, rows)
    bits = out.grad_fn.saved_tensors[4]
    assert bits.shape == kept_bits_shape(78, 3, 2, 70) == (2, 8 * (4 + 3), 4 * 2)
    assert attention(qkv, cu_seqlens, longest, 0.0, KEY, rows).grad_fn.saved_tensors[4] is None
    with torch.no_grad():
        assert attention(qkv, cu_seqlens, longest, 0.1, KEY, rows).grad_fn is None


def test_attention_uses_the_mask_of_its_head() -> None:
    """With equal scores and one-hot values the output is the mask itself, a window of H keys at a time."""
    length, num_heads, head_size = 70, 2, 32
    _, cu_seqlens, _, rows = stream([17, length], num_heads, head_size)
    want = dropout.attention_keep_mask(KEY, rows[17:], num_heads, length, 0.1)
    for first in range(0, length, head_size):
        qkv = torch.zeros(17 + length, 3, num_heads, head_size, dtype=torch.bfloat16)
        columns = torch.arange(first, min(first + head_size, length))
        qkv[17 + columns, 2, :, columns - first] = 1.0
        out = attention(qkv, cu_seqlens, length, 0.1, KEY, rows)[17:]
        assert torch.equal(out[:, :, : len(columns)].transpose(0, 1) > 0, want[:, :, columns])


def test_longest_sequences_go_first() -> None:
    generator = torch.Generator().manual_seed(2)
    for count in (0, 1, 5, 64, 150):
        lengths = torch.randint(0, 9, (count,), generator=generator)
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
        assert torch.equal(descending_order(cu_seqlens).long(), lengths.argsort(descending=True, stable=True))


def check(
    lengths: list[int],
    num_heads: int,
    head_size: int,
    dtype: torch.dtype,
    probability: float,
    slopes: Tensor | None = None,
) -> None:
    qkv, bounds, longest, rows = stream(lengths, num_heads, head_size)
    check_errors("attention", [qkv, bounds, longest, probability, KEY, rows, slopes], dtype, [0], kernels)


def kernels(*arguments: object) -> Tensor:
    """Slopes are float32 whatever the activations are."""
    *rest, slopes = arguments
    return attention(*rest, None if slopes is None else slopes.float())


@pytest.mark.parametrize(
    ("shape", "probability"),
    [*((shape, 0.1) for shape in UGLY), ("tiny", 0.0), pytest.param("two blocks", 0.0, marks=pytest.mark.slow)],
)
def test_error_on_ugly_lengths(shape: str, probability: float) -> None:
    check(UGLY[shape], 2, 64, torch.bfloat16, probability)


def test_error_with_the_blocks_of_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose backward pass takes 32 keys at a time."""
    monkeypatch.setattr(device, "assumed_capability", 80)
    check([65, 130], 1, 64, torch.bfloat16, 0.1)


@pytest.mark.parametrize("shape", ["one token", "tiny", "empty between", "nothing"])
def test_error_in_float32(shape: str) -> None:
    check(UGLY[shape], 1, 64, torch.float32, 0.1)


@pytest.mark.slow
def test_error_above_512() -> None:
    check([513], 1, 32, torch.bfloat16, 0.1)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_size"),
    [
        (torch.bfloat16, 3, 32),
        (torch.bfloat16, 1, 128),
        (torch.float16, 1, 64),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((torch.float16, 3, 32), (torch.float16, 1, 128), (torch.float32, 1, 128))
        ),
    ],
)
def test_error_on_head_sizes(dtype: torch.dtype, num_heads: int, head_size: int) -> None:
    check([1, 70], num_heads, head_size, dtype, 0.1)


@pytest.mark.parametrize(("dtype", "longest"), [(torch.float32, 40), (torch.bfloat16, 70)])
def test_error_with_alibi(dtype: torch.dtype, longest: int) -> None:
    check([1, longest], 2, 32, dtype, 0.1, torch.tensor([0.5, 0.0625]))


@pytest.mark.parametrize(("lengths", "tail"), [([7, 5], 3), ([7, 0, 0], 150), ([0, 0], 9)])
def test_tokens_behind_the_last_sequence_give_zero(lengths: list[int], tail: int) -> None:
    """The tail may be longer than the grid's blocks: each zeroes several."""
    arguments = stream(lengths, 2, 32, tail)
    out, gradient = both((arguments[0].bfloat16(), *arguments[1:]))
    used = sum(lengths)
    assert not out[used:].any()
    assert not gradient[used:].any()
    assert used == 0 or bool(out[:used].any() and gradient[:used].any())


def test_runs_are_bit_equal_and_keys_may_be_on_the_device() -> None:
    qkv, *rest = stream([64, 1, 30], 2, 32)
    key = 0xF1234567
    on_device = torch.tensor([mask.key_argument(key)], dtype=torch.int32)
    first, again, by_tensor = (both((qkv.bfloat16(), *rest), key=k) for k in (key, key, on_device))
    for other in (again, by_tensor):
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


def test_max_seqlen_may_be_larger_than_the_longest() -> None:
    qkv, cu_seqlens, longest, rows = stream([40, 3], 1, 32)
    results = [both((qkv.bfloat16(), cu_seqlens, bound, rows)) for bound in (longest, 512)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_other_head_sizes_and_float64_run_plain() -> None:
    for head_size, dtype in ((12, torch.float32), (32, torch.float64)):
        qkv, cu_seqlens, longest, rows = stream([5, 9], 2, head_size)
        arguments = (qkv.to(dtype), cu_seqlens, longest, 0.1, KEY, rows)
        assert torch.equal(attention(*arguments), reference.attention(*arguments))


def test_wrong_arguments_are_refused() -> None:
    qkv, cu_seqlens, longest, _ = stream([5, 9], 2, 32)
    with pytest.raises(AssertionError, match="needs rows"):
        attention(qkv, cu_seqlens, longest, 0.1, KEY, None)
    with pytest.raises(AssertionError, match="int64"):
        attention(qkv, cu_seqlens.long(), longest, 0.0, KEY, None)
    with pytest.raises(AssertionError, match="slopes"):
        attention(qkv, cu_seqlens, longest, 0.0, KEY, None, torch.ones(3))


def test_public_op_runs_the_kernels_where_triton_is_chosen() -> None:
    qkv, cu_seqlens, longest, rows = stream([5, 9], 2, 32)
    try:
        assert ops.select("triton")["attention"] == "triton"
        assert "attention triton" in ops.describe()
        chosen = ops.attention(qkv, cu_seqlens, longest, 0.1, KEY, rows)
    finally:
        ops.select("auto")
    assert torch.equal(chosen, attention(qkv, cu_seqlens, longest, 0.1, KEY, rows))
