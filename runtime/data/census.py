"""How many rows of each part hold each label: what a split comes to, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtime.data.convert import zero_or_one
from runtime.data.errors import DataError
from runtime.data.joined import Table
from runtime.data.schema import Schema
from runtime.data.source import Part
from runtime.data.split import CODES, UNPLACED, Placer


@dataclass(slots=True)
class Census:
    """Rows of each part by label; rows with a bad label or split value are left out."""

    labels: tuple[str, ...]
    counts: dict[Part, np.ndarray] = field(default_factory=dict)
    """int64 [T, 2] of each part: rows with label 0 and with label 1."""
    bad_rows: int = 0
    """Rows whose label or split value breaks its rule; the stream says which."""
    placed: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(CODES, 0))
    """Rows of each part, those with a bad label among them, without any limit."""

    def __post_init__(self) -> None:
        self.counts = {part: np.zeros((len(self.labels), 2), np.int64) for part in CODES}

    def rows(self, part: Part) -> int:
        """Rows of a part."""
        return int(self.counts[part][0].sum())

    def check(self, where: str, split: str) -> None:
        """Raise when the train or the test part is empty, or has one class of a label."""
        for part in ("train", "test"):
            if not self.rows(part):
                raise DataError(
                    f"{where}: the {part} part is empty ({self.bad_rows} bad rows skipped)\n"
                    f"  the split is: {split}; correct it, or the rows"
                )
            for label, (zeros, ones) in zip(self.labels, self.counts[part].tolist(), strict=True):
                if not zeros or not ones:
                    raise DataError(
                        f"{where}: the {part} part holds one class of column {label}: {zeros:,}"
                        f" rows of 0 and {ones:,} of 1, and a task needs both\n"
                        f"  the split is: {split}; correct it, or leave the label out"
                    )


def take_census(schema: Schema, table: Table, placer: Placer, train_rows: int | None) -> Census:
    """Read the labels and the split's column once; ``train_rows`` limits the training part."""
    census = Census(schema.labels)
    columns = dict.fromkeys(schema.labels)
    if schema.split.column is not None:
        columns[schema.split.column] = None
    for rows in table.stream(tuple(columns)):
        codes = placer.place(rows)
        values = [zero_or_one(rows.table.column(name), schema.missing) for name in schema.labels]
        good = (codes != UNPLACED) & ~np.any([v.bad for v in values], axis=0)
        census.bad_rows += int((~good).sum())
        for part, code in CODES.items():
            census.placed[part] += int((codes == code).sum())
            mine = np.flatnonzero(good & (codes == code))
            if part == "train" and train_rows is not None:
                mine = mine[: train_rows - census.rows(part)]
            for place, value in enumerate(values):
                census.counts[part][place] += np.bincount(value.data[mine].astype(int), minlength=2)
    return census
