"""A schema guessed from a table (`persia-runtime data schema clicks.csv > clicks.toml`).

What was guessed is written as TOML, and what is uncertain as a comment, for a person to correct.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia_sim.base.files import toml_value
from runtime.data.errors import DataError, header_names
from runtime.data.formats import (
    FEATURES,
    LABEL,
    QUERY,
    VALUE,
    Format,
    atomic_columns,
    libsvm_seen,
    recognised,
)
from runtime.data.ids import MAX_FIELDS
from runtime.data.rows import (
    distinct,
    is_list,
    is_text,
    number_of,
    plain,
    whole_number_of,
)
from runtime.data.schema import UNGUESSED, is_parquet
from runtime.data.table import TableFile
from runtime.preparing.guessed_column import (
    ABSENT,
    AFTERWARDS,
    MOST_OF_A_TIME,
    NUMBER,
    GuessedColumn,
    is_day,
    line_of,
    looked_at,
    noted,
)

if TYPE_CHECKING:
    import pandas as pd

ROWS = 100_000
"""First rows of the table that are looked at."""
_READ_IT = "read it before you train."
_LABEL = re.compile(r"label|click|target|convert|purchas|like|^y$", re.IGNORECASE)
_IS = re.compile(r"^is_", re.IGNORECASE)
_USER = re.compile(
    r"user(?!_?agent)|member|customer|visitor|session|shopper|client|buyer|subscriber|viewer",
    re.IGNORECASE,
)
_LIST = re.compile(r"^qid$|(query|search|srch|request|impression)_?id", re.IGNORECASE)
_OUTCOME = re.compile(
    r"label|click|view|like|follow|share|forward|comment|conver|purchas|buy|bought|order|install",
    re.IGNORECASE,
)


def guessed(path: Path, delimiter: str | None = None) -> str:
    """The text of a schema; raises DataError for what is no table, and for a file whose name no
    schema can hold."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        wrong = "its name is not text in UTF-8, as a schema is; rename it"
        raise DataError(f"{path}: {wrong}") from None
    form = None if delimiter or is_parquet(path.name) else recognised(path)
    if form == "libsvm":
        return "\n".join(_lines_of_libsvm(path)) + "\n"

    # What the values of each column look like; an atomic file names the types of its own.
    file = _file(path, delimiter, form)
    table = _table(file)
    single = table.attrs["single"]
    columns = [looked_at(str(name), table[name], name in single) for name in table.columns]
    absent = list(ABSENT)
    for place, column in enumerate(columns):
        if words := column.words_for_none:
            absent += [word for word in words if word not in absent]
            columns[place] = looked_at(column.name, table[column.name], False, (*ABSENT, *words))

    # RecBole's atomic files say their types, and which tables lie beside.
    joins: list[str] = []
    if form == "recbole":
        types = atomic_columns(path)
        columns = [c.as_typed(types[c.name]) for c in columns]
        joins, more = _beside(path)
        columns += more
    return "\n".join(_lines(file, table, columns, joins, absent)) + "\n"


def _lines_of_libsvm(path: Path) -> Iterator[str]:
    """The schema of a libsvm file: its indexes as a list of ids, and their values where they are
    not all 1 as numbers."""
    rows = 1000
    seen = libsvm_seen(path, rows)
    yield noted("", f"Guessed from the first {rows:,} rows of {path.name}: {_READ_IT}")
    yield f"name = {toml_value(path.name.partition('.')[0])}"
    yield _named(path)
    yield 'format = "libsvm"'
    yield f"labels = [{toml_value(LABEL)}]"
    if not seen.are_classes:
        yield noted(f"regression = [{toml_value(LABEL)}]", "other numbers than 0 and 1")
    by_group = ""
    if seen.has_query:
        yield noted(f"group = {toml_value(QUERY)}", "GAUC ranks within it")
        by_group = ", by_group = true"
    chance = f"split = {{ test_fraction = 0.2, random_seed = 1{by_group} }}"
    yield noted(chance, "no dates: by chance")

    # A model needs ids: where every index is a number, these become some.
    are_ids = len(seen.numbers) < len(seen.indexes)
    kind = 'kind = "numeric", fill = 0.0' if are_ids else 'kind = "bucket"'
    yield "columns = ["
    if are_ids:
        yield f'    {{ name = {toml_value(FEATURES)}, kind = "multi" }},'
    for index in seen.numbers[: MAX_FIELDS - 1]:
        yield f"    {{ name = {toml_value(f'{index}{VALUE}')}, {kind} }},"
    yield "]"


