"""Arrays of a batch whose memory is used again by a later batch of about the same size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from runtime.embedding.native.extension import native

_MAKERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "float32": native.empty_float32,
    "float64": native.empty_float64,
    "int64": native.empty_int64,
    "int32": native.empty_int32,
}


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """As `numpy.empty`; the memory returns to a pool when the last view of the array is gone."""
    columns = shape[-1] if len(shape) > 1 else 1
    rows = int(np.prod(shape[:-1])) if len(shape) > 1 else shape[0]
    array: np.ndarray = _MAKERS[dtype](rows, columns).reshape(shape)
    return array
