"""Bytes and times as a reader wants them: in the unit that leaves a few figures."""

from __future__ import annotations

from math import isinf


def binary(size_bytes: float) -> str:
    """A memory size.

    >>> binary(2500 * 2**30), binary(1.5e7), binary(12.0)
    ('2,500 GiB', '14.3 MiB', '12 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 2**power:
            size = size_bytes / 2**power
            return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def lasting(seconds: float) -> str:
    """A time.

    >>> lasting(28.2 * 3600), lasting(90), lasting(0.004), lasting(float("inf"))
    ('28.2 h', '1.5 min', '4 ms', 'never')
    """
    if isinf(seconds):
        return "never"
    for least_s, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= least_s:
            return f"{seconds / least_s:,.1f} {unit}"
    return f"{seconds * 1e3:.3g} ms"
