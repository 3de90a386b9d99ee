"""Data of a program's own: pandas frames become a data set that every command reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia_sim.base.files import atomic_write, toml_value
from runtime.data.errors import DataError
from runtime.data.schema import read_schema

if TYPE_CHECKING:
    import pandas as pd

DATA = "data.parquet"
SCHEMA = "schema.toml"
_OF_FILES = ("file", "folder", "joins", "header", "delimiter", "format", "quotes", "line_breaks")
"""Keys of a schema that say how files are read: there is one here, and it is known."""


def write_data_set(
    folder: str | Path,
    frames: pd.DataFrame | Iterable[pd.DataFrame],
    *,
    columns: Iterable[str | Mapping[str, Any]],
    **schema: Any,
) -> str:
    """Write frames into a folder, and return the path of their schema: the name of the data set.

    ``frames``: one, or several with the same columns, which are written one after the other, so
    that only one need be in memory. ``columns`` are the features, and the keys of ``schema``
    (``labels``, ``split``, ``group``, ...) are those of a schema file (docs/training.md); its name
    is the folder's unless given. Both files are replaced whole. Raises DataError naming a key, a
    column or a type that cannot be.

    >>> import pandas as pd, tempfile
    >>> clicks = pd.DataFrame({"user": [1, 2], "item": ["a", "b"], "clicked": [0, 1]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_data_set(
    ...         folder, clicks, columns=["user", "item"], labels=["clicked"],
    ...         split={"test_fraction": 0.5}, name="clicks",
    ...     )
    ...     print(Path(path).read_text())
    name = "clicks"
    file = "data.parquet"
    columns = ["user", "item"]
    labels = ["clicked"]
    split = { test_fraction = 0.5 }
    <BLANKLINE>
    """
    # What a file would say of itself is known.
    for key in _OF_FILES:
        if key in schema:
            raise DataError(f"{key} is of files that are given; frames are one table: remove it")

    # The table first: a schema without its table would be read.
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    _write_table(place / DATA, frames)
    keys = {"name": place.resolve().name, "file": DATA, "columns": list(columns)} | schema
    with atomic_write(place / SCHEMA) as out:
        out.write("".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items()).encode())
    read_schema(place / SCHEMA)
    return str(place / SCHEMA)


def _write_table(file: Path, frames: pd.DataFrame | Iterable[pd.DataFrame]) -> None:
    """Raise DataError for frames that are none, that are unlike each other or hold other values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with atomic_write(file) as out:
            first, rest = _first_of(frames)
            head = pa.Table.from_pandas(first, preserve_index=False)
            with pq.ParquetWriter(out, head.schema) as writer:
                writer.write_table(head)
                for number, frame in enumerate(rest, 1):  # noqa: B007
                    writer.write_table(
                        pa.Table.from_pandas(frame, schema=head.schema, preserve_index=False)
                    )
    except (pa.ArrowException, KeyError) as error:
        reason = "; ".join(map(str, error.args))
        raise DataError(
            f"frame {number} cannot be a part of the table: {reason}; give every frame the columns"
            " of the first, and each column values of one kind"
        ) from error


def _first_of(
    frames: pd.DataFrame | Iterable[pd.DataFrame],
) -> tuple[pd.DataFrame, Iterator[pd.DataFrame]]:
    if hasattr(frames, "iloc"):
        return frames, iter(())
    rest = iter(frames)
    first = next(rest, None)
    if not hasattr(first, "iloc"):
        raise DataError("frames must be a pandas DataFrame, or several with the same columns")
    return first, rest
