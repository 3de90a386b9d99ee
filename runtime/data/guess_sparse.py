"""A schema guessed from a libsvm or ffm file, and how a guess is written as TOML."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from persia_sim.base.rules import printable
from runtime.data.errors import DataError
from runtime.data.formats import FEATURES, LABEL, VALUE, Format, SparseLine, sparse_lines
from runtime.data.ids import MAX_FIELDS

MOST_NUMBERS = 200
"""Indexes with values of their own that become columns; of more, the values are left out."""


@dataclass(slots=True)
class _Place:
    """What the first lines hold of one field of ffm, or of one index of libsvm."""

    features: set[str] = field(default_factory=set)
    values: set[float] = field(default_factory=set)
    most: int = 0
    """Entries of one line."""

    @property
    def is_number(self) -> bool:
        """One feature, whose value differs from line to line."""
        return self.most <= 1 and len(self.features) == 1 and len(self.values) > 1


def guessed_sparse(path: Path, form: Format, rows: int) -> str:
    """The text of a schema, from the first ``rows`` lines."""
    # Every field or index, and the labels.
    labels = set[str | None]()
    places = dict[str, _Place]()
    count = 0
    for number, line in islice(sparse_lines(path, form), rows):
        if not isinstance(line, SparseLine):
            raise DataError(f"{path}, row {number}: {line}; correct the line")
        count = number
        labels.add(line.label)
        entries = Counter(_place_of(form, entry) for entry in line.entries)
        for entry in line.entries:
            name = _place_of(form, entry)
            place = places.setdefault(name, _Place())
            place.most = max(place.most, entries[name])
            if len(place.features) < 2:  # more say nothing
                place.features.add(entry[1])
            if len(place.values) < 2:
                place.values.add(entry[2])

    # Values count where they say something, features everywhere else.
    numbers = [name for name, place in places.items() if place.is_number]
    if numbers and len(numbers) == len(places):  # numbers alone, and a model needs ids
        beginnings = (
            f"{{ name = {toml_text(name + VALUE)}, kind = " for name in numbers[:MAX_FIELDS]
        )
        columns = [
            noted(f'{column}"bucket" }},', "a number; no column is an id") for column in beginnings
        ]
    elif form == "ffm":
        columns = _columns_of_ffm(places)
    else:
        columns = _columns_of_libsvm(numbers)
    return "\n".join(
        [
            noted(
                "",
                f"Guessed from the first {count:,} rows of {path.name}: read it before you train.",
            ),
            f"name = {toml_text(path.name.partition('.')[0])}",
            noted(f"file = {toml_text(path.name)}", "beside this schema"),
            f"format = {toml_text(form)}",
            *_labels(labels),
            noted("split = { test_fraction = 0.2, random_seed = 1 }", "no dates: by chance"),
            "columns = [",
            *(f"    {column}" for column in columns),
            "]\n",
        ]
    )


def _place_of(form: Format, entry: tuple[str, str, float]) -> str:
    return entry[0] if form == "ffm" else entry[1]


def _labels(values: set[str | None]) -> list[str]:
    if None in values:
        return [noted('labels = ["?"]', "a line without a label: predict takes such a file")]
    is_class = {float(label) for label in values if label is not None} <= {0.0, 1.0}
    lines = [f"labels = [{toml_text(LABEL)}]"]
    if not is_class:
        lines.append(noted(f"regression = [{toml_text(LABEL)}]", "other numbers than 0 and 1"))
    return lines


def _columns_of_libsvm(numbers: list[str]) -> list[str]:
    ids = f'{{ name = {toml_text(FEATURES)}, kind = "multi", separator = " " }},'
    apart = [f"{{ name = {toml_text(name + VALUE)}, kind = " for name in numbers]
    if len(numbers) > MOST_NUMBERS:
        return [noted(ids, f"the values of {len(numbers):,} indexes do not count")]
    return [ids, *(f'{line}"numeric", fill = 0.0 }},' for line in apart)]


def _columns_of_ffm(places: dict[str, _Place]) -> list[str]:
    result = []
    in_order = sorted(places, key=lambda name: (len(name), name))
    for name in in_order[:MAX_FIELDS]:
        place = places[name]
        if place.is_number:
            column = f"{{ name = {toml_text(name + VALUE)}, kind = "
            result.append(f'{column}"numeric", fill = 0.0 }},')
        elif place.most > 1:
            result.append(f'{{ name = {toml_text(name)}, kind = "multi", separator = " " }},')
        else:
            result.append(f"{toml_text(name)},")
    return result


def noted(line: str, note: str) -> str:
    """A line of TOML with a comment, in which a name that holds a line end begins no line."""
    return f"{line}  # {printable(note)}".lstrip() if note else line


def toml_text(value: str) -> str:
    """The text as TOML writes it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses it bare
