"""Whether a dataclass holds what its annotations say, in words for the person who filled it in."""

from __future__ import annotations

import difflib
import types
from dataclasses import fields
from datetime import date
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    date: "a date",
    types.NoneType: "nothing",
}


def check_types(record: Any) -> None:
    """Raise ValueError for the first field of a dataclass that is not of its annotated type."""
    for name, hint in _hints(type(record)).items():  # type: ignore[arg-type]
        value = getattr(record, name)
        if not fits(value, hint):
            close = difflib.get_close_matches(str(value), _choices(hint), n=1, cutoff=0.5)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{name} = {value!r}: it must be {_words(hint)}{meant}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the annotated type; a whole number is a number, true is neither."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(v, get_args(hint)[0]) for v in value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if hint in (float, int):
        wanted = (int, float) if hint is float else int
        return isinstance(value, wanted) and not isinstance(value, bool)
    return isinstance(value, hint)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    known: dict[str, Any] = get_type_hints(kind)
    return {f.name: known[f.name] for f in fields(kind)}


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return tuple(choice for part in parts for choice in _choices(part))


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    if get_origin(hint) in (Union, types.UnionType):
        parts = set(get_args(hint)) - {types.NoneType}
        parts -= {int} if float in parts else set()
        return " or ".join(_words(p) for p in get_args(hint) if p in parts)
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
