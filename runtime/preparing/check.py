"""A table held against its schema (`persia-runtime data check clicks.toml`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtime.data.convert import Values, column_values, label_values
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.ids import MISSING
from runtime.data.rows import (
    Rows,
    absent_share,
    why_bad,
)
from runtime.data.schema import Schema
from runtime.data.split import CODES, UNPLACED
from runtime.data.table import open_table
from runtime.preparing.guessed_column import known_too_late

MOST_IDS = 20_000_000
"""Distinct ids of a column that are remembered; of a column with more, those of the first rows."""


_FEATURES = ("categorical", "multi", "sequence", "numeric", "bucket")
"""Kinds of columns that a model reads; others judge or split."""


@dataclass(slots=True)
class ColumnCheck:
    """What was found in one column."""

    name: str
    kind: str
    rows: int = 0
    absent: int = 0
    bad: int = 0
    first_bad: str = ""
    """File, row and value of the first one."""
    rule: str = ""
    lists: int = 0
    """Values with more than one id."""
    train_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    test_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def unseen(self) -> float | None:
        """Share of the test part's distinct ids that no training sample has; None: no ids."""
        if not len(self.test_ids):
            return None
        return float(1 - np.isin(self.test_ids, self.train_ids).mean())

    @property
    def notes(self) -> str:
        """What to look at."""
        # What is broken, then what only looks odd: each is a hint, and refuses nothing.
        notes = []
        if self.bad:
            notes.append(f"{self.bad:,} bad, first: {self.first_bad}; {self.rule}")
        if self.kind in ("multi", "sequence") and not self.lists:
            notes.append("no value holds more than one id: is its separator right?")
        if self.rows and self.absent == self.rows:
            notes.append("never has a value")
        if len(self.train_ids) == 1 and len(self.test_ids) <= 1:
            notes.append("has one value")

        if self.kind in _FEATURES and (late := known_too_late(self.name)):
            notes.append(late)
        if self.unseen is not None and self.unseen > 0.5:
            notes.append("most ids of the test part were never trained: are they written alike?")
        return "; ".join(notes)

    def note(self, values: Values, rows: Rows, codes: np.ndarray, schema: Schema) -> None:
        """Add a chunk."""
        # The first bad value is shown as it stands in the file.
        self.rows += len(codes)
        if values.bad.any():
            first = int(np.flatnonzero(values.bad)[0])
            if not self.bad:
                array = rows.table.column(self.name)
                where = f"{rows.path.name}, row {rows.numbers[first]}: {array[first].as_py()!r}"
                self.first_bad = where
                self.rule = why_bad(values.rule, array, first, schema.missing)
            self.bad += int(values.bad.sum())

        # Distinct ids of training and test, to see what the test part asks that was never trained.
        if self.kind in ("numeric", "label", "weight", "split"):
            return
        if values.lengths is not None:
            self.lists += int((values.lengths > 1).sum())
            codes = np.repeat(codes, values.lengths)
        train, test = (values.data[codes == CODES[part]] for part in ("train", "test"))
        self.train_ids = _union(self.train_ids, train)
        self.test_ids = _union(self.test_ids, test)


def _union(known: np.ndarray, more: np.ndarray) -> np.ndarray:
    return known if len(known) >= MOST_IDS else np.union1d(known, more[more != MISSING])


def check(source: FileSource) -> tuple[list[ColumnCheck], list[str]]:
    """Every column of the schema, the labels and the split's column; and what else training would
    refuse: broken lines, and parts without rows or without both labels. Reads all rows twice."""
    # A line for each column, whatever it is for.
    schema = source.schema
    notes = []
    table = open_table(schema, source.folder, skip_bad_rows=True)
    checks_by_name = {c.name: ColumnCheck(c.name, c.kind) for c in schema.columns}
    checks_by_name |= {name: ColumnCheck(name, "label") for name in schema.labels}
    if schema.weight is not None:
        checks_by_name[schema.weight] = ColumnCheck(schema.weight, "weight")
    if schema.split.column is not None:
        checks_by_name.setdefault(schema.split.column, ColumnCheck(schema.split.column, "split"))
    # All rows, chunk by chunk.
    for rows, codes in source.placed_rows(table=table):
        for name, one in checks_by_name.items():
            one.absent += round(absent_share(rows.table.column(name), schema.missing) * len(codes))
            one.note(_values(schema, name, rows, codes), rows, codes, schema)
    # What a run would stop at.
    if broken := table.skipped:
        (path, row) = broken[0]
        lines = "line" if len(broken) == 1 else "lines"
        why = "wrong number of columns"
        if opened := table.open_quotes:
            others = f"; {why}: {len(broken) - opened:,}" if len(broken) > opened else ""
            why = f"a quote is left open: {opened:,}, are quotes characters like any other?"
            why += f" then quotes = false{others}"
        what = f"{len(broken):,} broken {lines} ({why})"
        notes.append(f"{what}, first: {path.name}, row {row}")
    try:
        source.census()
    except DataError as error:
        notes.append("; ".join(map(str.strip, str(error).splitlines())))
    return list(checks_by_name.values()), notes


def _values(schema: Schema, name: str, rows: Rows, codes: np.ndarray) -> Values:
    """What one column holds for a chunk of rows."""
    import pyarrow as pa

    array = rows.table.column(name)
    columns = {c.name: c for c in schema.columns}
    if name in columns:
        other = columns[name].with_column
        second = None if other is None else rows.table.column(other)
        try:
            return column_values(columns[name], array, second, schema.missing)
        except pa.ArrowException as error:
            rule = f"values of type {array.type} make no such column: {error}"
            return Values(np.full(len(array), MISSING), None, np.ones(len(array), bool), rule)
    if name in schema.judging_columns:
        return label_values(schema, name, array)
    return Values(np.empty(0), None, codes == UNPLACED, schema.split.rule)


def report_text(checks: list[ColumnCheck], refused: list[str]) -> str:
    """A line a column, what to look at, and what training would refuse."""
    header = ("column", "kind", "absent", "ids in train", "unseen in test", "bad rows")
    lines = [header]
    for one in checks:
        unseen = "-" if one.unseen is None else f"{100 * one.unseen:.3g} %"
        ids = f"{len(one.train_ids):,}" if len(one.train_ids) else "-"
        absent = f"{100 * one.absent / max(one.rows, 1):.3g} %"
        lines.append((one.name, one.kind, absent, ids, unseen, f"{one.bad:,}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>>>", widths, strict=True))
    rows = [form.format(*line) for line in lines]
    notes = [f"{one.name}: {one.notes}" for one in checks if one.notes] + refused
    return "\n".join([*rows, *(notes or ["nothing else to look at"])])
