"""The compiled kernels, or one clear sentence about how to get them; and arrays from their pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from runtime.embedding.native import _kernels as native
except ImportError as error:
    raise ImportError(
        f"the native embedding engine is not built for this Python ({error}): run"
        " `pip install -e .` in the repository (it needs a C++20 compiler such as g++ >= 11)"
    ) from error

__all__ = ["empty", "native"]

_BY_NAME: dict[str, Callable[[int, int], np.ndarray]] = {
    "float32": native.empty_float32,
    "float64": native.empty_float64,
    "int64": native.empty_int64,
}
# Asking a dtype for its name takes numpy longer than making the array.
_MAKERS = _BY_NAME | {np.dtype(name): maker for name, maker in _BY_NAME.items()}


def empty(shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> np.ndarray:
    """As `numpy.empty`; the memory returns to a pool when the last view of the array is gone."""
    rows, columns = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (shape[0], 1)
    array: np.ndarray = _MAKERS[dtype](rows, columns).reshape(shape)
    return array
