"""What makes data the same: their bytes, and every key of the schema that says what these mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from typing import Any

from runtime.data.schema import Schema
from runtime.data.source import Provenance

Document = Mapping[str, Any]
"""Of a schema: its keys as plain JSON, without those that are None."""

DECIDES_NOTHING = {
    "name": "how results call the data",
    "folder": "where files lie, whose bytes are summed",
    "md5": "which bytes files must have, which are summed",
}
"""Keys of a schema that change no sample, and why."""
_READ = ("columns", "missing")
"""Keys that say what a model reads."""


def document(schema: Schema) -> Document:
    """Every key that decides what the files mean; a key that is added to a schema is one of them.

    >>> from runtime.data.schema import Column
    >>> from runtime.data.split import Split
    >>> columns = (Column(name="a"),)
    >>> found = document(Schema(name="mine", columns=columns, split=Split(test_fraction=0.5)))
    >>> found["columns"], found["split"]["test_fraction"]
    ([{'name': 'a', 'kind': 'categorical', 'table': 'rows'}], 0.5)
    """
    found: dict[str, Any] = _plain(schema)
    return {key: value for key, value in found.items() if key not in DECIDES_NOTHING}


def differences(before: Document, now: Document) -> list[str]:
    """In words, each column and each other key that is not as it was."""
    told = list(_columns(before.get("columns", []), now.get("columns", [])))
    for key in dict.fromkeys((*before, *now)):
        was, is_ = before.get(key), now.get(key)
        if key == "columns" or was == is_:
            continue
        if isinstance(was, Mapping) and isinstance(is_, Mapping):
            told += _changes(f"{key}: ", was, is_)
        else:
            told += _changes("", {key: was}, {key: is_})
    return told


def refuse_other_columns(before: Document, now: Provenance) -> None:
    """Raise ValueError where a trained model would read other columns than it was trained on, or
    read them otherwise; files, labels and split of what it is judged by may be others."""
    was, is_ = ({key: found.get(key, []) for key in _READ} for found in (before, now.schema))
    told = differences(was, is_)
    if told:
        raise ValueError(
            f"data set {now.name} has another schema than the model was trained on:"
            f" {'; '.join(told)}; correct the schema, or train a model with it"
        )


def refuse_other_data(before: Mapping[str, Any], now: Provenance) -> None:
    """Raise ValueError when a run would go on with other data than it began with.

    ``before`` are the facts of the run, as `runtime.order.replayable.trace_meta` has them. The
    split is among them: a row that has trained must not test, and none trains twice.
    """
    known = str(before["data_sha256"])
    if known != now.sha256:
        raise ValueError(
            f"data set {now.name} has changed since the run began (checksum {known[:12]} then,"
            f" {now.sha256[:12]} now): put the old data back, or start a new run"
        )
    told = differences(before.get("data_schema", now.schema), now.schema)
    if told:
        raise ValueError(
            f"the schema of data set {now.name} is not the one that the run began with:"
            f" {'; '.join(told)}. Rows that have trained must mean the same, and none of them may"
            " test: put the schema back, or start a new run (`evaluate RUN --data` takes another"
            " split)"
        )


def _columns(before: Sequence[Document], now: Sequence[Document]) -> Iterator[str]:
    was, is_ = _by_name(before), _by_name(now)
    yield from (f"column {name} is gone" for name in was if name not in is_)
    yield from (f"column {name} is new" for name in is_ if name not in was)
    shared = [name for name in was if name in is_]
    for name in shared:
        yield from _changes(f"column {name}: ", was[name], is_[name])
    order = [name for name in is_ if name in was]
    if shared != order:
        old, new = next(pair for pair in zip(shared, order, strict=True) if pair[0] != pair[1])
        yield (
            f"the columns stand in another order ({new} where {old} was), which decides the ids of"
            " each"
        )


def _by_name(columns: Sequence[Document]) -> dict[str, Document]:
    """A name may stand there several times, as columns of different kinds."""
    found: dict[str, Document] = {}
    for column in columns:
        count = sum(known["name"] == column["name"] for known in found.values())
        found[f"{column['name']} ({count + 1})" if count else column["name"]] = column
    return found


def _changes(where: str, was: Document, is_: Document) -> list[str]:
    keys = dict.fromkeys((*was, *is_))
    return [
        f"{where}{key} was {_told(was.get(key))}, is {_told(is_.get(key))}"
        for key in keys
        if was.get(key) != is_.get(key)
    ]


def _told(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        items = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {name: item for name, item in items.items() if item is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value
