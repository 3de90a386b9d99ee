"""What a dataclass says of its fields, held against values: types, choices, bounds, readers.

The annotations are the one place where this is written down; a command line, a file and a caller
from Python are all held to them: ``tau: Annotated[int | None, Within(0, 10), LATE] = 4``.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, is_dataclass, replace
from datetime import date
from enum import Enum
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from persia_sim.base.rules import Quantity, Refused, require_within

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a number, in its annotation: ``Annotated[float, Within(0, 1)]``."""

    least: float
    most: float
    without: Literal["none", "least", "most", "both"] = "none"
    """The bounds that are not themselves allowed."""

    def rule(self, value: float) -> str:
        """What the number breaks; nothing where it lies within.

        >>> Within(0, 1).rule(1.5), Within(0, 9, without="least").rule(0), Within(0, 1).rule(1)
        ('must be <= 1', 'must be > 0', '')
        """
        above = self.without in ("least", "both")
        below = self.without in ("most", "both")
        if not (value > self.least if above else value >= self.least):
            return f"must be {'>' if above else '>='} {self.least:,}"
        if not (value < self.most if below else value <= self.most):
            return f"must be {'<' if below else '<='} {self.most:,}"
        return ""


class ReadBy(NamedTuple):
    """The reader of a field: judged from the record or the whole that it is part of, and in
    words."""

    reads: Callable[[Any], bool]
    where: str


class Unread(Refused):
    """A field that is given, and that nothing would read."""


Count = Annotated[int, Within(0, 2**53)]
"""A number of things that are counted one by one."""
Positive = Annotated[int, Within(1, 2**63 - 1)]
"""A number of things of which there is one at least."""


def check_fields(record: Any) -> None:
    """Hold every field of a dataclass against its annotation; for ``__post_init__``.

    A value that only has another form is brought into the declared one: a name of an enum, text
    for a path, a list for a tuple, an integer for a float. Raises `Refused` naming the field, the
    value, and what it may be.

    >>> @dataclass
    ... class Cup(Checked):
    ...     size: Literal["small", "large"]
    >>> Cup(size="larg")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    persia_sim.base.rules.Refused: size must be one of small, large, got 'larg'; did you mean...
    """
    for name, kind in field_types(cast(Any, type(record))).items():
        value = getattr(record, name)
        fitted = fit(value, kind, name)
        if fitted is not value:
            object.__setattr__(record, name, fitted)  # the record may be frozen


