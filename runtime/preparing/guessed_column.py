"""What the values of one column look like, for a guess of its kind, and its line of the schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, NamedTuple

from persia_sim.base.files import toml_value
from persia_sim.base.rules import printable
from runtime.data.rows import number_of

if TYPE_CHECKING:
    import pandas as pd

ABSENT = ("", "?")
"""Texts that stand for an absent value, unless a schema says otherwise."""
SEPARATORS = ("|", ";", ",", " ")
"""Between the ids of a list; of two that hold as often the first: a blank stands behind a comma."""
LIST_SHARE = 0.2
"""Share of the values that hold a separator where a column is a list of ids."""
FEW_IDS = 1000
"""Whole numbers of fewer different values pass for ids, of more for numbers."""
MOST_OF_A_TIME = 2**63
"""No clock counts so far: larger numbers are none of a time."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?", re.ASCII)
_ZONE = re.compile(r"\d\d:\d\d.*?(Z|[+-]\d\d:?\d\d)$", re.ASCII)
_SEQUENCE = re.compile(r"hist|seq|last_|recent|previous", re.IGNORECASE)
_WORDS_FOR_NONE = frozenset(
    ["NULL", "Null", "null", "\\N", "NaN", "nan", "None", "none", "N/A", "n/a", "NA", "<NA>", "nil"]
)
"""What databases and libraries write where nothing is; among texts it may be a word like others."""
_RARE_SEPARATORS = "^#~"
"""Between the ids of a list, or part of a name."""
_WEIGHTED = re.compile(r"[^:]+:\d+(\.\d*)?([,;| ][^:]+:\d+(\.\d*)?)*", re.ASCII)
NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"-?\d+", re.ASCII)
_RATING = re.compile(r"rating|score|stars", re.IGNORECASE)
_ID = re.compile(r"(^|_)id($|_)|Id$|ID$")
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

AFTERWARDS = re.compile(
    r"conver|purchas|dwell|duration|watch|play_?time|delay|paid|payment|refund|revenue|profit|gmv",
    re.IGNORECASE,
)
"""Names of what is known only when the outcome is."""
_PLACE = re.compile(r"^(rank|pos(ition)?|slot)$|_(rank|pos(ition)?)$", re.IGNORECASE)


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
    kind: str | None = None
    """Its type, where the file names it."""

    def as_typed(self, kind: str) -> GuessedColumn:
        """The column as the type of an atomic file has it: token, float, or a list of them."""
        if kind in ("token", "token_seq"):
            return self._replace(numbers=False, whole=False, is_single=kind == "token", kind=kind)
        return self._replace(is_single=kind == "float", kind=kind)

    @property
    def words_for_none(self) -> list[str]:
        """Words such as n/a among values that else are numbers; none of any other column."""
        if self.numbers or self.is_single:
            return []
        words = self.values[~self.values.str.fullmatch(NUMBER)]
        is_rare = len(words) <= min(len(ABSENT), 0.2 * len(self.values))
        return list(words) if is_rare else []

    @property
    def is_rating(self) -> bool:
        """A number that is learned where no label is 0 or 1."""
        return self.numbers and not self.absent and bool(_RATING.search(self.name))

    @property
    def is_label(self) -> bool:
        """0 and 1 in every row, however they are written."""
        numbers = self.values.map(number_of) if 0 < len(self.values) <= FEW_IDS else []
        return not self.absent and set(numbers) == {0.0, 1.0}

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
        sign = zone[:1]
        digits = zone[1:].replace(":", "")
        shown = f"{sign}{digits[:2]}:{digits[2:]}" if digits else zone
        return f"T00:00:00{shown}" if zone else ""

    @property
    def _zones(self) -> pd.Series:
        return self.values.str.extract(_ZONE, expand=False).fillna("")

    @property
    def has_decimal_commas(self) -> bool:
        """Whether every value is a number, and many have a comma before their decimals."""
        values = self.values
        if not len(values) or self.numbers or not values.str.fullmatch(r"[-+]?\d+(,\d+)?").all():
            return False
        return values.str.contains(",").mean() > 0.5 and not self.is_single

    @property
    def separator(self) -> str | None:
        """Between the ids of a list; None where a sample has one value."""
        if self.kind == "token_seq":
            return " "
        mark = self.mark
        return mark if mark is not None and self._are_ids(mark) else None

    @property
    def mark(self) -> str | None:
        """What may separate the ids of a list."""
        return self.mark_among(SEPARATORS)

    def mark_among(self, marks: Sequence[str]) -> str | None:
        """Of some marks the one that most values hold, where enough of them do."""
        shares = {mark: self.values.str.contains(mark, regex=False).mean() for mark in marks}
        mark = max(shares, key=shares.__getitem__)
        is_one = self.numbers or self.is_single
        return mark if not is_one and shares[mark] >= LIST_SHARE else None

    def _are_ids(self, mark: str) -> bool:
        """Whether the pieces between are ids rather than words of one name: ids have no letters,
        or come again and again in other lists."""
        if mark in ("|", ";") or self.values.str.startswith("[").mean() > 0.5:
            return True  # no name holds these marks, nor begins with a bracket
        pieces = self.values.str.split(mark).explode().str.strip()
        has_letters = self.values.str.contains(r"[^\W\d_]").any()
        return not has_letters or pieces.nunique() < len(self.values)

    @property
    def is_quantity(self) -> bool:
        """A number that is no id, as far as one can tell."""
        if self.kind == "float":
            return self.numbers
        an_id = self.whole and (len(self.values) <= FEW_IDS or bool(_ID.search(self.name)))
        return self.numbers and not an_id


