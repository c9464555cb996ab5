"""Random and evenly spread orders of n items without memory:
each position is computed, not looked up.

`Permutation` is a Feistel network, a bijection of b-bit numbers: the bits are split into a left and
a right half, and in turn each half is XORed with a keyed mix of the other. The b bits cover fewer
than 2n numbers (at least 64). A result of n or more is encrypted again until it is below n ("cycle
walking"), which keeps the map a bijection of [0, n).

The mix of a half x with round key k is the upper bits of ``y * C2`` with ``y = z ^ (z >> 32)``,
``z = (x + k) * C1``, all modulo 2**64; C1 and C2 are odd, their bits come from the fractions of the
golden ratio and of sqrt(3). Eight rounds are two more than the six after which random Feistel
networks are known to be hard to distinguish from a random permutation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 8
_MIN_BITS = 6  # with fewer, the halves are too small to mix
_C1 = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
_C2 = np.uint64(0xBB67AE8584CAA73B)  # fraction of sqrt(3)
_HALF = np.uint64(32)


class Permutation:
    """A keyed bijection of [0, n), the same on every machine.

    Args:
        n: from 0 to 2**62.
        key: non-negative integers that select the order, for example (seed, epoch).
    """

    def __init__(self, n: int, key: int | Sequence[int]) -> None:
        if not 0 <= n <= 2**62:
            raise ValueError(f"a permutation of {n} numbers is out of range")
        self.n = n
        bits = max(_MIN_BITS, (n - 1).bit_length()) if n else _MIN_BITS
        self._left_bits = bits // 2
        self._right_bits = bits - bits // 2
        words = [key] if isinstance(key, int) else list(key)
        # Prefixed by their number, because SeedSequence treats (1, 0) like (1,).
        self._keys = np.random.SeedSequence([len(words), *words]).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the images of ``positions`` (integers from 0 to n-1, any shape),
        int64 of the same shape.
        """
        values = np.asarray(positions).astype(np.uint64)
        assert values.size == 0 or int(values.max()) < self.n, "position outside the permutation"
        result = self._encrypt(values.reshape(-1))
        # For n >= 33 fewer than half fall outside,
        # so that each round has less than half the work of the previous one.
        outside = np.flatnonzero(result >= np.uint64(self.n))
        while len(outside):
            again = self._encrypt(result[outside])
            result[outside] = again
            outside = outside[again >= np.uint64(self.n)]
        return result.astype(np.int64).reshape(values.shape)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        """Apply the Feistel network to uint64 [k] values of b bits."""
        right_bits = np.uint64(self._right_bits)
        left = values >> right_bits
        right = values & ((np.uint64(1) << right_bits) - np.uint64(1))
        for number, key in enumerate(self._keys):
            if number % 2:
                right ^= _mix(left, key, self._right_bits)
            else:
                left ^= _mix(right, key, self._left_bits)
        return (left << right_bits) | right


def _mix(values: np.ndarray, key: np.uint64, bits: int) -> np.ndarray:
    """Return ``bits`` (1 or more) well-mixed bits of each of ``values``, uint64."""
    mixed = values + key
    mixed *= _C1
    mixed ^= mixed >> _HALF
    mixed *= _C2
    mixed >>= np.uint64(64 - bits)
    return mixed


def even_spread(n: int, positions: np.ndarray) -> np.ndarray:
    """Return the images (int64) of ``positions`` (int64, 0 to n-1, n below 2**31) in an order of
    [0, n) in which every run of positions visits all parts of the range in proportion.

    Position j goes to ``j * s mod n``; the stride s is the first number from n / golden ratio
    upwards that has no common factor with n.

    A run of k positions visits an interval [0, b) at most 2 d times more or less often than its
    share k b / n, where d is the number of terms when k is written, greedily, as a sum of the
    denominators of the convergents of the continued fraction of s / n:

    * Let p / q be such a convergent. Any q consecutive positions fall into different ones of q
      equal arcs of the circle [0, n): position j is at j s / n of the circle, less than 1 / q from
      j p / q and on the same side for all j, since abs(s / n - p / q) < 1 / q**2; and the j p / q
      are the borders of the arcs. The interval consists of complete arcs, visited once each, and
      parts of two arcs, each visited at most once: hence the 2 for q positions.
    * The run of k positions is cut into d runs of such lengths q.
    * Let c be the number of steps upwards to s. Fibonacci numbers up to about 0.3 sqrt(n / (1 + 2
      c)) are such denominators, because s / n is that close to the golden ratio (Legendre's
      criterion). For k up to the largest of them, d is at most 1 + log(k) / (2 log(golden ratio));
      every further run of that length adds at most one.
    """
    stride = max(1, round(n * 0.6180339887498949))
    while n and np.gcd(stride, n) != 1:
        stride += 1
    return np.asarray(positions, np.int64) * stride % max(n, 1)
