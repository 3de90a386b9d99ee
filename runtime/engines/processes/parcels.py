"""Arrays that are asked for rarely, in a memory file of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.engines.processes.messages import BadMessageError, pack_json, unpack_json
from runtime.engines.processes.segments import Places, Segment

MOST_ARRAYS = 4096
MOST_INDEX_BYTES = 1 << 22
_KINDS = "uif"


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], Segment]:
    """The arrays in a fresh segment, which others can only read, and where they lie in it."""
    places = Places()
    index: dict[str, tuple[int, list[int], str]] = {}
    for name, array in arrays.items():
        index[name] = places.take(array.nbytes), list(array.shape), array.dtype.str
    # With hundreds of tables the index is longer than a message: it lies behind the arrays.
    text = np.frombuffer(pack_json(index), np.uint8)
    index_at = places.take(len(text))
    segment = Segment.make(places.size, shown=True)
    segment.array(index_at, text.shape, np.uint8)[:] = text
    for name, array in arrays.items():
        at, shape, dtype = index[name]
        segment.array(at, tuple(shape), dtype)[...] = array
    return {"bytes": segment.size, "index": [index_at, len(text)]}, segment


def unpack_arrays(document: Mapping[str, Any], descriptor: int) -> dict[str, np.ndarray]:
    """Copies of the arrays; takes the descriptor. Raises BadMessageError."""
    try:
        size, (index_at, length) = int(document["bytes"]), map(int, document["index"])
    except (KeyError, TypeError, ValueError):
        raise BadMessageError("a parcel does not say what is in it") from None
    if size < 1 or not 0 <= length <= MOST_INDEX_BYTES:
        raise BadMessageError(f"a parcel with an index of {length} bytes in {size} bytes")
    segment = Segment.attach(descriptor, size)
    try:
        index = unpack_json(_array(segment, index_at, [length], "|u1").tobytes())
        if len(index) > MOST_ARRAYS:
            raise BadMessageError(f"a parcel of {len(index)} arrays")
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
