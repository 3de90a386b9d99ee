"""Text formats of other libraries, read as tables: RecBole's atomic files, and libsvm.

recbole   columns between tabs; the first line names them with their types: user_id:token
libsvm    label qid:query index:value ... # comment    columns: label, qid, features, INDEX:value

libsvm is read by scikit-learn (`load_svmlight_file`): indexes are whole numbers and rise. An entry
of value 0 is absent, a label -1 is 0. "features" are the indexes of a line that have no column of
their own; what values they have does not count. INDEX:value is a value itself.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from runtime.data.errors import DataError, broken_file, check_not_empty, header_names

Format = Literal["recbole", "libsvm"]
TYPES = ("token", "token_seq", "float", "float_seq")
"""Types of the columns of an atomic file."""
LABEL = "label"
QUERY = "qid"
FEATURES = "features"
VALUE = ":value"
ROWS_PER_BATCH = 16_384
_NUMBER = r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?"
_LIBSVM = re.compile(rf"{_NUMBER}([ \t]+qid:\d+)?([ \t]+\d+:{_NUMBER})+[ \t]*(#.*)?\s*", re.ASCII)


def recognised(path: Path) -> Format | None:
    """The format of a text file by its first line; None of one that is delimited."""
    try:
        line = next(_lines(path), "")
        names = line.rstrip("\r\n").split("\t")
        if all(name.rpartition(":")[2] in TYPES for name in names):
            return "recbole"
        _, sample = next(_samples(path), (0, ""))
    except DataError:
        return None
    return "libsvm" if _LIBSVM.fullmatch(sample) else None


def atomic_columns(path: Path) -> dict[str, str]:
    """Name -> type of the columns of an atomic file; DataError for a name without its type."""
    result = {}
    for written in header_names(path, "\t", quotes=False):
        name, _, kind = written.rpartition(":")
        if kind not in TYPES or not name:
            raise DataError(
                f"{path}: column {written!r} has no type; an atomic file names each as NAME:TYPE,"
                f" and TYPE is one of {', '.join(TYPES)}"
            )
        if name in result:
            raise DataError(f"{path} has two columns {name!r}; give them different names")
        result[name] = kind
    return result


class LibsvmSeen(NamedTuple):
    """What the first lines of a libsvm file hold."""

    has_query: bool
    indexes: list[int]
    numbers: list[int]
    """Indexes whose values are not all 1."""
    are_classes: bool
    """Whether all labels are 0 and 1, or -1 and 1."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that these lines show; INDEX:value of any other index may be asked for."""
        values = [f"{index}{VALUE}" for index in self.indexes]
        return (LABEL, *[QUERY] * self.has_query, FEATURES, *values)


def libsvm_seen(path: Path, rows: int = 1) -> LibsvmSeen:
    """What the first ``rows`` lines hold; DataError for one that cannot be read."""
    piece = list(islice(_samples(path), rows))
    has_query = bool(piece) and f"{QUERY}:" in piece[0][1].partition("#")[0]
    entries, labels, _ = _loaded(path, piece, has_query, None)
    return LibsvmSeen(
        has_query,
        np.unique(entries.indices).tolist(),
        np.unique(entries.indices[entries.data != 1]).tolist(),
        set(labels.tolist()) <= {-1.0, 0.0, 1.0},
    )


def libsvm_batches(
    path: Path, names: Sequence[str], skipped: list[int] | None
) -> Iterator[tuple[Any, np.ndarray]]:
    """The named columns, batch by batch, and the numbers of their lines, those without a sample not
    counted. ``skipped`` takes the numbers of lines that cannot be read; None: the first one is a
    DataError."""
    import pyarrow as pa

    # Values with a column of their own are no features; lines come in pieces of a bounded size.
    apart = [int(name.removesuffix(VALUE)) for name in names if name.endswith(VALUE)]
    lines = _samples(path)
    while piece := list(islice(lines, ROWS_PER_BATCH)):
        entries, labels, queries = _loaded(path, piece, QUERY in names, skipped)
        row_of = np.repeat(np.arange(len(labels)), np.diff(entries.indptr))
        columns = {}
        for name in names:
            if name == LABEL:
                columns[name] = pa.array(np.where(labels == -1, 0.0, labels))
            elif name == QUERY:
                columns[name] = pa.array(queries)
            elif name == FEATURES:
                kept = ~np.isin(entries.indices, apart)
                counts = np.bincount(row_of[kept], minlength=len(labels))
                starts = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
                indexes = pa.array(entries.indices[kept].astype(np.int64))
                columns[name] = pa.ListArray.from_arrays(starts, indexes)
            else:
                here = entries.indices == int(name.removesuffix(VALUE))
                values = np.full(len(labels), np.nan)
                values[row_of[here]] = entries.data[here]
                columns[name] = pa.array(values, mask=np.isnan(values))
        yield pa.RecordBatch.from_pydict(columns), np.array([n for n, _ in piece], np.int64)


def _loaded(
    path: Path, piece: list[tuple[int, str]], has_query: bool, skipped: list[int] | None
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Entries (a sparse matrix), labels and queries of numbered lines; bad ones leave ``piece``."""
    try:
        return _load([line for _, line in piece], has_query)
    except ValueError:
        good = []
        for number, line in piece:
            try:
                _load([line], has_query)
                good.append((number, line))
            except ValueError as error:
                if skipped is None:
                    why = str(error).rstrip(".")
                    raise DataError(
                        f"{path}, row {number}: {why}; got {line.strip()[:60]!r}\n  write label"
                        " index:value ..., with rising indexes (a label that is not known is 0);"
                        " train and evaluate can skip bad rows (--data.skip-bad-rows)"
                    ) from None
                skipped.append(number)
        piece[:] = good
        return _load([line for _, line in good], has_query)


def _load(lines: list[str], has_query: bool) -> tuple[Any, np.ndarray, np.ndarray]:
    from scipy.sparse import csr_matrix
    from sklearn.datasets import load_svmlight_file  # late: it takes a second

    if not lines:
        return csr_matrix((0, 0)), np.empty(0), np.empty(0, np.int64)
    content = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    entries, labels, *more = load_svmlight_file(content, zero_based=True, query_id=has_query)
    queries = more[0] if more else np.empty(0, np.int64)
    if has_query and len(queries) != len(lines):
        raise ValueError(f"it has no {QUERY}:")
    if len(labels) != len(lines):
        raise ValueError("a line of it holds several")
    entries.eliminate_zeros()
    return entries, labels, queries


def _samples(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that holds more than a comment."""
    return enumerate((line for line in _lines(path) if line.partition("#")[0].strip()), 1)


def _lines(path: Path) -> Iterator[str]:
    import pyarrow as pa

    check_not_empty(path)
    try:
        with io.TextIOWrapper(pa.input_stream(str(path)), encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error.reason}; save it as UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        raise broken_file(path, error) from error
