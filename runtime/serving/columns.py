"""From values as they stand in a table to the batches and ids that a trained model knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia_sim.words.schema import nearest, parse
from runtime.data.batch import Batch
from runtime.data.convert import column_values
from runtime.data.errors import DataError
from runtime.data.files import batch_of, refuse_row
from runtime.data.ids import tag
from runtime.data.rows import Rows
from runtime.data.schema import Column, Schema
from runtime.data.table import TableFile

if TYPE_CHECKING:
    import pandas as pd

_FRAME = Path("the frame")


class Columns:
    """The columns that a model was trained on, by their names; labels are not looked at."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        """``document``: of the schema, as a run keeps it; empty of a stream that is no table."""
        if not document:
            raise ValueError(
                f"{where} was trained on a synthetic stream, which has no columns: `predict` takes"
                " its batches, `lookup` its ids"
            )
        self.schema = parse(Schema, {"name": "what is scored", **document}, where)

    @property
    def names(self) -> tuple[str, ...]:
        """Every column that the model reads."""
        return self.schema.feature_columns

    def stream(self, file: Path, also: Sequence[str] = ()) -> Iterator[tuple[Rows, Batch]]:
        """The rows of a table and of its columns ``also``, chunk by chunk; DataError for a bad
        one."""
        schema = self.schema
        table = TableFile(
            path=file,
            delimiter=schema.delimiter or ",",
            header=schema.header,
            line_breaks=schema.line_breaks,
        )
        names = tuple(dict.fromkeys((*self.names, *also)))
        table.check_columns(names)
        for rows in table.stream(names):
            yield rows, batch_of(schema, rows, refuse_row, labelled=False)

    def of_frame(self, frame: pd.DataFrame) -> Batch:
        """The rows of a frame; DataError for a column that is not there, and for a bad value."""
        import pyarrow as pa

        lacking = [name for name in self.names if name not in frame]
        if lacking:
            raise DataError(
                f"the frame has no column {lacking[0]!r}; {nearest(lacking[0], map(str, frame))}"
            )
        table = pa.RecordBatch.from_pandas(frame[list(self.names)], preserve_index=False)
        rows = Rows(table=table, numbers=np.arange(1, len(frame) + 1), path=_FRAME)
        return batch_of(self.schema, rows, refuse_row, labelled=False)

    def ids(self, name: str, values: Sequence[Any]) -> tuple[str, np.ndarray]:
        """The table, and the id of each value: uint64 [n]; of a list column each is one id."""
        import pyarrow as pa

        known = {c.name: c for c in self.schema.id_columns}
        if name not in known:
            raise ValueError(f"no column of ids is called {name!r}; {nearest(name, known)}")
        column = known[name]
        if column.with_column is not None:
            raise ValueError(
                f"an id of column {name} is made of its value and that of {column.with_column};"
                " `predict_frame` takes both"
            )
        if column.kind in ("multi", "sequence"):
            column = Column(name=name, table=column.table)
        found = column_values(column, pa.array(list(values)), None, self.schema.missing)
        if found.bad.any():
            wrong = list(values)[int(np.flatnonzero(found.bad)[0])]
            raise ValueError(f"column {name} has no id for {wrong!r}: {found.rule}")
        number = self.schema.field_numbers[list(known).index(name)]
        return column.table or "rows", tag(number, found.data)
