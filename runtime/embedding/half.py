"""Numbers that travel as float16, with a scale for each row (paper, section 4.2.3).

A row's scale is a power of two, so that the cast alone rounds: to 11 significant bits, and to a
2**39th of the row's largest number or coarser where a number is that small beside it. What was
rounded once travels exactly from then on. The kernels round as numpy casts, to the bit.
"""

from __future__ import annotations

import numpy as np

from runtime.embedding.native.extension import native
from runtime.embedding.native.plan import empty


def encoded(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """uint8 [2 R + 2 n]: R scales and the n numbers of R rows, of ``sizes`` numbers each, >= 1."""
    result = np.empty(len(sizes) + len(rows), np.uint16)
    scales, halves = result[: len(sizes)].view(np.int16), result[len(sizes) :]
    native.to_halves(rows, sizes, scales, halves)
    return result.view(np.uint8)


def decoded(data: np.ndarray, sizes: np.ndarray, dtype: str) -> np.ndarray:
    """The rows again, rounded. ``data`` has 2 bytes for each row and each number."""
    # A message may begin anywhere in memory, numbers of two bytes must not.
    words = np.require(data.view("<u2"), requirements="A")
    scales, halves = words[: len(sizes)].view(np.int16), words[len(sizes) :]
    result = empty((len(halves),), dtype)
    native.from_halves(scales, halves, sizes, result)
    return result


def rounded(rows: np.ndarray, sizes: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Rows as they arrive: what `decoded` makes of `encoded`; ``out`` may be ``rows`` itself."""
    result = empty(rows.shape, rows.dtype) if out is None else out
    native.round_halves(rows, sizes, result)
    return result
