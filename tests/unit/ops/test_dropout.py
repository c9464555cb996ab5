"""The counter-based dropout mask: keep rate, independence, and scalar against tensor keys."""

import itertools

import pytest
import torch

from mlbert.ops import dropout
from mlbert.ops.dropout import attention_keep_mask, dropout_key, dropout_threshold, keep_mask

KEY = dropout_key(seed=1, step=2, layer=3, site=4)


def keeps(key: int, row: int, column: int, threshold: int) -> bool:
    row_hash = dropout.mix32(dropout.mix32(row + dropout.GOLDEN) ^ key)
    word = dropout.mix32(row_hash ^ ((column // 4 * dropout.GOLDEN) & 0xFFFFFFFF))
    return (word >> (8 * (column % 4))) & 0xFF >= threshold


def test_mask_equals_its_scalar_definition():
    rows = torch.tensor([0, 1, 511, 70000, 2**31 - 1], dtype=torch.int32)
    mask = keep_mask(KEY, rows, 37, 0.3)
    for (i, row), column in itertools.product(enumerate(rows.tolist()), range(37)):
        assert mask[i, column] == keeps(KEY, row, column, 77)


def test_attention_heads_have_their_own_keys():
    rows = torch.arange(50, dtype=torch.int32)
    mask = attention_keep_mask(KEY, rows, 3, 61, 0.1)
    for head in range(3):
        assert torch.equal(mask[head], keep_mask(dropout.head_key(KEY, head), rows, 61, 0.1))
    assert not torch.equal(mask[0], mask[1])


@pytest.mark.parametrize(
    ("probability", "threshold"), [(0.0, 0), (0.1, 26), (0.5, 128), (0.15, 38), (0.99, 253)]
)
def test_keep_rate(probability, threshold):
    assert dropout_threshold(probability) == threshold
    rate = 1 - threshold / 256
    assert dropout.dropout_scale(threshold) * rate == pytest.approx(1.0, abs=1e-15)
    kept = keep_mask(KEY, torch.arange(2048, dtype=torch.int32), 512, probability).double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(kept.mean().item() - rate) <= 5 * deviation / 1024
    assert (kept.mean(0) - rate).abs().max() <= 5 * deviation / 2048**0.5
    assert (kept.mean(1) - rate).abs().max() <= 5 * deviation / 512**0.5


def test_neighboring_masks_are_uncorrelated():
    """Columns in one word and in neighboring words, rows, and keys that differ in one part."""
    rows = torch.arange(4096, dtype=torch.int32)
    base = keep_mask(KEY, rows, 256, 0.5).double() - 0.5
    noise = 5 * 0.25 / base.numel() ** 0.5
    others = {
        f"column + {shift}": (base[:, :-shift], base[:, shift:]) for shift in (1, 2, 3, 4, 8, 64)
    } | {f"row + {shift}": (base[:-shift], base[shift:]) for shift in (1, 2, 16, 512)}
    for step, layer, site in ((3, 3, 4), (2, 4, 4), (2, 3, 5), (3, 2, 4)):
        other = keep_mask(dropout_key(1, step, layer, site), rows, 256, 0.5).double() - 0.5
        others[f"key of {step, layer, site}"] = (base, other)
    for name, (a, b) in others.items():
        assert abs((a * b).mean().item()) < 1.1 * noise, name


def test_keys_are_distinct():
    keys = {
        dropout_key(seed, step, layer, site)
        for seed, step, layer, site in itertools.product(
            (0, 1, 2**32, 2**40 + 1), (0, 1, 7), range(4), range(4)
        )
    }
    assert len(keys) == 4 * 3 * 4 * 4
    assert all(0 <= key < 2**32 for key in keys)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, 0.999])
def test_invalid_probability_is_an_error(probability):
    with pytest.raises(ValueError, match="not in"):
        dropout_threshold(probability)


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_table_contains_the_bits_of_each_key(seed):
    table = dropout.dropout_keys(seed, 12, 5, 4)
    assert table.dtype == torch.int32
    for layer, site in itertools.product(range(5), range(4)):
        assert int(table[layer, site]) & dropout.MASK32 == dropout_key(seed, 12, layer, site)


@pytest.mark.parametrize("key", [0, 5, 2**31, 2**32 - 1])
def test_key_in_a_tensor_gives_the_same_masks(key):
    rows = torch.tensor([0, 3, 2**31 - 1], dtype=torch.int32)
    on_device = torch.tensor(key - 2**32 if key >= 2**31 else key, dtype=torch.int32)
    assert torch.equal(keep_mask(on_device, rows, 11, 0.3), keep_mask(key, rows, 11, 0.3))
    masks = (attention_keep_mask(k, rows, 3, 11, 0.3) for k in (on_device, key))
    assert torch.equal(*masks)
