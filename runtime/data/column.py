"""One column of a data set and what becomes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from runtime.data.batch import Pooling
from runtime.data.typed import check_types

Kind = Literal["categorical", "bucket", "multi", "sequence", "numeric"]

_IDS: tuple[Kind, ...] = ("categorical", "bucket", "multi", "sequence")
_READ_BY: dict[str, tuple[tuple[Kind, ...], Any]] = {
    "separator": (("multi", "sequence"), ","),
    "pooling": (("multi",), "sum"),
    "max_length": (("sequence",), 10),
    "buckets_per_e": (("bucket",), 3.0),
    "log": (("numeric",), True),
    "fill": (("numeric",), None),
    "max_id": (("categorical",), None),
    "modulo": (("categorical",), None),
    "with_column": (("categorical",), None),
    "table": (_IDS, "rows"),
    "group": (_IDS, None),
}
"""Each option: the kinds of column that read it, and its default there."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "max_length": (1, 10_000, "1 to 10,000"),
    "buckets_per_e": (0.01, 1e6, "0.01 to 1e6"),
    "max_id": (1, 2**63 - 1, "1 to 2**63 - 1"),
    "modulo": (1, 2**63 - 1, "1 to 2**63 - 1"),
}
LARGEST_FEATURE = (2 - 2**-23) * 2.0**127
"""Of float32, as dense features are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the source and what becomes of it.

    An option that the column's kind does not read must be left out; one that it reads has its
    default filled in.
    """

    name: str
    kind: Kind = "categorical"
    """categorical: one id. bucket: a number, one id per step of a logarithmic scale. multi: a list
    of ids, pooled. sequence: a list of ids, kept in order. numeric: a dense feature."""
    separator: str | None = None
    """Of a multi or sequence column: between the ids where they are stored as text. Default ","."""
    pooling: Pooling | None = None
    """Of a multi column: sum (default), mean or sqrtn."""
    max_length: int | None = None
    """Of a sequence column: ids kept, the last ones of the list (the newest, where a history is
    written in the order of time). 1 to 10,000, default 10."""
    buckets_per_e: float | None = None
    """Of a bucket column: the id is sign(x) * floor(buckets_per_e * ln(1 + |x|)). Default 3."""
    log: bool | None = None
    """Of a numeric column: the feature is sign(x) * ln(1 + |x|) (default), else x."""
    fill: float | None = None
    """Of a numeric column: the value of an absent entry (before ``log``); None makes an absent
    entry a bad row."""
    max_id: int | None = None
    """Of a categorical column: values must be whole numbers from 0 to this; None: any value."""
    modulo: int | None = None
    """Of a categorical column of whole numbers: keep the remainder (yymmddhh -> hour with 100)."""
    table: str | None = None
    """Of a column of ids: the table that holds the rows; columns may share one (and then share
    ids, see `group`). Default "rows"."""
    group: str | None = None
    """Columns of one group share ids and rows (sender and receiver, player A and player B)."""
    with_column: str | None = None
    """Of a categorical column: a second column whose value is joined to this one's."""

    def __post_init__(self) -> None:
        if self.pooling == "sequence":
            raise ValueError(f"column {self.name}: write kind='sequence', not pooling='sequence'")
        try:
            check_types(self)
        except ValueError as error:
            raise ValueError(f"column {self.name!r}: {error}") from error
        for option, (kinds, default) in _READ_BY.items():
            if self.kind in kinds:
                if getattr(self, option) is None:
                    object.__setattr__(self, option, default)
            elif getattr(self, option) is not None:
                raise ValueError(
                    f"{option} is for columns of kind {' or '.join(kinds)}, column {self.name} is"
                    f" {self.kind}: remove {option} = {getattr(self, option)!r}, or change the kind"
                )
        for option, (least, most, words) in _RANGES.items():
            value = getattr(self, option)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{option} of column {self.name} must be {words}, got {value}")
        if self.fill is not None:
            filled = math.log1p(abs(self.fill)) if self.log else abs(self.fill)
            if not filled <= LARGEST_FEATURE:
                raise ValueError(
                    f"fill of column {self.name} must be a finite number that float32 can hold,"
                    f" got {self.fill}"
                )
        if self.separator == "":
            raise ValueError(f"separator of column {self.name} must hold a character, got ''")
        if self.table == "":
            raise ValueError(f"table of column {self.name} must have a name, got ''")
        if self.with_column == self.name:
            raise ValueError(f"with_column of column {self.name} is the column itself; remove it")