def looked_at(
    name: str, texts: pd.Series, is_single: bool, absent: Sequence[str] = ABSENT
) -> GuessedColumn:
    """What the texts of a column, one a row, look like; ``is_single``: by the column's type."""
    texts = texts.str.strip()  # blanks around a value do not count
    known = texts[~texts.isin(absent)]
    values = known.drop_duplicates()
    numbers = len(values) > 0 and bool(values.str.fullmatch(NUMBER).all())
    whole = numbers and bool(values.str.fullmatch(_WHOLE).all())
    rises = False
    if numbers and len(values) > 1:
        of_rows = known.astype(float)
        rises = bool(of_rows.is_monotonic_increasing and of_rows.abs().max() < MOST_OF_A_TIME)
    return GuessedColumn(
        name, values, 1 - len(known) / len(texts), numbers, whole, is_single, rises
    )


def known_too_late(name: str) -> str:
    """What a person should ask of a column whose name is of what is known after the label, or only
    when the sample has been shown; empty for any other name."""
    if AFTERWARDS.search(name):
        return "known only after the label? then leave it out"
    if _PLACE.search(name):
        return "the place where it was shown? not known before: then leave it out"
    return ""


def _days(texts: pd.Series) -> pd.Series:
    """The days of those texts that are dates of the calendar, or such a date and a time."""
    days = texts[texts.str.fullmatch(_DATE)].str[:10]
    return days[days.isin([day for day in days.unique() if is_day(day)])]


def is_day(text: str) -> bool:
    """Whether a text is a day of the calendar, YYYY-MM-DD."""
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def noted(line: str, note: str) -> str:
    """A line of TOML with a comment, in which a name that holds a line end begins no line."""
    return f"{line}  # {printable(note)}".lstrip() if note else line


def line_of(column: GuessedColumn, absent: Sequence[str], may_have_commas: bool) -> str:
    """A line of the columns, with what is uncertain behind it; ``may_have_commas``: within a
    number, as the file's own separator is another."""
    decimal = may_have_commas and column.has_decimal_commas
    # The kind that the values suggest, and what a person should decide better.
    name = toml_value(column.name)
    more = ""
    notes = [f"{100 * column.absent:.3g} % absent"] if column.absent else []
    if (separator := column.separator) is not None and not decimal:
        in_order = _SEQUENCE.search(column.name)
        more = ', kind = "sequence"' if in_order else ', kind = "multi"'
        more += f", separator = {toml_value(separator)}" if separator != "," else ""
        notes.append("the last 10 ids are kept" if in_order else "ids in order? then sequence")
        if column.values.str.startswith("[").mean() > 0.5:
            notes.append("brackets and quotes stay in the ids: write a|b in the file")
    elif column.is_quantity:
        fill = ", fill = 0.0" if column.absent else ""
        more = f', kind = "numeric"{fill}'
        if column.whole:
            notes.append("or ids? then categorical")
    elif column.numbers:
        notes.append("or a number? then numeric")

    # A name alone is a column of ids.
    notes += _others(column)
    if decimal:
        notes.append("numbers? their decimal comma is not read: write 12.5, then numeric")
    if late := known_too_late(column.name):
        notes.append(late)
    for word in column.values[column.values.isin(_WORDS_FOR_NONE)]:
        if word not in absent:
            meant = ", ".join(map(toml_value, (*absent, word)))
            notes.append(f"{word} is an id here; does it mean none? then missing = [{meant}]")
    return noted(f"{{ name = {name}{more} }}," if more else f"{name},", "; ".join(notes))


def _others(column: GuessedColumn) -> list[str]:
    """What the values may be that no guess goes by: a person knows."""
    if column.numbers:
        return ["a time? then split by it"] if column.sounds_like_time else []
    if column.is_single or not len(column.values):
        return []
    if column.values.str.fullmatch(_WEIGHTED).mean() > 0.5:
        return ["id:weight? the weights become part of the ids"]
    mark = column.mark or column.mark_among(_RARE_SEPARATORS)
    if column.separator is None and mark is not None:
        return [f'a list? then kind = "multi", separator = {toml_value(mark)}']
    return []
