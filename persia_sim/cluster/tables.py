"""Tables of rows: how many, how wide, how popular, and what their optimiser keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from persia_sim.base.popularity import expected_distinct
from persia_sim.base.rules import AMOUNT, NUMBERS, SHARE, Range, Usual, require, require_within
from persia_sim.base.schema import hold_choices

IDS: Range = (1e-9, 1e6)
"""Mean ids of a field in a sample."""
ZIPF: Range = (0, 20)


class Storage(StrEnum):
    """Where the rows of a table are."""

    HBM = "hbm"
    UVM = "uvm"
    """The host's memory, read by the GPU over the bus, a row at a time."""
    UVM_CACHE = "uvm_cache"
    """The host's memory behind a cache in the GPU's: misses cross the bus."""


class RowUpdate(StrEnum):
    """What an optimiser does to rows: it reads and writes values and state (`values_per_value`)."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    LAZY_ADAM = "lazy_adam"
    """Adam on the rows of the batch only."""
    DENSE_ADAM = "dense_adam"
    """Adam on every row of the table in every step."""

    @property
    def values_per_value(self) -> int:
        """Numbers kept for each number of a row, itself included."""
        return {"sgd": 1, "rowwise_adagrad": 1, "adagrad": 2}.get(self, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table, or several that are alike."""

    name: str = ""
    """What options call it."""
    fields: tuple[str, ...] = ()
    """Names of the features that read it, which options may call it by, too."""
    rows: Annotated[float, Usual.ROWS]
    """Rows of one table, >= 1."""
    dim: float
    """Numbers in a row, > 0 (a mean where the description is one)."""
    ids_per_sample: tuple[float, ...] = (1.0,)
    """Mean ids of each feature that reads the table; each feature gives one pooled vector."""
    count: int = 1
    """Tables that are alike, >= 1."""
    zipf: float = 1.05
    """Exponent of the ids' popularity, >= 0."""
    storage: Storage = Storage.HBM
    """Where the rows are."""
    cached_share: float = 0.2
    """Share of the rows that the cache of `uvm_cache` holds, in (0, 1]."""

    def __post_init__(self) -> None:
        hold_choices(self)
        require_within(
            self,
            " of a table",
            rows=AMOUNT,
            dim=(1e-3, NUMBERS[1]),
            count=NUMBERS,
            zipf=ZIPF,
            cached_share=SHARE,
        )
        (least, most) = IDS
        ids = self.ids_per_sample
        ok = len(ids) >= 1 and all(least <= each <= most for each in ids)
        rule = f"needs numbers in [{least:g}, {most:g}], one for each feature"
        require(ok, "ids_per_sample of a table", ids, rule)
        ok = not self.fields or len(self.fields) == len(ids)
        rule = f"needs a name for each of its {len(ids)} features, or none"
        require(ok, "fields of a table", self.fields, rule)

    @property
    def ids(self) -> float:
        """Ids of one sample in one such table."""
        return sum(self.ids_per_sample)

    @property
    def pooled(self) -> float:
        """Numbers that one such table gives for a sample."""
        return self.dim * len(self.ids_per_sample)

    def distinct(self, samples: float) -> float:
        """Expected distinct rows of one table that so many samples touch."""
        return min(expected_distinct(samples * self.ids, self.rows, self.zipf), samples * self.ids)
