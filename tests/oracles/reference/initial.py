"""Initial values: a pure function of (seed, table, id, element), whatever happened before (law 10).

So eviction, sharding and restart cannot change a fresh row, and evaluation can read a row that was
never created.
"""

from __future__ import annotations

import hashlib

import numpy as np

from runtime.data.ids import hash_texts, mix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: splitmix64's increment


def table_key(seed: int, table: str) -> int:
    """64 bits that stand for (seed, table)."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform_rows(key: int, ids: np.ndarray, dim: int, scale: float, dtype: str) -> np.ndarray:
    """Values uniform in [-scale, scale), shape [len(ids), dim].

    Counter-based: element j of id i is bits 11..63 of mix64(mix64(i ^ key) + (j + 1) * golden).
    """
    base = mix64(ids ^ np.uint64(key))
    counters = (np.arange(1, dim + 1, dtype=np.uint64)) * _GOLDEN
    bits = mix64(base[:, None] + counters[None, :]) >> np.uint64(11)
    return ((bits.astype(np.float64) * 2.0**-52 - 1.0) * scale).astype(dtype)


def hash_text(value: str) -> int:
    """The hash of one string by itself."""
    return int(hash_texts([value])[0])
