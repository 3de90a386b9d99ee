"""Sketches of the samples that trained a run, and of those that trained what it was started from.

They are a file beside a checkpoint or in an export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.schema import Count, fit
from runtime.data.fingerprints import NO_ROWS, RowSet
from runtime.files import BrokenFileError, read_arrays, write_arrays

Sketches = tuple[RowSet, RowSet]
"""The samples that trained a run itself, and those that trained what it was started from."""
_SKETCHES = ("own", "before")
_STRETCHES = "stretches "
"""Before the name of a sketch: that of its rows in their order."""


def _sketch_in(
    file: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str
) -> RowSet:
    try:
        limit, size = facts[name]
        fit(size, Count, f"facts.{name}[1]")
        values = arrays[f"{name} values"]
        counts = arrays[f"{name} counts"]
        is_one = type(limit) is int and 0 <= limit < 2**64
        is_one &= values.shape == counts.shape == (len(values),)
        if not is_one or values.dtype != np.uint64 or counts.dtype != np.uint32:
            raise ValueError(f"{name} is no sketch of rows")
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFileError(f"{file} is not what a run writes: {error}") from None
    return RowSet(values=values, counts=counts, limit=limit, size=size)


def read_sketches(file: Path, digest: str) -> Sketches:
    """What `write_sketches` wrote; `BrokenFileError` for any other content."""
    facts, arrays = read_arrays(file, digest)
    of_run, before = (
        replace(
            _sketch_in(file, facts, arrays, name),
            stretches=_sketch_in(file, facts, arrays, _STRETCHES + name),
        )
        for name in _SKETCHES
    )
    return of_run, before


def write_sketches(file: Path, sketches: Sketches) -> str:
    """Write and flush them; gives the file's digest."""
    named = dict(zip(_SKETCHES, sketches, strict=True))
    named |= {_STRETCHES + name: rows.stretches or NO_ROWS for name, rows in named.items()}
    arrays = {f"{name} values": rows.values for name, rows in named.items()}
    arrays |= {f"{name} counts": rows.counts for name, rows in named.items()}
    facts = {name: [rows.limit, rows.size] for name, rows in named.items()}
    return write_arrays(file, facts, arrays).digest