class Checked:
    """A dataclass that is held against its annotations as it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def unread(record: Any, whole: Any = None) -> dict[str, str]:
    """The fields that nothing would read, each with where it would be; ``whole``: what the
    readers look at, if not the record itself."""
    seen_from = record if whole is None else whole
    readers = notes_of(cast(Any, type(record)), ReadBy).items()
    return {name: note.where for name, note in readers if not note.reads(seen_from)}


def refuse_unread(record: Any) -> None:
    """Raise `Unread` for the first field that is not at its default and that nothing would read."""
    for name, where in unread(record).items():
        value = getattr(record, name)
        if value != record.__dataclass_fields__[name].default:
            raise Unread(name, f"is {value}: only used with {where}; remove it")


def parse(kind: type[T], document: Any, where: str, *, others: bool = False) -> T:
    """A dataclass from nested mappings; what is left out takes its default.

    Raises ValueError naming ``where`` for a key that the dataclass does not have (with the nearest
    it has; with ``others`` it is passed over), a value of another type, a missing field, and what
    its own checks refuse.
    """
    if others and isinstance(document, Mapping):
        document = {key: document[key] for key in document if key in field_types(cast(Any, kind))}
    try:
        return cast(T, _build(kind, document, "the document"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def with_values(record: T, document: Mapping[str, Any]) -> T:
    """The dataclass, or mapping, with what nested mappings say otherwise; raises `Refused` naming
    the path of the field that breaks a rule."""
    types = field_types(cast(Any, type(record))) if is_dataclass(record) else {}
    if types:
        _refuse_unknown(types, document)
    changed: dict[str, Any] = {}

    # A nested mapping changes the table that is there; anything else takes its place.
    for key, value in document.items():
        present = getattr(record, key) if types else cast(Any, record).get(key)
        if is_dataclass(present) and not isinstance(value, Mapping):
            raise Refused(key, f"must be a table of names and values, got {shown(value)}")
        with in_group(key):
            nested = is_dataclass(present) or (
                isinstance(present, Mapping) and isinstance(value, Mapping)
            )
            changed[key] = with_values(present, value) if nested else value

    # Making the dataclass again holds its rules.
    if types:
        return cast(T, replace(cast(Any, record), **changed))
    return cast(T, {**cast(Any, record), **changed})


def _build(kind: Any, document: Any, name: str) -> Any:
    if not isinstance(document, Mapping):
        raise Refused(name, f"must be a table of names and values, got {shown(document)}")
    types = field_types(kind)
    _refuse_unknown(types, document)
    values = {key: _value(types[key], value, key) for key, value in document.items()}

    # What has no default must be written.
    for key, one in kind.__dataclass_fields__.items():
        if key not in values and one.default is MISSING and one.default_factory is MISSING:
            raise Refused(key, "is missing; add it")
    return kind(**values)


def _refuse_unknown(types: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    """Raise `Refused` for a key that the dataclass does not have, with the nearest one."""
    for key in document:
        if key not in types:
            raise Refused(key, f"is not known; {nearest(key, types)}")


def _value(kind: Any, value: Any, name: str) -> Any:
    """A field's value; dataclasses are built from mappings, also within tuples, and of a field
    that may have none."""
    if isinstance(value, Mapping) and get_origin(kind) in (Union, types.UnionType):
        kind = next((each for each in get_args(kind) if is_dataclass(each)), kind)
    if is_dataclass(kind):
        with in_group(name) if isinstance(value, Mapping) else nullcontext():
            return _build(kind, value, name)
    inner = get_args(kind)
    listed = get_origin(kind) in (tuple, list) and isinstance(value, list | tuple)
    if listed and is_dataclass(inner[0]):
        items = [_value(inner[0], item, f"{name}[{k}]") for k, item in enumerate(value)]
        return items if get_origin(kind) is list else tuple(items)
    return fit(value, kind, name)


@contextmanager
def in_group(group: str) -> Iterator[None]:
    """What is refused inside is told with the group that it stands in."""
    try:
        yield
    except Refused as error:
        raise type(error)(f"{group}.{error.field}", error.rule) from None


@cache
def field_types(record: Any) -> dict[str, Any]:
    """The annotations of a dataclass, resolved."""
    hints = typing.get_type_hints(record, include_extras=True)
    names = getattr(record, "__dataclass_fields__", hints)
    return {name: _without_notes(hints[name]) for name in names}


@cache
def notes_of(record: Any, kind: Any) -> dict[str, Any]:
    """What stands beside the types of a dataclass's fields, of one kind of notes."""
    hints = typing.get_type_hints(record, include_extras=True)
    notes = ((name, note) for name in hints for note in getattr(hints[name], "__metadata__", ()))
    return {name: note for name, note in notes if isinstance(note, kind)}


def require_possible(record: Any, of: str = "", *, prefix: str = "", but: str = "") -> None:
    """Hold the fields that are a `Quantity`, but for one, as `require_within` does."""
    quantities = notes_of(cast(Any, type(record)), Quantity)
    ranges = {name: quantity.may for name, quantity in quantities.items() if name != but}
    require_within(record, of, prefix=prefix, **ranges)


def hold_choices(record: Any) -> None:
    """Bring fields that are one of some words (an `Enum`) from their text, as a caller from Python
    writes it; for ``__post_init__``. Raises `Refused` naming the field and what it may be."""
    for name, kind in _choices_of(cast(Any, type(record))).items():
        value = getattr(record, name)
        if value is not None and not isinstance(value, Enum):
            object.__setattr__(record, name, fit(value, kind, name))  # the record may be frozen


