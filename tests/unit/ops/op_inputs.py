"""Random inputs for the op tests."""

from collections.abc import Callable

import torch
from torch import Tensor

GENERATOR = torch.Generator()  # seeded before each test, see conftest.py


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def randint(high: int, count: int) -> Tensor:
    return torch.randint(high, (count,), generator=GENERATOR)


def dropout_rows(tokens: int) -> Tensor:
    """Return random row numbers for the dropout masks of `tokens` tokens."""
    return torch.randint(0, 2**31 - 1, (tokens,), dtype=torch.int32, generator=GENERATOR)


def feed_forward_inputs(tokens: int, hidden: int, columns: int) -> list[Tensor]:
    """Return x, w1, b1, w2."""
    weights = randn(columns, hidden) * 2 / hidden**0.5, randn(hidden, columns) / columns**0.5
    return [randn(tokens, hidden), weights[0], randn(columns), weights[1]]


def linear_qkv_inputs(tokens: int, hidden: int) -> list[Tensor]:
    """Return x, three weights, three biases."""
    return [
        randn(tokens, hidden),
        *(randn(hidden, hidden) for _ in range(3)),
        *(randn(hidden) for _ in range(3)),
    ]


def packed_qkv(
    lengths: list[int],
    num_heads: int,
    head_size: int,
    tail: int = 0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Return qkv, cu_seqlens, max_seqlen and dropout rows of packed sequences,
    followed by `tail` unused tokens.
    """
    generator = generator or torch.Generator().manual_seed(len(lengths))
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_tokens = int(cu_seqlens[-1]) + tail
    qkv = 1.5 * torch.randn(num_tokens, 3, num_heads, head_size, generator=generator)
    rows = torch.randint(0, 2**31 - 1, (num_tokens,), dtype=torch.int32, generator=generator)
    return qkv, cu_seqlens, max(lengths), rows


def with_float32_slopes(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `attention` with float32 ALiBi slopes, for `check_errors`,
    which casts all its arguments.
    """

    def run(*arguments: object) -> Tensor:
        *rest, slopes = arguments
        return attention(*rest, None if slopes is None else slopes.float())

    return run
