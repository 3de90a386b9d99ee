"""Ids: 64 bits, the field's number in the top 8, a hash of the value in the rest.

No vocabulary pass: the id of a value is a function of the value alone, so a stream can be read once
and two readers agree (paper, section 4.2.3; the original keeps a group prefix in the top bits too).
Ids of a synthetic stream are drawn by a Zipf law, where a few values are seen all the time and most
of them hardly ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

FIELD_BITS = 8
VALUE_BITS = 64 - FIELD_BITS
VALUE_MASK = np.uint64(2**VALUE_BITS - 1)
MAX_FIELDS = 2**FIELD_BITS - 1
"""Fields of one data set; number 255 is left free so that no id is 2**64 - 1 (an empty slot)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: the increment of splitmix64


def mix64(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads every bit (the finaliser of splitmix64, Steele 2014)."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def tag(field: int, hashes: np.ndarray) -> np.ndarray:
    """Put the number of the field on top of value hashes.

    >>> hex(int(tag(1, np.array([2**64 - 1], np.uint64))[0]))
    '0x1ffffffffffffff'
    """
    if not 0 <= field < MAX_FIELDS:
        raise ValueError(f"field number must be 0 to {MAX_FIELDS - 1}, got {field}")
    return (hashes.astype(np.uint64) & VALUE_MASK) | np.uint64(field << VALUE_BITS)


def hash_integers(values: np.ndarray) -> np.ndarray:
    """uint64 hashes of integers (any that fit int64)."""
    return mix64(values.astype(np.int64).view(np.uint64) + _GOLDEN)


def hash_texts(values: Sequence[str]) -> np.ndarray:
    """uint64 hashes of strings; the decimal form of an integer hashes as that integer.

    So a column of numbers has the same ids whether a file stores it as text or as integers.

    >>> hash_texts(["-7"]) == hash_integers(np.array([-7]))
    array([ True])
    """
    integers = [_as_integer(value) for value in values]
    hashes = hash_integers(np.array([integer or 0 for integer in integers], np.int64))
    for place, (value, integer) in enumerate(zip(values, integers, strict=True)):
        if integer is None:
            digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
            hashes[place] = int.from_bytes(digest, "little")
    return hashes


def _as_integer(value: str) -> int | None:
    """The int64 (a sign, 19 digits) that the text is the usual form of ("7", "7.0", not "007")."""
    text = value.removesuffix(".0")
    if len(text) > 20 or not text.removeprefix("-").isdecimal():
        return None
    integer = int(text)
    return integer if str(integer) == text and -(2**63) <= integer < 2**63 else None


def join_hashes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The hash of a pair of values, from theirs; the order matters."""
    return mix64(mix64(first + _GOLDEN) + second)


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
        z = (z * odd) & VALUE_MASK
        z ^= z >> np.uint64(VALUE_BITS // 2)
    return z
