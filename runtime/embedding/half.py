"""Numbers that travel as float16, with a scale for each row (paper, section 4.2.3).

A row's scale is a power of two, so that the cast alone rounds: to 11 significant bits, and to a
2**39th of the row's largest number or coarser where a number is that small beside it. What was
rounded once travels exactly from then on.
"""

from __future__ import annotations

import numpy as np

_TOP = 15
"""Rows are scaled to below 2**15; the largest float16 is nearly 2**16."""
_LEAST = -100
"""Exponent of the smallest scale: that of a row of zeros, too."""
_ROUNDS_UP = 1 - 2.0**-12
"""A significand, in [0.5, 1), from here on is rounded to 1."""


def encoded(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """uint8 [2 R + 2 n]: R scales and the n numbers of R rows, of ``sizes`` numbers each, >= 1."""
    scales, halves = _halved(rows, sizes)
    return np.concatenate([scales.astype("<i2").view(np.uint8), halves.view(np.uint8)])


def decoded(data: np.ndarray, sizes: np.ndarray, dtype: str) -> np.ndarray:
    """The rows again, rounded. ``data`` has 2 bytes for each row and each number."""
    scales = data[: 2 * len(sizes)].view("<i2")
    return _whole(scales, data[2 * len(sizes) :].view("<f2"), sizes, dtype)


def rounded(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Rows as they arrive: what `decoded` makes of `encoded`, in one go."""
    return _whole(*_halved(rows, sizes), sizes, rows.dtype.name)


def _halved(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.float16)
    largest = np.maximum.reduceat(np.abs(rows), sizes.cumsum() - sizes)
    significand, scales = np.frexp(largest)
    scales = np.maximum(scales + (significand >= _ROUNDS_UP), _LEAST)
    with np.errstate(invalid="ignore", over="ignore"):  # of what is not finite
        return scales, (rows * _factors(_TOP - scales, sizes, rows.dtype.name)).astype("<f2")


def _whole(scales: np.ndarray, halves: np.ndarray, sizes: np.ndarray, dtype: str) -> np.ndarray:
    whole: np.ndarray = halves.astype(dtype)
    whole *= _factors(scales.astype(np.int64) - _TOP, sizes, dtype)
    return whole


def _factors(exponents: np.ndarray, sizes: np.ndarray, dtype: str) -> np.ndarray:
    """Two to the power of these, for each number of the rows."""
    return np.repeat(np.ldexp(np.ones(1, dtype), exponents), sizes)