def _named(path: Path) -> str:
    """The line of the file: a schema looks for it from its own folder, wherever that will be."""
    here = "" if path.parent == Path() else f"; if the schema is written here: {path}"
    return noted(f"file = {toml_value(path.name)}", f"beside this schema{here}")


def _lines(
    file: TableFile,
    table: pd.DataFrame,
    columns: list[GuessedColumn],
    joins: list[str],
    absent: list[str],
) -> Iterator[str]:
    """The lines of the schema; ``joins`` are lines already, ``absent`` the words for no value."""
    # What is learned: a column of 0 and 1, else a rating.
    labels = [c for c in columns if c.is_label]
    chosen = sorted(labels, key=lambda c: _unlike_a_label(c.name))[:1]
    ratings = [] if chosen else [c for c in columns if c.is_rating][:1]
    learned = chosen or ratings

    # What is no feature: times, other outcomes, and what no column can be made of.
    times = sorted(
        (c for c in columns if c.is_time),
        key=lambda c: (bool(AFTERWARDS.search(c.name)), not c.is_date, not c.is_stamp),
    )
    outcomes = [c for c in labels if _OUTCOME.search(c.name) and c not in chosen]
    numbers = [c for c in columns if c.kind == "float_seq"]
    features = [c for c in columns if c not in (*learned, *times, *outcomes, *numbers)]
    of_one_id = [c.name for c in features if not c.is_quantity and c.separator is None]
    users, lists = (list(filter(pattern.search, of_one_id)) for pattern in (_USER, _LIST))
    group = min(users, key=lambda name: "session" in name.lower(), default=next(iter(lists), None))

    # Comments, then the keys.
    yield noted("", f"Guessed from the first {len(table):,} rows of {file.path.name}: {_READ_IT}")
    if file.header is not None:
        yield "# The first line looks like values, so the names of the columns are made up."
    elif file.format is None and not is_parquet(file.path.name):
        names = file.column_names()
        if 2 * sum(1 for name in names if re.fullmatch(NUMBER, name)) >= len(names):
            looks = f"The first line looks like values ({', '.join(names[:8])})"
            yield noted("", f'{looks}: if it is, name the columns: header = ["user", ...]')
    for what in (
        *table.attrs["left out"],
        *(f"{c.name} is a list of numbers, of which no column can be made" for c in numbers),
        *(f"{c.name} is a time, too, and another column splits" for c in times[1:]),
        *(f"{c.name} is an outcome by its name, and may be a label of its own" for c in outcomes),
    ):
        yield noted("", f"Left out: {what}.")
    yield f"name = {toml_value(file.path.name.partition('.')[0])}"
    yield _named(file.path)
    if file.format is not None:
        yield f"format = {toml_value(file.format)}"
    elif file.delimiter != ",":
        yield f"delimiter = {toml_value(file.delimiter)}"
    if file.header is not None:
        yield f"header = [{', '.join(map(toml_value, file.header))}]"
    if len(absent) > len(ABSENT):
        yield noted(f"missing = [{', '.join(map(toml_value, absent))}]", "in every column")
    yield from joins
    yield _labels(learned, labels, columns)
    for rating in ratings:
        note = "no column holds 0 and 1: modes, which are compared by AUC, need one"
        yield noted(f"regression = [{toml_value(rating.name)}]", note)
        yield from _that_makes_a_label(file, rating)
    if group is not None:
        yield noted(f"group = {toml_value(group)}", "GAUC ranks within it")
    yield _split(times, file)
    yield "columns = ["
    for column in features:
        yield f"    {line_of(column, absent, file.delimiter == ';')}"
    yield "]"


def _that_makes_a_label(file: TableFile, rating: GuessedColumn) -> Iterator[str]:
    """A comment with the command that writes 0 and 1 in place of a rating; none for files that
    pandas does not read as they are, and where a shell would not read a name so."""
    names_are_plain = all(re.fullmatch(r"[\w./-]+", n) for n in (str(file.path), rating.name))
    other = file.header is not None or file.format is not None or is_parquet(file.path.name)
    if other or not names_are_plain:
        return
    middle = float(np.median([number_of(value) for value in rating.values]))
    separator = "" if file.delimiter == "," else f", sep={file.delimiter!r}"
    yield "# This writes liked.csv with one, 1 from the middle rating on; guess again from that:"
    yield (
        f'#   python -c "import pandas as pd; log = pd.read_csv({str(file.path)!r}{separator});'
        f" log['liked'] = 1 * (log.pop({rating.name!r}) >= {middle:g});"
        " log.to_csv('liked.csv', index=False)\""
    )


