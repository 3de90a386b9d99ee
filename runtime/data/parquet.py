"""Parquet files as record batches of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.data.errors import broken_file, check_not_empty


def parquet_file(path: Path, *, mapped: bool = False) -> Any:
    """A pyarrow.parquet.ParquetFile, its bytes ``mapped`` or read; DataError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_not_empty(path)
    try:
        return pq.ParquetFile(path, memory_map=mapped)
    except (pa.ArrowException, OSError) as error:
        raise broken_file(path, error) from error


def parquet_batches(path: Path, names: Sequence[str], rows: int, **how: bool) -> Iterator[Any]:
    """The named columns of a parquet file as record batches of so many ``rows`` at most; ``how``:
    as `parquet_file` has it. DataError for bytes that cannot be read, and for a file that has
    another number of rows than it says."""
    import pyarrow as pa

    seen = 0
    with parquet_file(path, **how) as content:
        try:
            for batch in content.iter_batches(rows, columns=list(names)):
                if batch.num_rows:
                    yield _without_views(batch)
                seen += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise broken_file(path, error, f"after row {seen}") from error
        if seen != (said := content.metadata.num_rows):
            raise broken_file(path, ValueError(f"it has {seen:,} rows, and says {said:,}"))


def _without_views(batch: Any) -> Any:
    """Views of texts as texts: few of pyarrow's functions know them."""
    import pyarrow as pa

    for place, column in enumerate(batch.schema):
        if str(column.type) == "string_view":
            batch = batch.set_column(place, column.name, batch.column(place).cast(pa.string()))
    return batch
