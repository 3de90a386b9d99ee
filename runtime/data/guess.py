"""A schema guessed from a table (`persia-runtime data schema clicks.csv > clicks.toml`).

What was guessed is written as TOML, and what is uncertain as a comment, for a person to correct.
"""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from persia_sim.base.rules import printable
from runtime.data.errors import DataError
from runtime.data.rows import (
    distinct,
    is_list,
    is_text,
    number_of,
    plain,
)
from runtime.data.schema import is_parquet
from runtime.data.table import TableFile

if TYPE_CHECKING:
    import pandas as pd

ROWS = 100_000
"""First rows of the table that are looked at."""
ABSENT = ("", "?")
"""As a schema has it, unless it says otherwise."""
SEPARATORS = ("|", ";", " ", ",")
LIST_SHARE = 0.2
"""Of the values: so many hold a separator where a column is a list of ids."""
FEW_IDS = 1000
"""Whole numbers of fewer different values pass for ids, of more for numbers."""
_READ_IT = "read it before you train."
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?", re.ASCII)
_ZONE = re.compile(r"\d\d:\d\d.*?(Z|[+-]\d\d:?\d\d)$", re.ASCII)
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"-?\d+", re.ASCII)
_LABEL = re.compile(r"label|click|target|convert|purchas|like|is_|^y$", re.IGNORECASE)
_USER = re.compile(r"user|member|customer|visitor|session", re.IGNORECASE)
_SEQUENCE = re.compile(r"hist|seq|last_|recent|previous", re.IGNORECASE)
_ID = re.compile(r"(^|_)id($|_)|Id$|ID$")
_OUTCOME = re.compile(
    r"label|click|view|like|follow|share|forward|comment|conver|purchas|buy|bought|order|install",
    re.IGNORECASE,
)
_NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_TIMES = frozenset(
    ["date", "day", "time", "timestamp", "datetime", "hour", "week", "month", "year", "ts"]
)
_CALENDAR = re.compile(
    r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])|"  # yyyymmdd
    r"\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])([01]\d|2[0-3])",  # yymmddhh
    re.ASCII,
)
_SINCE_1970 = re.compile(r"1?\d{9}(\d{3}){0,3}", re.ASCII)
"""Seconds from 1973 on, or their thousandths, millionths or billionths."""
_WEIGHTED = re.compile(r"[^:]+:\d+(\.\d*)?([,;| ][^:]+:\d+(\.\d*)?)*", re.ASCII)


class GuessedColumn(NamedTuple):
    """What the values of one column look like."""

    name: str
    values: pd.Series
    """Distinct texts, absent ones left out."""
    absent: float
    """Share of the rows."""
    numbers: bool
    whole: bool
    is_single: bool
    """Its type holds one value a row, whatever the text of one looks like."""
    rises: bool
    """From row to row, as the time of a log does."""

    @property
    def is_label(self) -> bool:
        """0 and 1 in every row, however they are written."""
        found = self.values.map(number_of) if 0 < len(self.values) <= FEW_IDS else []
        return not self.absent and set(found) == {0.0, 1.0}

    @property
    def is_date(self) -> bool:
        """Every value is a date, or date and time."""
        if not 0 < len(self.values) == len(_days(self.values)):
            return False
        return len(set(self._zones == "")) == 1  # those with a zone compare with such alone

    @property
    def sounds_like_time(self) -> bool:
        """Whether a word of its name is one of times."""
        return not _TIMES.isdisjoint(part.lower() for part in _NAME_PARTS.findall(self.name))

    @property
    def is_stamp(self) -> bool:
        """Every value is a number that writes a day, an hour, or seconds (or parts) since 1970."""
        if not (self.whole and self.sounds_like_time):
            return False
        return any(self.values.str.fullmatch(form).all() for form in (_CALENDAR, _SINCE_1970))

    @property
    def is_time(self) -> bool:
        """By its type, its digits or, where its name says so, its order."""
        return self.is_date or self.is_stamp or (self.sounds_like_time and self.rises)

    @property
    def midnight(self) -> str:
        """Behind a day, in the zone of most values; empty where they have none."""
        zone = str(self._zones.mode()[0])
        sign, digits = zone[:1], zone[1:].replace(":", "")
        shown = f"{sign}{digits[:2]}:{digits[2:]}" if digits else zone
        return f"T00:00:00{shown}" if zone else ""

    @property
    def _zones(self) -> pd.Series:
        return self.values.str.extract(_ZONE, expand=False).fillna("")

    @property
    def separator(self) -> str | None:
        """Between the ids of a list; None where a sample has one value."""
        shares = {mark: self.values.str.contains(mark, regex=False).mean() for mark in SEPARATORS}
        mark = max(shares, key=shares.__getitem__)
        is_one = self.numbers or self.is_single
        return mark if not is_one and shares[mark] >= LIST_SHARE else None

    @property
    def is_quantity(self) -> bool:
        """A number that is no id, as far as one can tell."""
        an_id = self.whole and (len(self.values) <= FEW_IDS or bool(_ID.search(self.name)))
        return self.numbers and not an_id