def _unlike_a_label(name: str) -> int:
    """0 for the name of a label, 1 where it may be one, else 2."""
    return 0 if _LABEL.search(name) else 1 if _IS.search(name) else 2


def _file(path: Path, delimiter: str | None, form: Format | None) -> TableFile:
    """The file as it is to be read: with names that are made up where it has none."""
    if is_parquet(path.name):
        return TableFile(path=path)
    if form is not None:
        return TableFile(path=path, delimiter="\t", quotes=False, format=form, skip_bad_rows=True)
    file = TableFile(path=path, delimiter=delimiter or ",", skip_bad_rows=True)
    if delimiter is None and _is_criteo(header_names(path, "\t", quotes=False)):
        file.delimiter = "\t"
    names = file.column_names()
    if delimiter is None and len(names) == 1 and "::" not in names[0]:
        file.delimiter = next((mark for mark in _OTHER_DELIMITERS if mark in names[0]), ",")
        names = file.column_names()
    numbers = [name for name in names if re.fullmatch(NUMBER, name)]
    if _is_criteo(names):
        file.header = (*["label"][: len(names) - 39], *_CRITEO)
    elif len(numbers) == len(names) and not _are_counted(names):
        file.header = tuple(f"c{number}" for number in range(1, len(names) + 1))
    return file


_OTHER_DELIMITERS = "\t;"
"""What separates columns where no comma does."""


def _are_counted(names: Sequence[str]) -> bool:
    """Whether names are 0, 1, 2, ..., or 1, 2, ..., as pandas and others name columns."""
    return any(list(names) == [str(first + k) for k in range(len(names))] for first in (0, 1))


_CRITEO = (*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27)))
"""Thirteen numbers and 26 categories, as the rows of Criteo's logs have them behind the label."""


def _is_criteo(names: Sequence[str]) -> bool:
    """Whether a first line is a row of Criteo's logs, with or without its label."""
    labels = names[: len(names) - 39]
    categories = names[-26:]
    numbers = names[len(labels) : len(labels) + 13]
    return (
        len(names) in (39, 40)
        and all(label in ("0", "1") for label in labels)
        and all(re.fullmatch(r"-?\d*", text) for text in numbers)
        and all(re.fullmatch(r"[0-9a-f]{8}|", text) for text in categories)
    )


def _beside(path: Path) -> tuple[list[str], list[GuessedColumn]]:
    """The joins with the atomic files of users and items beside the one of interactions, and what
    the columns look like that they add."""
    lines = []
    result = list[GuessedColumn]()
    known = atomic_columns(path)

    # A file beside it is joined by its first column, where interactions have that, too.
    for suffix in (".user", ".item"):
        other = path.with_suffix(suffix)
        if path.suffix != ".inter" or not other.is_file():
            continue
        types = atomic_columns(other)
        key = next(iter(types))
        if key not in known:
            continue
        lines.append(
            f"    {{ file = {toml_value(other.name)}, left = {toml_value(key)},"
            f" right = {toml_value(key)} }},"
        )

        # What it adds; a column of users that rises is no time of the interactions.
        table = _table(_file(other, None, "recbole"))
        names = [name for name in table.columns if name not in known]
        seen = [looked_at(name, table[name], False).as_typed(types[name]) for name in names]
        result += [column._replace(rises=False) for column in seen]
    return (["joins = [", *lines, "]"] if lines else []), result


def _table(file: TableFile) -> pd.DataFrame:
    """The first rows as training reads them; every value as text.

    Its ``attrs`` say what was left out, in sentences, and which columns are of a type of single
    values.
    """
    import pandas as pd

    names = file.column_names()
    if len(names) < 2:
        raise DataError(
            f"{file.path} has {len(names)} column: is --delimiter right, and does its first line"
            f" name the columns?{_other_form(names)}"
        )
    usable = [name for name in names if name and names.count(name) == 1]
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in usable}
    odd = dict[str, str]()
    single = set[str]()
    rows = 0

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
        if rows >= ROWS:
            break

    # What a person should know of what is not there.
    table = pd.DataFrame(
        {n: np.concatenate(arrays) for n, arrays in pieces.items() if n not in odd}
    )
    doubled = [f"{n} is the name of {names.count(n)} columns" for n in {*names} - {"", *usable}]
    nameless = ["a column has no name (an index?)"] * ("" in names)
    broken = f"{len(file.skipped):,} broken lines: see `data check`" if file.skipped else ""
    table.attrs["left out"] = [*sorted(doubled), *nameless, *odd.values(), *filter(None, [broken])]
    table.attrs["single"] = single
    return table.iloc[:ROWS]


