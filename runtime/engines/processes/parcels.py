"""Arrays that are asked for rarely, in a memory file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.engines.processes.messages import BadMessageError
from runtime.engines.processes.segments import Places, Segment

MOST_ARRAYS = 4096
_KINDS = "uif"


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], Segment]:
    """The arrays in a fresh segment, which others can only read, and where they lie in it."""
    places = Places()
    index: dict[str, tuple[int, list[int], str]] = {}
    for name, array in arrays.items():
        index[name] = places.take(array.nbytes), list(array.shape), array.dtype.str
    segment = Segment.make(max(1, places.size), shown=True)
    for name, array in arrays.items():
        at, shape, dtype = index[name]
        segment.array(at, tuple(shape), dtype)[...] = array
    return {"bytes": segment.size, "arrays": index}, segment


def unpack_arrays(document: Mapping[str, Any], descriptor: int) -> dict[str, np.ndarray]:
    """Copies of the arrays; takes the descriptor. Raises BadMessageError."""
    try:
        size, index = int(document["bytes"]), dict(document["arrays"])
    except (KeyError, TypeError, ValueError):
        raise BadMessageError("a parcel does not say what is in it") from None
    if size < 1 or len(index) > MOST_ARRAYS:
        raise BadMessageError(f"a parcel of {len(index)} arrays in {size} bytes")
    segment = Segment.attach(descriptor, size)
    try:
        return {str(name): _array(segment, *entry).copy() for name, entry in index.items()}
    finally:
        segment.close()


def _array(segment: Segment, at: int, shape: list[int], dtype: str) -> np.ndarray:
    found = np.dtype(dtype)
    sizes = [int(n) for n in shape]
    count = 1
    for n in sizes:
        count *= n
    ends = at + count * found.itemsize
    if found.kind not in _KINDS or min([at, *sizes]) < 0 or ends > segment.size:
        raise BadMessageError(f"a parcel's array {shape} of {dtype} at {at} is not inside it")
    return segment.array(at, tuple(sizes), found)
