"""What a dataclass says of its fields, held against values: types, choices, finite numbers.

The annotations are the one place where a type or a list of choices is written down; a command line,
a file and a caller from Python are all held to them.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin


def check_fields(record: Any, prefix: str = "") -> None:
    """Hold every field of a dataclass against its annotation; for ``__post_init__``.

    A value that only has another form is brought into the declared one: a name of an enum, text
    for a path, a list for a tuple, an integer for a float. Raises ValueError naming the field (with
    ``prefix`` before it), the value, and what it may be.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Cup:
    ...     size: Literal["small", "large"]
    ...     def __post_init__(self) -> None:
    ...         check_fields(self, "cup.")
    >>> Cup(size="larg")
    Traceback (most recent call last):
    ...
    ValueError: cup.size must be one of small, large, got 'larg'; did you mean large?
    """
    kinds: Any = type(record)
    for name, kind in field_types(kinds).items():
        value = getattr(record, name)
        fitted = fit(value, kind, prefix + name)
        if fitted is not value:
            object.__setattr__(record, name, fitted)  # the record may be frozen


@cache
def field_types(record: Any) -> dict[str, Any]:
    """The annotations of a dataclass, resolved."""
    hints = typing.get_type_hints(record, include_extras=True)
    names = getattr(record, "__dataclass_fields__", hints)
    return {name: _without_notes(hints[name]) for name in names}


def _without_notes(kind: Any) -> Any:
    """The type alone, unless bounds stand beside it."""
    noted = get_origin(kind) is Annotated and not any(isinstance(n, Within) for n in get_args(kind))
    return get_args(kind)[0] if noted else kind


class Within(NamedTuple):
    """Bounds of a number, in its annotation: ``Annotated[float, Within(0, 1)]``."""

    least: float
    most: float


Count = Annotated[int, Within(0, 2**53)]
"""Of things that are counted one by one."""


def fit(value: Any, kind: Any, name: str) -> Any:
    """``value`` as ``kind``; raises ValueError naming it when it is not one."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _fit_any_of(value, get_args(kind), name)
    if origin is Literal:
        return _choice(value, get_args(kind), name)
    if origin is Annotated:
        return _fit_annotated(value, get_args(kind), name)
    if origin is tuple:
        return _fit_tuple(value, get_args(kind), name)
    if origin is list:
        return list(_fit_tuple(value, (*get_args(kind), ...), name))
    if origin is dict:
        return _fit_dict(value, get_args(kind)[1], name)
    if typing.is_typeddict(kind):
        return _fit_typed_dict(value, kind, name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_choice(value, [member.value for member in kind], name))
    if kind in _FITS:
        return _FITS[kind](value, name)
    if is_dataclass(kind) and not isinstance(value, typing.cast(type, kind)):
        raise ValueError(f"{name} must be a {typing.cast(type, kind).__name__}, got {told(value)}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest known one, or all of them.

    >>> nearest("clik", ["click", "user"])
    'did you mean click?'
    """
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(words)}"


def told(value: Any) -> str:
    """The value as an error shows it: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fit_any_of(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    real = [kind for kind in kinds if kind is not type(None)]
    for kind in real:
        try:
            return fit(value, kind, name)
        except ValueError:
            if len(real) == 1:
                raise
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in real)
    raise ValueError(f"{name} must be {names}, got {told(value)}")


def _choice(value: Any, choices: Iterable[Any], name: str) -> Any:
    for choice in choices:
        if value == choice and isinstance(value, type(choice)):
            return choice
    words = [str(choice) for choice in choices]
    hint = difflib.get_close_matches(str(value), words, n=1, cutoff=0.5)
    near = f"; did you mean {hint[0]}?" if hint else ""
    raise ValueError(f"{name} must be one of {', '.join(words)}, got {told(value)}{near}")


def _fit_tuple(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list, got {told(value)}")
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{name} must be a list of {len(kinds)}, got {told(value)}")
    fitted = tuple(
        fit(item, kind, f"{name}[{number}]")
        for number, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )
    same = isinstance(value, tuple) and all(a is b for a, b in zip(value, fitted, strict=True))
    return value if same else fitted


def _fit_annotated(value: Any, parts: tuple[Any, ...], name: str) -> Any:
    fitted = fit(value, parts[0], name)
    for bounds in (part for part in parts[1:] if isinstance(part, Within)):
        if not bounds.least <= fitted <= bounds.most:
            rule = f"from {bounds.least:,} to {bounds.most:,}"
            raise ValueError(f"{name} must be {rule}, got {told(value)}")
    return fitted


def _fit_dict(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a table of names and values, got {told(value)}")
    return {
        _str(key, f"a name in {name}"): fit(v, kind, f"{name}.{key}") for key, v in value.items()
    }


def _fit_typed_dict(value: Any, kind: Any, name: str) -> Any:
    types = field_types(kind)
    found = _fit_dict(value, Any, name)
    for key in found.keys() - types.keys():
        raise ValueError(f"{name}.{key} is not known; {nearest(key, types)}")
    for key in kind.__required_keys__ - found.keys():
        raise ValueError(f"{name}.{key} is missing; add it")
    return {key: fit(item, types[key], f"{name}.{key}") for key, item in found.items()}


def _bool(value: Any, name: str) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {told(value)}")
    return value


def _int(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {told(value)}")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {told(value)}")
    return number


def _float(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {told(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {told(value)}")
    return number


def _str(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {told(value)}")
    return value


def _path(value: Any, name: str) -> Any:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a path, got {told(value)}")
    return Path(value)


_FITS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: _str, Path: _path}
