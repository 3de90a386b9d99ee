"""The few things that are asked of a pyarrow array, whatever its type.

pyarrow has no type hints and takes 0.1 s to import: it is imported inside the functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ArrowArray = Any
"""A pyarrow.Array."""


def plain(array: ArrowArray) -> ArrowArray:
    """The array without dictionary coding."""
    import pyarrow.types as kinds

    return array.dictionary_decode() if kinds.is_dictionary(array.type) else array


def distinct(array: ArrowArray) -> tuple[list[Any], np.ndarray]:
    """The distinct values and, for every row, which one it has (one past the last: none)."""
    import pyarrow.compute as pc

    coded = array.dictionary_encode()
    values = coded.dictionary.to_pylist()
    return values, to_numpy(pc.fill_null(coded.indices, len(values)))


def is_text(kind: Any) -> bool:
    """Whether a pyarrow type holds texts."""
    import pyarrow.types as kinds

    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type holds lists."""
    import pyarrow.types as kinds

    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def to_numpy(array: ArrowArray) -> np.ndarray:
    """The values; an array without nulls of a plain type is not copied."""
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
