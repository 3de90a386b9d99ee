"""A schema guessed from a table: `persia-runtime data schema clicks.csv > clicks.toml`.

What was guessed is written as TOML, and what is uncertain as a comment, for a person to correct.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.data.errors import DataError, regular_file
from runtime.data.schema import is_parquet

if TYPE_CHECKING:
    import pandas as pd

ROWS = 100_000
"""First rows of the table that are looked at."""
MISSING = ("", "?")
"""As a schema has it, unless it says otherwise."""
SEPARATORS = ("|", ";", " ", ",")
LIST_SHARE = 0.2
"""Of the values: so many hold a separator where a column is a list of ids."""
FEW_IDS = 1000
"""Whole numbers of fewer different values pass for ids, of more for numbers."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_LABEL = re.compile(r"label|click|target|convert|purchas|like|is_|^y$", re.IGNORECASE)
_USER = re.compile(r"user|member|customer|visitor|session", re.IGNORECASE)
_SEQUENCE = re.compile(r"hist|seq|last_|recent|previous", re.IGNORECASE)
_TIME = re.compile(r"date|day|time|hour|week|month|year|^ts$", re.IGNORECASE)


class Found(NamedTuple):
    """What the values of one column look like."""

    name: str
    values: pd.Series
    """Distinct texts, absent ones left out."""
    absent: float
    """Share of the rows."""
    numbers: bool
    whole: bool

    @property
    def is_label(self) -> bool:
        """0 and 1, in every row."""
        return set(self.values) == {"0", "1"} and not self.absent

    @property
    def is_date(self) -> bool:
        """Every value is a date, or date and time."""
        return len(self.values) > 0 and bool(self.values.str.fullmatch(_DATE).all())


def guessed(path: Path, delimiter: str | None = None) -> str:
    """The text of a schema; raises DataError for what is no table."""
    table = _head(path, delimiter)
    columns = [_looked_at(str(name), table[name]) for name in table.columns]
    labels = [c for c in columns if c.is_label]
    chosen = sorted(labels, key=lambda c: not _LABEL.search(c.name))[:1]
    times = [c for c in columns if c.is_date or (c.numbers and _TIME.search(c.name))]
    features = [c for c in columns if c not in chosen and c not in times]
    group = next((c.name for c in features if _USER.search(c.name)), None)
    lines = [
        f"# Guessed from the first {len(table):,} rows of {path.name}: read it before you train.",
        f"name = {_text(path.name.partition('.')[0])}",
        f"file = {_text(path.name)}  # beside this schema",
        *([f"delimiter = {_text(delimiter)}"] if delimiter else []),
        *_labels(chosen, labels),
        *([f"group = {_text(group)}  # GAUC ranks within it"] if group else []),
        _split(times),
        "columns = [",
        *(f"    {_column(c)}" for c in features),
        "]",
    ]
    return "\n".join(lines) + "\n"


def _head(path: Path, delimiter: str | None) -> pd.DataFrame:
    """The first rows, every value as text."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    regular_file(path)
    try:
        if is_parquet(path.name):
            batch = next(pq.ParquetFile(path).iter_batches(ROWS), None)
            whole = pd.DataFrame() if batch is None else batch.to_pandas()
            table = whole.map(_as_text)
        else:
            table = pd.read_csv(
                path, dtype=str, keep_default_na=False, nrows=ROWS, sep=delimiter or ","
            )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeError, pa.ArrowException) as e:
        raise DataError(f"{path} cannot be read as a table: {str(e).splitlines()[0]}") from e
    if not len(table) or table.shape[1] < 2:
        raise DataError(
            f"{path} has {len(table):,} rows and {table.shape[1]} columns: is --delimiter right,"
            " and does its first line name the columns?"
        )
    return table


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple) or hasattr(value, "tolist"):
        return "|".join(map(str, value))
    return "" if value is None or value != value else str(value)


def _looked_at(name: str, texts: pd.Series) -> Found:
    known = texts[~texts.isin(MISSING)]
    values = known.drop_duplicates()
    numbers = len(values) > 0 and bool(values.str.fullmatch(r"-?\d+(\.\d*)?([eE][-+]?\d+)?").all())
    whole = numbers and bool(values.str.fullmatch(r"-?\d+").all())
    return Found(name, values, 1 - len(known) / len(texts), numbers, whole)


def _labels(chosen: list[Found], all_of_them: list[Found]) -> list[str]:
    if not chosen:
        return [
            'labels = ["?"]  # no column holds 0 and 1 in every row: which one is to be learned?'
        ]
    others = ", ".join(c.name for c in all_of_them if c not in chosen)
    note = (
        f"  # or {others}, which hold 0 and 1, too: as a label of its own, not as a column"
        if others
        else ""
    )
    return [f"labels = [{_text(chosen[0].name)}]{note}"]


def _split(times: list[Found]) -> str:
    """By the last fifth of the time where a column has it; else by chance."""
    if not times:
        return "split = { test_fraction = 0.2, random_seed = 1 }  # no column of dates: by chance"
    column = sorted(times, key=lambda c: not c.is_date)[0]
    values = sorted(column.values, key=(lambda v: v) if column.is_date else float)
    start = values[int(0.8 * len(values))]
    start = start[:10] if column.is_date else start
    return (
        f"split = {{ column = {_text(column.name)}, test_from = {start} }}"
        "  # in time order: the last fifth tests"
    )


def _column(found: Found) -> str:
    """A line of the columns, with what is uncertain behind it."""
    name, notes, more = _text(found.name), [], ""
    if found.absent:
        notes.append(f"{100 * found.absent:.3g} % absent")
    separator = None if found.numbers else _separator(found.values)
    if separator is not None:
        kind = "sequence" if _SEQUENCE.search(found.name) else "multi"
        more = f', kind = "{kind}"' + (
            f", separator = {_text(separator)}" if separator != "," else ""
        )
        notes.append(
            "ids in order? then sequence" if kind == "multi" else "the last 10 ids are kept"
        )
    elif found.numbers and (not found.whole or len(found.values) > FEW_IDS) and not _is_id(found):
        fill = ", fill = 0.0" if found.absent else ""
        more = f', kind = "numeric"{fill}'
        if found.whole:
            notes.append("or ids? then categorical")
    elif found.numbers:
        notes.append("or a number? then numeric")
    note = f"  # {'; '.join(notes)}" if notes else ""
    return f"{{ name = {name}{more} }},{note}" if more else f"{name},{note}"


def _is_id(found: Found) -> bool:
    return found.whole and bool(re.search(r"(^|_)id($|_)|Id$|ID$", found.name))


def _separator(values: pd.Series) -> str | None:
    shares = {mark: float(values.str.contains(mark, regex=False).mean()) for mark in SEPARATORS}
    mark = max(shares, key=shares.__getitem__)
    return mark if shares[mark] >= LIST_SHARE else None


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses it bare
