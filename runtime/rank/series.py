"""A figure of every update in bounded memory: all of a short run, means of blocks of a long one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST_POINTS = 16_384
"""Points kept, twice as many at most; a curve of more has nothing to show for them."""


class BlockMeans:
    """Values in their order; once there are too many, neighbours are merged into their mean.

    A block's mean is over its values that are not NaN, and NaN where all are.

    >>> means = BlockMeans(most_points=2)
    >>> for value in (1.0, 3.0, 5.0, 7.0, 9.0):
    ...     means.append(value)
    >>> means.points, means.values_per_point
    ([2.0, 6.0, 9.0], 2)
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most = 2 * most_points
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._filled = 0  # values in the last block
        self.values_per_point = 1

    def append(self, value: float) -> None:
        """The next value."""
        if self._filled in (0, self.values_per_point):
            self._make_room()
            self._sums.append(0.0)
            self._counts.append(0)
            self._filled = 0
        self._filled += 1
        if not math.isnan(value):
            self._sums[-1] += value
            self._counts[-1] += 1

    @property
    def points(self) -> list[float]:
        """One mean for every ``values_per_point`` values; the last block may be shorter."""
        pairs = zip(self._sums, self._counts, strict=True)
        return [total / count if count else math.nan for total, count in pairs]

    def state(self) -> dict[str, Any]:
        """What `go_on` takes; plain JSON."""
        kept = {"sums": list(self._sums), "counts": list(self._counts), "filled": self._filled}
        return kept | {"values_per_point": self.values_per_point}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Append to what `state` gave."""
        # JSON has null for a sum that is no number.
        self._sums = [math.nan if total is None else total for total in state["sums"]]
        self._counts = list(state["counts"])
        self._filled, self.values_per_point = state["filled"], state["values_per_point"]

    def _make_room(self) -> None:
        if len(self._sums) < self._most:
            return
        self._sums = [sum(self._sums[k : k + 2]) for k in range(0, self._most, 2)]
        self._counts = [sum(self._counts[k : k + 2]) for k in range(0, self._most, 2)]
        self.values_per_point *= 2


class Thinned:
    """Every n-th of a row of points, with n doubled whenever there are too many; the last is kept.

    >>> kept = Thinned(most_points=2)
    >>> for point in range(10):
    ...     kept.append(point, float(point))
    >>> kept.at(0), kept.at(7), kept.last
    ((0, 0.0), (4, 4.0), (9, 9.0))
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most = 2 * most_points
        self._kept: list[tuple[int, float]] = []
        self._stride = 1
        self._length = 0
        self.last: tuple[int, float] = (0, 0.0)

    def __len__(self) -> int:
        return self._length

    def append(self, total: int, at_s: float) -> None:
        """A running total and the instant at which it was reached."""
        self.last = total, at_s
        if self._length % self._stride == 0:
            if len(self._kept) == self._most:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._length % self._stride == 0:
                self._kept.append(self.last)
        self._length += 1

    def state(self) -> dict[str, Any]:
        """What `go_on` takes; plain JSON."""
        kept = {"kept": [list(point) for point in self._kept], "last": list(self.last)}
        return kept | {"stride": self._stride, "length": self._length}

    def go_on(self, state: Mapping[str, Any], later_s: float) -> None:
        """Append to what `state` gave, its instants moved by ``later_s`` seconds."""
        self._kept = [(total, at_s + later_s) for total, at_s in state["kept"]]
        self._stride, self._length = state["stride"], state["length"]
        self.last = state["last"][0], state["last"][1] + later_s

    def at(self, number: int) -> tuple[int, float]:
        """The point of this number, or the nearest one before it that was kept."""
        return self._kept[number // self._stride]