def _other_form(names: Sequence[str]) -> str:
    """What a line of one column may be in another library's format, and what to do."""
    line = ",".join(names)
    if "::" in line:
        return (
            "\n  '::' stands between its values, and a delimiter is one character:"
            " sed 's/::/\\t/g' FILE > NEW.tsv"
        )
    if re.match(r"[^|]*\|\S* \S", line):
        return "\n  lines of Vowpal Wabbit are not read: make a table of them, a column a namespace"
    if re.search(r"\S:\S+:\S", line):
        return "; make a table of libffm's lines first (docs/training.md)"
    return ""


def _texts(array: Any) -> np.ndarray | None:
    """The values of a column; those of a list side by side. None where they are neither single
    values nor lists of these. Equal ones are one object, however many rows have them."""
    import pyarrow as pa
    import pyarrow.types as kinds

    # Bytes that are texts.
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

    # Single values: a text for each different one.
    array = array.cast(pa.string()) if kinds.is_decimal(array.type) else array
    values, which = distinct(array)
    return np.take(np.array([*map(_as_text, values), ""], object), which)


def _as_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _labels(
    chosen: list[GuessedColumn], all_of_them: list[GuessedColumn], columns: list[GuessedColumn]
) -> str:
    if not chosen:
        missing = "no column holds 0 and 1 in every row: which is learned?"
        two = [c for c in columns if len(c.values) == 2 and not c.absent]
        for column in two:
            words = " and ".join(sorted(column.values))
            missing += f" {column.name} holds {words}: a label must be 0 and 1, so write these"
        return noted(f"labels = [{toml_value(UNGUESSED)}]", missing)
    others = ", ".join(c.name for c in all_of_them if c not in chosen)
    note = f"or {others}, which hold 0 and 1, too: as a label of its own, not as a column"
    return noted(f"labels = [{toml_value(chosen[0].name)}]", note if others else "")


def _split(times: list[GuessedColumn], file: TableFile) -> str:
    """By time where a column has it, about the last fifth of all rows; else by chance."""
    # By chance where nothing is a time, or all rows have one.
    by_chance = "split = { test_fraction = 0.2, random_seed = 1 }"
    if not times:
        return noted(by_chance, "no column of dates: by chance")
    column = times[0]
    keys, counts = _keys(file, column)
    if len(keys) < 2:
        return noted(by_chance, f"{column.name} has one value: by chance")

    # From the key on that leaves about a fifth of the rows to test; never from the first one.
    share = 1 - np.cumsum(counts)[:-1] / counts.sum()  # from each key on, but the first
    nearest = int(np.argmin(np.abs(share - 0.2)[::-1]))  # of two as near the later one
    chosen = len(share) - 1 - nearest
    key = str(keys[chosen + 1])
    start = f"{key}{column.midnight}" if column.is_date else toml_value(key)  # TOML has no 08
    return noted(
        f"split = {{ column = {toml_value(column.name)}, test_from = {start} }}",
        f"in time order: the last {100 * share[chosen]:.0f} % tests",
    )


def _keys(file: TableFile, column: GuessedColumn) -> tuple[np.ndarray, np.ndarray]:
    """The distinct days or numbers of a column of times in all rows, rising, and how many rows have
    each; eight bytes a row are held."""
    # Whole numbers exactly: float64 has no odd ones above 2**53.
    read_number = whole_number_of if column.whole else number_of
    dtype = np.int64 if column.whole else np.float64
    pieces = []
    for read in file.stream([column.name]):
        values, which = distinct(plain(read.table.column(column.name)))
        texts = [_as_text(value).strip() for value in values]
        if column.is_date:
            known = [text[:10] if is_day(text[:10]) else "" for text in texts]
            pieces.append(np.array([*known, ""], "datetime64[D]")[which])
            pieces[-1] = pieces[-1][~np.isnat(pieces[-1])]
            continue
        numbers = [None if text in ABSENT else read_number(text) for text in texts]
        is_known = np.array([*(n is not None and abs(n) < MOST_OF_A_TIME for n in numbers), False])
        parsed = np.where(is_known, np.array([*numbers, None], object), 0).astype(dtype)
        pieces.append(parsed[which][is_known[which]])
    return np.unique(np.concatenate(pieces), return_counts=True)
