"""The vectors of one table by id, in memory: of a run or an export, sorted, and never written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.data.ids import MAX_FIELDS, VALUE_BITS, VALUE_MASK
from runtime.embedding.config import Admission, Capacity, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.plan import Planner
from runtime.embedding.native.store import open_table
from runtime.files import BrokenFileError

_ROWS_AT_ONCE = 1 << 17
_MOST_ID = np.uint64((MAX_FIELDS << VALUE_BITS) - 1)


class Vectors:
    """Rows that are there, and the initial value of every other one (law 10)."""

    def __init__(self, config: TableConfig, seed: int, ids: np.ndarray, values: np.ndarray) -> None:
        """``ids`` uint64 [n], sorted; ``values`` [n, dim]."""
        self.config, self.ids, self.values = config, ids, values
        plain = replace(config, capacity=Capacity(), admission=Admission())
        self._empty = open_table(plain, seed, 1)
        self._planner = Planner([Field(name="ids", table=config.name)], [config], 1)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """[n, dim]: the rows of these ids, as they stand in a plan."""
        found: np.ndarray = np.empty((len(ids), self.config.dim), self.config.dtype)
        place = np.searchsorted(self.ids, ids)
        place[place == len(self.ids)] = 0
        there = self.ids[place] == ids if len(self.ids) else np.zeros(len(ids), bool)
        found[there] = self.values[place[there]]
        absent = np.ascontiguousarray(ids[~there])
        count = len(absent)
        values = np.empty((count, self.config.dim), self.config.dtype)
        handles, writes = np.empty(count, np.int64), np.empty(count, np.int64)
        span = np.array([[0, count, 0]])
        native.read([self._empty], absent, span, handles, writes, values, False, 0)
        found[~there] = values
        return found

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """[n, dim]: the vector of each id; of a hash stack the sum of its rows."""
        nothing = np.empty((len(ids), 0), np.float32)
        plan = self._planner.plan(Batch(ids, None, nothing, nothing))
        rows = self.rows(plan.ids)[plan.inverse]
        each = (len(ids), max(1, self.config.hash_stack.rounds), self.config.dim)
        total: np.ndarray = rows.reshape(each).sum(1)
        return total

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """bool [n], whether each id has a row; not of a hash stack, whose rows many ids share."""
        return np.isin(ids & VALUE_MASK if self.config.share_rows else ids, self.ids)


def ids_of(given: Any) -> np.ndarray:
    """Row ids as an array; ValueError for what cannot be ids."""
    ids = np.asarray(given)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "ui"):
        raise ValueError(
            f"ids must be one row of whole numbers, got {ids.dtype} of shape {ids.shape}"
        )
    if ids.size and (ids.min() < 0 or ids.max() > _MOST_ID):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"ids must be 0 to {int(_MOST_ID)}, got {int(wrong)}")
    return np.ascontiguousarray(ids.astype(np.uint64))


def write_vectors(file: Path, config: TableConfig, ids: np.ndarray, values: np.ndarray) -> None:
    """A parquet file of columns id and vector, sorted by id as they come."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(config)
    # Vectors are noise to a compressor, and no two are alike.
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as out:
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            flat = pa.array(values[part].reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, config.dim)
            out.write_table(pa.table([pa.array(ids[part]), vectors], schema=schema))


def read_vectors(file: Path, config: TableConfig) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values; the file is mapped while it is decoded. `BrokenFileError` for any other."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, memory_map=True) as content:
            columns, own = content.schema_arrow, _schema(config)
            if not columns.equals(own):
                told, wanted = (", ".join(f"{c.name}: {c.type}" for c in s) for s in (columns, own))
                raise BrokenFileError(
                    f"{file} has the columns {told}; a table of this model has {wanted}"
                )
            count, at = content.metadata.num_rows, 0
            ids = np.empty(count, np.uint64)
            values = np.empty((count, config.dim), config.dtype)
            for part in content.iter_batches(_ROWS_AT_ONCE):  # never all of it twice
                to = slice(at, at + len(part))
                ids[to] = part["id"].to_numpy(zero_copy_only=False)
                flat = part["vector"].flatten().to_numpy(zero_copy_only=False)
                values[to] = flat.reshape(len(part), config.dim)
                at = to.stop
    except (pa.ArrowException, OSError, IndexError) as error:
        raise BrokenFileError(f"{file} is no parquet file: {str(error).splitlines()[0]}") from None
    if (ids[1:] <= ids[:-1]).any():
        raise BrokenFileError(f"{file}: its ids are not sorted, or one stands twice")
    return ids, values


def _schema(config: TableConfig) -> Any:
    import pyarrow as pa

    kind = pa.float64() if config.dtype == "float64" else pa.float32()
    return pa.schema({"id": pa.uint64(), "vector": pa.list_(kind, config.dim)})
