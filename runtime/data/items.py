"""A table of items, a row an item, whose columns stand in a sample in place of the sample's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from persia_sim.base.schema import nearest
from runtime.data.batch import Batch
from runtime.data.errors import DataError
from runtime.data.files import batch_of, refuse_row
from runtime.data.schema import Column, Schema
from runtime.data.table import file_of


@dataclass(frozen=True, slots=True)
class Items:
    """Items by their number in the table, from 0 on."""

    name: str
    """The column by which an item is known, the first one of the table that the model reads."""
    place: int
    """The place of this field among those of a sample."""
    ids: np.ndarray
    """uint64 [n]: what this column's ids are in batches, all different."""
    columns: Batch
    """[n]: what the columns of the table hold; the other fields are empty of meaning."""
    fields: np.ndarray
    """bool [F]: which fields are of the table."""
    dense: np.ndarray
    """bool [D]: which dense features are of the table."""

    def in_place(self, samples: Batch, which: np.ndarray) -> Batch:
        """Sample k with the columns of item ``which[k]`` in place of its own."""
        return samples.with_columns_of(self.columns.take(which), self.fields, self.dense)

    def number_of(self, ids: np.ndarray) -> np.ndarray:
        """int64 [n]: the items of these ids; -1 where the table has none."""
        order = np.argsort(self.ids)
        place = np.minimum(np.searchsorted(self.ids, ids, sorter=order), len(order) - 1)
        return np.where(self.ids[order[place]] == ids, order[place], -1)


def read_items(schema: Schema, file: Path) -> Items:
    """The items of a table, as `read_keyed`; DataError for a table that is none of items."""
    if schema.group in file_of(schema, file).column_names():
        raise DataError(
            f"{file} has the column {schema.group}, whose samples items are ranked for: a table of"
            " items has none of it; leave it out"
        )
    return read_keyed(schema, file)


def read_keyed(schema: Schema, file: Path) -> Items:
    """A table by its first column that the schema names, which must be different in each row, as a
    data set of this schema reads its columns; others are not looked at. DataError for others."""
    # Its columns that are features: the first one says which item it is.
    table = file_of(schema, file)
    present = table.column_names()
    known = {c.name: c for c in schema.columns}
    names = [name for name in present if name in known]
    if not names or known[names[0]].kind not in ("categorical", "bucket"):
        raise DataError(
            f"{file} has the columns {', '.join(present)}: the first that the schema names must be"
            f" the item's, a categorical one; {nearest(present[0], known)}"
        )
    for column in schema.columns:
        if column.with_column is not None and (column.name in names) != (
            column.with_column in present
        ):
            raise DataError(
                f"{file}: an id of column {column.name} is made with {column.with_column}, and both"
                " must be of the item, or none; add the other column, or leave it out"
            )

    # Read as the schema does; what is no item's has one value.
    def standing_in(column: Column) -> Column:
        if column.name in names:
            return column
        if column.kind == "numeric":
            return Column(name=column.name, kind="numeric", fill=0.0)
        return Column(name=column.name, table=column.table, group=column.group)

    of_items = replace(schema, columns=tuple(map(standing_in, schema.columns)))
    every = of_items.feature_columns
    table = replace(table, may_lack=frozenset(every))
    parts = [batch_of(of_items, r, refuse_row, labelled=False) for r in table.stream(every)]
    columns = Batch.concat(parts)
    place = [c.name for c in schema.id_columns].index(names[0])
    ids = columns.of_field(place)
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        repeated = int(np.flatnonzero(ids == values[counts > 1][0])[1]) + 1
        raise DataError(
            f"{file}, row {repeated}, column {names[0]}: it stood there before, and"
            " such a table has one row for each"
        )
    return Items(
        names[0],
        place,
        ids,
        columns,
        fields=np.array([c.name in names for c in schema.id_columns], bool),
        dense=np.array([c.name in names for c in schema.dense_columns], bool),
    )
