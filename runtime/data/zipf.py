"""Popularity: a few values are seen all the time, most of them hardly ever."""

from __future__ import annotations

import numpy as np

from runtime.data.ids import VALUE_BITS

_MASK = np.uint64(2**VALUE_BITS - 1)
_HALF = np.uint64(VALUE_BITS // 2)


def zipf_ranks(
    generator: np.random.Generator, size: int, values: int, exponent: float
) -> np.ndarray:
    """int64 [size] ranks, 0 (the most popular) to values - 1, with P(k) about (k + 1)**-exponent.

    By inversion of the continuous power law on [1, values + 1), cut to whole numbers: no table, so
    the cost does not depend on ``values``, which may be 10**13. exponent 0 is uniform.
    """
    u = generator.random(size)
    top = float(values + 1)
    if exponent == 1.0:
        x = np.exp(u * np.log(top))
    else:
        power = 1.0 - exponent
        x = ((top**power - 1.0) * u + 1.0) ** (1.0 / power)
    ranks: np.ndarray = np.clip(x.astype(np.int64) - 1, 0, values - 1)
    return ranks


def scatter56(ranks: np.ndarray) -> np.ndarray:
    """uint64 [N]: a bijection of the 56-bit numbers that leaves no trace of the order.

    Different ranks never collide, so the number of distinct ids is exact; two rounds of odd
    multiplication and xor-shift, as in splitmix64.
    """
    z = ranks.astype(np.uint64)
    for odd in (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)):
        z = (z * odd) & _MASK
        z ^= z >> _HALF
    return z