def guessed(path: Path, delimiter: str | None = None) -> str:
    """The text of a schema; raises DataError for what is no table, and for a file whose name no
    schema can hold."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        wrong = "its name is not text in UTF-8, as a schema is; rename it"
        raise DataError(f"{path}: {wrong}") from None
    table = _table(path, delimiter)
    single = table.attrs["single"]
    columns = [_looked_at(str(name), table[name], name in single) for name in table.columns]
    labels = [c for c in columns if c.is_label]
    chosen = sorted(labels, key=lambda c: not _LABEL.search(c.name))[:1]
    times = sorted((c for c in columns if c.is_time), key=lambda c: (not c.is_date, not c.is_stamp))
    outcomes = [c for c in labels if _OUTCOME.search(c.name) and c not in chosen]
    features = [c for c in columns if c not in (*chosen, *times, *outcomes)]
    left_out = [
        *table.attrs["left out"],
        *(f"{c.name} is a time, too, and another column splits" for c in times[1:]),
        *(f"{c.name} is an outcome by its name, and may be a label of its own" for c in outcomes),
    ]
    of_one_id = [c.name for c in features if not c.is_quantity and c.separator is None]
    group = next(filter(_USER.search, of_one_id), None)
    lines = [
        _noted("", f"Guessed from the first {len(table):,} rows of {path.name}: {_READ_IT}"),
        *_first_line(list(table.columns), path),
        *(_noted("", f"Left out: {what}.") for what in left_out),
        f"name = {_text(path.name.partition('.')[0])}",
        _noted(f"file = {_text(path.name)}", "beside this schema"),
        *([f"delimiter = {_text(delimiter)}"] if delimiter else []),
        _labels(chosen, labels),
        *([_noted(f"group = {_text(group)}", "GAUC ranks within it")] if group else []),
        _split(times, path, delimiter),
        "columns = [",
        *(f"    {_column(c)}" for c in features),
        "]",
    ]
    return "\n".join(lines) + "\n"


def _first_line(names: list[str], path: Path) -> list[str]:
    """A comment where the names of a text file are numbers, as values are."""
    numbers = [name for name in names if re.fullmatch(_NUMBER, name)]
    if is_parquet(path.name) or 2 * len(numbers) < len(names):
        return []
    told = f"The first line looks like values ({', '.join(names[:8])}): if it is, name the columns"
    return [_noted("", f'{told}: header = ["user", ...]')]


def _table(path: Path, delimiter: str | None, only: str | None = None) -> pd.DataFrame:
    """The first rows, or all of one column alone, as training reads them; every value as text.

    Its ``attrs`` say what was left out, in sentences, and which columns are of a type of single
    values.
    """
    import pandas as pd

    file = TableFile(path=path, delimiter=delimiter or ",", skip_bad_rows=True)
    names = file.column_names()
    if len(names) < 2:
        raise DataError(
            f"{path} has {len(names)} column: is --delimiter right, and does its first line name"
            " the columns?"
        )
    usable = [name for name in names if name and names.count(name) == 1]
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in ([only] if only else usable)}
    odd, single, rows = dict[str, str](), set[str](), 0

    # As many rows as are asked for, in pieces of a bounded size.
    for read in file.stream(tuple(pieces)):
        rows += len(read.numbers)
        for name in pieces.keys() - odd.keys():
            texts = _texts(array := read.table.column(name))
            if not is_text(plain(array).type) and not is_list(array.type):
                single.add(name)
            if texts is None:
                odd[name] = f"{name} holds {array.type}, of which no column can be made"
            else:
                pieces[name].append(texts)
        if not only and rows >= ROWS:
            break

    # What a person should know of what is not there.
    table = pd.DataFrame({n: np.concatenate(found) for n, found in pieces.items() if n not in odd})
    doubled = [f"{n} is the name of {names.count(n)} columns" for n in {*names} - {"", *usable}]
    nameless = ["a column has no name (an index?)"] * ("" in names)
    broken = f"{len(file.skipped):,} broken lines: see `data check`" if file.skipped else ""
    table.attrs["left out"] = [*sorted(doubled), *nameless, *odd.values(), *filter(None, [broken])]
    table.attrs["single"] = single
    return table.iloc[: None if only else ROWS]


def _texts(array: Any) -> np.ndarray | None:
    """The values of a column; those of a list side by side. None where they are neither single
    values nor lists of these. Equal ones are one object, however many rows have them."""
    import pyarrow as pa
    import pyarrow.types as kinds

    array = plain(array)
    if kinds.is_binary(array.type) or kinds.is_large_binary(array.type):
        try:
            array = array.cast(pa.string())
        except pa.ArrowException:  # no text in UTF-8
            return None
    if is_list(array.type) and not kinds.is_nested(array.type.value_type):
        lists = array.to_pylist()
        return np.array(
            ["" if one is None else "|".join(map(_as_text, one)) for one in lists], object
        )
    if kinds.is_nested(array.type):
        return None
    array = array.cast(pa.string()) if kinds.is_decimal(array.type) else array
    values, which = distinct(array)
    return np.take(np.array([*map(_as_text, values), ""], object), which)


def _as_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _looked_at(name: str, texts: pd.Series, is_single: bool) -> GuessedColumn:
    known = texts[~texts.isin(ABSENT)]
    values = known.drop_duplicates()
    numbers = len(values) > 0 and bool(values.str.fullmatch(_NUMBER).all())
    whole = numbers and bool(values.str.fullmatch(_WHOLE).all())
    of_rows = known.astype(float) if numbers and len(values) > 1 else None
    rises = of_rows is not None and bool(of_rows.is_monotonic_increasing)
    return GuessedColumn(
        name, values, 1 - len(known) / len(texts), numbers, whole, is_single, rises
    )


def _days(texts: pd.Series) -> pd.Series:
    """The days of those texts that are dates of the calendar, or such a date and a time."""
    days = texts[texts.str.fullmatch(_DATE)].str[:10]
    return days[days.isin([day for day in days.unique() if _is_day(day)])]


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _labels(chosen: list[GuessedColumn], all_of_them: list[GuessedColumn]) -> str:
    if not chosen:
        return _noted('labels = ["?"]', "no column holds 0 and 1 in every row: which is learned?")
    others = ", ".join(c.name for c in all_of_them if c not in chosen)
    note = f"or {others}, which hold 0 and 1, too: as a label of its own, not as a column"
    return _noted(f"labels = [{_text(chosen[0].name)}]", note if others else "")


def _split(times: list[GuessedColumn], path: Path, delimiter: str | None) -> str:
    """By time where a column has it, about the last fifth of all rows; else by chance."""
    import pandas as pd

    by_chance = "split = { test_fraction = 0.2, random_seed = 1 }"
    if not times:
        return _noted(by_chance, "no column of dates: by chance")
    column = times[0]
    texts = _table(path, delimiter, column.name)[column.name]
    told = _days(texts) if column.is_date else texts
    keys = told if column.is_date else pd.to_numeric(texts, errors="coerce").dropna()
    later = keys.value_counts(normalize=True).sort_index(ascending=False).cumsum()
    if len(later) < 2:
        return _noted(by_chance, f"{column.name} has one value: by chance")
    share = later.iloc[: max(1, len(later) - 1)]  # the first value alone would leave no training
    chosen = (share - 0.2).abs().idxmin()
    start = told[keys.index[keys == chosen][0]]
    start = f"{start}{column.midnight}" if column.is_date else _text(start)  # TOML has no 08
    return _noted(
        f"split = {{ column = {_text(column.name)}, test_from = {start} }}",
        f"in time order: the last {100 * share[chosen]:.0f} % tests",
    )


def _column(found: GuessedColumn) -> str:
    """A line of the columns, with what is uncertain behind it."""
    name, more = _text(found.name), ""
    notes = [f"{100 * found.absent:.3g} % absent"] if found.absent else []
    if (separator := found.separator) is not None:
        kept = _SEQUENCE.search(found.name)
        more = ', kind = "sequence"' if kept else ', kind = "multi"'
        more += f", separator = {_text(separator)}" if separator != "," else ""
        notes.append("the last 10 ids are kept" if kept else "ids in order? then sequence")
        if found.values.str.startswith("[").mean() > 0.5:
            notes.append("brackets and quotes stay in the ids: write a|b in the file")
    elif found.is_quantity:
        fill = ", fill = 0.0" if found.absent else ""
        more = f', kind = "numeric"{fill}'
        if found.whole:
            notes.append("or ids? then categorical")
    elif found.numbers:
        notes.append("or a number? then numeric")
    notes += _others(found)
    return _noted(f"{{ name = {name}{more} }}," if more else f"{name},", "; ".join(notes))


def _others(found: GuessedColumn) -> list[str]:
    """What the values may be that no guess goes by: a person knows."""
    if found.numbers:
        return ["a time? then split by it"] if found.sounds_like_time else []
    if found.is_single or not len(found.values):
        return []
    if found.values.str.fullmatch(_WEIGHTED).mean() > 0.5:
        return ["id:weight? the weights become part of the ids"]
    others = found.values[~found.values.str.fullmatch(_NUMBER)]
    if len(others) <= min(len(ABSENT), 0.2 * len(found.values)):
        missing = ", ".join(map(_text, (*ABSENT, *others)))
        return [f"most are numbers: missing = [{missing}], and numeric?"]
    shares = {mark: found.values.str.contains(mark, regex=False).mean() for mark in "^#~"}
    mark = max(shares, key=shares.__getitem__)
    if found.separator is None and shares[mark] >= LIST_SHARE:
        return [f'a list? then kind = "multi", separator = {_text(mark)}']
    return []


def _noted(line: str, note: str) -> str:
    """A line of TOML with a comment, in which a name that holds a line end begins no line."""
    return f"{line}  # {printable(note)}".lstrip() if note else line


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses it bare
