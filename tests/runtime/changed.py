"""What a fuzzer makes of values and bytes."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = [0, 1, 2, 3, 7, -1, -2, 2**15, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63), 10**9, 10**5]
VALUES = [
    *NUMBERS,
    2**64,
    1e300,
    0.5,
    None,
    True,
    "",
    "x",
    "../x",
    "dense",
    [],
    {},
    [1],
    ["a"] * 99,
]


def changed_value(draw: random.Random, value: Any) -> Any:
    """A JSON value with one part of it changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if draw.random() < 0.05:
            return value | {draw.choice(["x", key + "x", "format"]): draw.choice(VALUES)}
        return value | {key: changed_value(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        if draw.random() < 0.1:
            return value * draw.choice([0, 2, 300])
        return [*value[:at], changed_value(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and draw.random() < 0.3:
        return value + draw.choice([-1, 1])
    return draw.choice(VALUES)


def flipped(draw: random.Random, content: bytes) -> bytes:
    """Some bytes changed, left out or doubled."""
    result = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(result) or 1)
        match draw.randrange(4):
            case 0:
                del result[at : at + draw.choice([1, 4, 100])]
            case 1:
                result[at:at] = result[at : at + draw.choice([1, 8, 60])]
            case _ if result:
                result[at] = draw.randrange(256)
    return bytes(result)