@cache
def _choices_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are an `Enum`, or one or nothing."""
    choices = {}
    for name, kind in field_types(record).items():
        kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        if any(isinstance(each, type) and issubclass(each, Enum) for each in kinds):
            choices[name] = kind
    return choices


def _without_notes(kind: Any) -> Any:
    """The type alone, unless a rule stands beside it."""
    noted = get_origin(kind) is Annotated and not any(hasattr(n, "rule") for n in get_args(kind))
    return get_args(kind)[0] if noted else kind


def fit(value: Any, kind: Any, name: str) -> Any:
    """``value`` as ``kind``; raises ValueError naming it when it is not one."""
    origin = get_origin(kind)

    # Kinds made of other kinds.
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

    # Plain kinds.
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_choice(value, [member.value for member in kind], name))
    if kind in _FITS:
        return _FITS[kind](value, name)
    if is_dataclass(kind) and not isinstance(value, typing.cast(type, kind)):
        raise Refused(name, f"must be a {typing.cast(type, kind).__name__}, got {shown(value)}")
    return value


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for a misspelt word: those that end in it behind a dot, the nearest known one, or all.

    >>> nearest("H100", ["v100", "h100"]), nearest("x", ["User", "user"])
    ('did you mean h100?', 'known: User, user')
    >>> nearest("--lr", ["--model.lr", "--rows.optimizer.lr", "--tls"])
    'did you mean --model.lr or --rows.optimizer.lr?'
    """
    every = list(choices)
    if ends := [one for one in every if one.endswith(f".{word.lstrip('-')}")]:
        return f"did you mean {' or '.join(ends)}?"
    words = {one.lower(): one for one in every}  # H100 is h100, and no v100
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.5)
    rest = f", and {len(every) - 30} more" if len(every) > 30 else ""
    return f"did you mean {words[close[0]]}?" if close else f"known: {', '.join(every[:30])}{rest}"


def shown(value: Any) -> str:
    """The value as an error shows it: short, whatever it is; that of an enum as its word.

    >>> shown([Enum("Way", {"FAR": "far"})("far"), 4])
    "['far', 4]"
    """
    text = re.sub(r"<\w+\.\w+: ('[^']*')>", r"\1", repr(value))
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
    names = " or ".join(_WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in real)
    raise Refused(name, f"must be {names}, got {shown(value)}")


def _choice(value: Any, choices: Iterable[Any], name: str) -> Any:
    for choice in choices:
        if value == choice and isinstance(value, type(choice)):
            return choice
    words = [str(choice) for choice in choices]
    hint = difflib.get_close_matches(str(value), words, n=1, cutoff=0.5)
    near = f"; did you mean {hint[0]}?" if hint else ""
    raise Refused(name, f"must be one of {', '.join(words)}, got {shown(value)}{near}")


def _fit_tuple(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    if not isinstance(value, list | tuple):
        raise Refused(name, f"must be a list, got {shown(value)}")
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise Refused(name, f"must be a list of {len(kinds)}, got {shown(value)}")
    pairs = enumerate(zip(value, kinds, strict=True))
    return tuple(fit(item, kind, f"{name}[{number}]") for number, (item, kind) in pairs)


def _fit_annotated(value: Any, parts: tuple[Any, ...], name: str) -> Any:
    fitted = fit(value, parts[0], name)
    for note in (part for part in parts[1:] if hasattr(part, "rule")):
        if fitted is not None and (rule := note.rule(fitted)):
            raise Refused(name, f"{rule}, got {shown(value)}")
    return fitted


def _fit_dict(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise Refused(name, f"must be a table of names and values, got {shown(value)}")
    names = ((fit(key, str, f"a name in {name}"), value[key]) for key in value)
    return {k: fit(v, kind, f"{name}.{k if k.isprintable() else repr(k)}") for k, v in names}


def _fit_typed_dict(value: Any, kind: Any, name: str) -> Any:
    types = field_types(kind)
    table = _fit_dict(value, Any, name)
    for key in table.keys() - types.keys():
        raise Refused(f"{name}.{key}", f"is not known; {nearest(key, types)}")
    for key in kind.__required_keys__ - table.keys():
        raise Refused(f"{name}.{key}", "is missing; add it")
    return {key: fit(item, types[key], f"{name}.{key}") for key, item in table.items()}


def _int(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Refused(name, f"must be a whole number, got {shown(value)}")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise Refused(name, f"must fit into 64 bits, got {shown(value)}")
    return number


def _float(value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Refused(name, f"must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Refused(name, f"must be a finite number, got {shown(value)}")
    return number


def _only(kind: type) -> Callable[[Any, str], Any]:
    def fitted(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise Refused(name, f"must be {_WORDS[kind]}, got {shown(value)}")
        return value

    return fitted


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    date: "a date",
}


def _path(value: Any, name: str) -> Any:
    if not isinstance(value, Path | str) or value == "":
        raise Refused(name, f"must be a path, got {shown(value)}")
    return Path(value) if isinstance(value, str) else value


_FITS: dict[Any, Any] = {
    bool: _only(bool),
    int: _int,
    float: _float,
    str: _only(str),
    Path: _path,
    date: _only(date),
}
