"""What ids and rows look like on a wire: lossless for ids, 16 bits with a scale for rows.

For engines that move rows between processes or hosts. Every form says its exact byte count before
it is built. Shape letters: B samples, F fields, N ids, U distinct ids, d the table's dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from runtime.embedding.native.extension import native

MOST_SAMPLES = 1 << 16
"""Samples of a batch that 16-bit positions can name (the original's limit as well)."""
KAPPA = 32768.0
"""The fp16 number that a block's largest magnitude is mapped to (paper, section 4.2.3: any kappa
that uses fp16's range; a power of two, so the scaling itself is exact up to the division)."""


@dataclass(frozen=True, slots=True)
class FieldIds:
    """The ids of one field of a batch: each distinct id once, and where it stands.

    The order of ids within a bag is not kept: sums do not need it.
    """

    distinct: np.ndarray
    """uint64 [U]"""
    bounds: np.ndarray
    """[U + 1], uint16 if N fits, else uint32: ``samples[bounds[u]:bounds[u + 1]]`` hold id u."""
    samples: np.ndarray
    """uint16 [N]: sample numbers, rising within an id; a sample stands twice if its bag does."""

    @classmethod
    def pack(cls, ids: np.ndarray, lengths: np.ndarray) -> Self:
        """From the ids of all bags of a field [N] and the bags' lengths [B]."""
        if len(lengths) > MOST_SAMPLES:
            raise ValueError(
                f"a batch of {len(lengths)} samples does not fit 16-bit positions (at most"
                f" {MOST_SAMPLES}); send it in parts"
            )
        inverse = np.empty(len(ids), np.int32)
        distinct, _ = native.plan(np.ascontiguousarray(ids), 1, inverse)
        order = np.argsort(inverse, kind="stable")
        samples = np.repeat(np.arange(len(lengths)), lengths)[order]
        counts = np.bincount(inverse, minlength=len(distinct))
        bounds = np.concatenate([[0], np.cumsum(counts)])
        return cls(distinct, bounds.astype(_bound_type(len(ids))), samples.astype(np.uint16))

    def unpack(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [N] and lengths [B] of a batch of ``size`` samples; a bag's ids in packed order."""
        counts = self.bounds[1:] - self.bounds[:-1]
        ids = np.repeat(self.distinct, counts)
        order = np.argsort(self.samples, kind="stable")
        return ids[order], np.bincount(self.samples, minlength=size)

    @property
    def byte_count(self) -> int:
        """8 U + 2 N + 2 (U + 1), or 4 (U + 1) from N = 65536 on."""
        return 8 * len(self.distinct) + self.bounds.nbytes + 2 * len(self.samples)

    def to_bytes(self) -> bytes:
        """Counts (4 + 4 bytes) and the three arrays: ``8 + byte_count`` bytes."""
        counts = np.array([len(self.distinct), len(self.samples)], np.uint32)
        arrays = counts, self.distinct, self.bounds, self.samples
        return b"".join(array.tobytes() for array in arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What `to_bytes` wrote; raises ValueError when the length is not what the counts say."""
        distinct, total = np.frombuffer(data, np.uint32, 2).tolist() if len(data) >= 8 else (0, 0)
        bound_type = np.dtype(_bound_type(total))
        bounds_bytes = bound_type.itemsize * (distinct + 1)
        expected = 8 + 8 * distinct + bounds_bytes + 2 * total
        if len(data) != expected:
            raise ValueError(f"packed ids have {len(data)} bytes, their counts say {expected}")
        bounds_at = 8 + 8 * distinct
        return cls(
            np.frombuffer(data, np.uint64, distinct, 8),
            np.frombuffer(data, bound_type, distinct + 1, bounds_at),
            np.frombuffer(data, np.uint16, total, bounds_at + bounds_bytes),
        )


def _bound_type(occurrences: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if occurrences < MOST_SAMPLES else np.uint32


@dataclass(frozen=True, slots=True)
class HalfRows:
    """Rows in fp16, with the paper's scale for each block or as they are.

    Scaled: a block b is sent as fp16(kappa b / max|b|) and the float32 max|b|; its error is at most
    2**-11 of the block's largest magnitude, whatever that is. Plain: fp16(b), which loses numbers
    below 6e-8 and overflows above 65504.
    """

    halves: np.ndarray
    """float16 [n, d]"""
    norms: np.ndarray
    """float32 [n, blocks]: the largest magnitude of each block; [n, 0] when plain."""

    @classmethod
    def pack(cls, rows: np.ndarray, *, block: int | None) -> Self:
        """float32 rows [n, d], scaled in blocks of ``block`` elements (it divides d), or plain."""
        if block is None:
            with np.errstate(over="ignore"):
                return cls(rows.astype(np.float16), np.empty((len(rows), 0), np.float32))
        if block < 1 or rows.shape[1] % block:
            raise ValueError(
                f"block must divide the {rows.shape[1]} elements of a row, got {block}"
            )
        blocks = rows.reshape(len(rows), -1, block)
        norms = np.abs(blocks).max(axis=2)
        scale = KAPPA / np.where(norms > 0, norms, 1).astype(np.float64)
        halves = (blocks * scale[:, :, None]).astype(np.float16)
        return cls(halves.reshape(rows.shape), norms.astype(np.float32))

    def unpack(self) -> np.ndarray:
        """float32 [n, d]"""
        if not self.norms.shape[1]:
            return self.halves.astype(np.float32)
        blocks = self.halves.reshape(*self.norms.shape, -1).astype(np.float32)
        rows: np.ndarray = blocks * (self.norms / np.float32(KAPPA))[:, :, None]
        return rows.reshape(self.halves.shape)

    @property
    def byte_count(self) -> int:
        """2 n d + 4 n blocks."""
        return self.halves.nbytes + self.norms.nbytes
