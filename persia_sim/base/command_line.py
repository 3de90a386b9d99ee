"""The words of a command as values of a dataclass's fields, and its `--help`.

An option is a field: ``--tau 4``, ``--rows.dim=8`` of a group, ``--shuffle`` or ``--no-shuffle`` of
a truth value. Groups noted `FLAT` stand without a prefix, fields noted `POSITIONAL` without a name.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, is_dataclass
from enum import Enum
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from persia_sim.base.rules import Refused, refuse_doubled
from persia_sim.base.schema import field_types, fit, nearest, with_values

T = TypeVar("T")
FLAT = "flat"
"""Note in the annotation of a group: its options stand without a prefix."""
POSITIONAL = "positional"
"""Note in the annotation of a field: its value stands without a name."""
OF_GROUP = "of group"
"""Note in the annotation of a field: its value may stand behind its group's name, too."""
GIVEN_ELSEWHERE = "given elsewhere"
"""Note in the annotation of a field: who reads the group gives its value, so a command refuses it
and its help leaves it out."""
_WIDTH = 100


class AsGroup(NamedTuple):
    """A note on a field of named tables: their options are those of another group."""

    group: str


class TypedAs(NamedTuple):
    """A note on a field whose name stands in stored tables: the name by which it is typed."""

    name: str


class Unset(NamedTuple):
    """A note on a field that may be None: what that comes to, as `--help` says it."""

    means: str


class Option(NamedTuple):
    """One option of a command."""

    name: str
    """The name as it is typed behind its dashes: ``rows.initial-mean``."""
    path: str
    """The path of its field: ``rows.initial_mean``."""
    kind: Any
    positional: bool
    text: str
    """What stands below the field."""
    default: Any
    means: str = ""
    """What its default comes to, where that says more than the value."""
    short: str = ""
    """Another name: ``data`` of ``data.name``; empty where it has none."""
    is_taken: bool = True
    """Whether a command takes it; else its value is given elsewhere, and no help shows it."""


def options_of(record: Any, prefix: str = "", path: str = "") -> tuple[Option, ...]:
    """Every option of a dataclass and of the groups in it."""
    return _options_of(record, prefix, path)


@cache
def _options_of(record: Any, prefix: str, path: str) -> tuple[Option, ...]:
    return tuple(_each_option(record, prefix, path))


def _each_option(record: Any, prefix: str, path: str) -> Iterator[Option]:
    hints = typing.get_type_hints(record, include_extras=True)
    texts = texts_of(record)
    for name, kind in field_types(record).items():
        notes = getattr(hints[name], "__metadata__", ())

        # A group: its fields are options behind its prefix.
        if is_dataclass(kind):
            inner = prefix if FLAT in notes else f"{prefix}{name}."
            yield from options_of(kind, inner, f"{path}{name}.")
            continue

        # A field: how it is typed, and what `--help` says of it.
        field = record.__dataclass_fields__[name]
        kind = next((note for note in notes if isinstance(note, AsGroup)), kind)
        typed_name = next((note.name for note in notes if isinstance(note, TypedAs)), name)
        typed = f"{prefix}{typed_name}".replace("_", "-")
        text = texts.get(name, "")
        positional = POSITIONAL in notes
        made = field.default_factory is not MISSING
        default = field.default_factory() if made else field.default
        means = next((note.means for note in notes if isinstance(note, Unset)), "")
        short = prefix.removesuffix(".") if OF_GROUP in notes else ""
        is_taken = GIVEN_ELSEWHERE not in notes
        yield Option(
            typed,
            f"{path}{name}",
            kind,
            positional,
            text,
            default,
            means,
            short,
            is_taken,
        )


def option_values(record: Any) -> Iterator[tuple[str, Any]]:
    """Every option as it is typed behind its dashes, and its value."""
    for option in options_of(type(record)):
        yield option.name, reduce(getattr, option.path.split("."), record)


def as_typed(error: Refused, record: Any) -> str:
    """The sentence of a refused value, which is called as it is typed where that is an option."""
    field, bracket, rest = error.field.partition("[")
    names = {option.path: option.name for option in options_of(record)}
    return f"--{names[field]}{bracket}{rest} {error.rule}" if field in names else str(error)


def with_changes(record: T, changes: Mapping[str, Any]) -> T:
    """The dataclass with other values, each by its path: ``sync.tau``.

    Raises `Refused` naming the path of the field that breaks a rule.
    """
    nested: dict[str, Any] = {}
    for path, value in changes.items():
        *groups, name = path.split(".")
        reduce(lambda table, group: table.setdefault(group, {}), groups, nested)[name] = value
    return with_values(record, nested)


def read_options(record: type[T], words: Sequence[str], command: str) -> T:
    """The dataclass that the words of a command make; raises ValueError naming what is wrong.

    A dataclass with a class method ``completed`` has it say what is not typed, by paths.
    """
    values = read_words(record, words, command)
    values = getattr(record, "completed", dict)(values)
    for option in options_of(record):
        if option.default is MISSING and option.path not in values:
            name = option.name.upper() if option.positional else f"--{option.name}"
            raise ValueError(f"{name} is missing; {command} --help says what it is")
    try:
        fields: Any = record.__dict__["__dataclass_fields__"].values()
        groups = {f.name: f.default_factory() for f in fields if f.default_factory is not MISSING}
        return record(**with_changes(groups, values))
    except Refused as error:
        raise ValueError(as_typed(error, record)) from None


def read_words(
    record: type, words: Sequence[str], command: str, common: Sequence[str] = ()
) -> dict[str, Any]:
    """The values that are typed, by the paths of their fields.

    Prints what there is and leaves with 0 at ``--help``: the ``common`` options where there are
    such, and all of them at ``--help all``. Raises ValueError for an option that is
    not known, typed twice or given something that it does not take.
    """
    if {"-h", "--help"} & set(words):
        print(help_of(record, command, () if "all" in words else common))
        sys.exit(0)

    # Which options there are, by each of their names.
    refuse_doubled(words)
    options = {option.name: option for option in options_of(record)}
    options |= {option.short: option for option in options.values() if option.short}
    free = [option for option in options.values() if option.positional]

    # Word by word: an option, a value of the last one, or a positional.
    given: dict[str, list[str]] = {}
    last = ""
    truths = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            option, truth = _named(flag[2:], options)
            last = option.name
            if last in given:
                raise ValueError(f"--{option.short} and --{last} are one option; give it once")
            options[last] = option  # of a single table, it was not among them
            if not _is_truth(option.kind):
                given[last] = [value] if equals else []
            elif equals:
                raise ValueError(f"{flag} takes no value, got {value!r}; write the option alone")
            else:
                truths[option.path] = truth
        elif last in given and (not given[last] or item_kind(options[last].kind)):
            given[last].append(word)
        elif free:
            given[free.pop(0).name] = [word]
        else:
            behind = f" behind --{last}" if last else ""
            raise ValueError(f"{word!r}{behind} is no option and no value; see {command} --help")

    # Texts become values last, when all of them are known.
    return truths | {options[n].path: _value(options[n], texts) for n, texts in given.items()}


def _named(typed: str, options: Mapping[str, Option]) -> tuple[Option, bool]:
    """The option, and whether it is meant: ``no-shuffle`` is not."""
    name = typed.replace("_", "-")

    # An option as it stands.
    if name in options and not options[name].positional:
        return options[name], True

    # A named table, `tables.users.dim`: its options are those of another group.
    tables, _, inner = typed.partition(".")
    if tables in options and isinstance(of := options[tables].kind, AsGroup):
        table, _, leaf = inner.partition(".")
        try:
            option, truth = _named(f"{of.group}.{leaf}", options)
        except ValueError:
            names = [one.replace(of.group, f"{tables}.{table}", 1) for one in _all(options)]
            raise ValueError(f"--{typed} is no option; {nearest(f'--{typed}', names)}") from None
        above = options[tables].path.removesuffix(tables)
        path = f"{above}{tables}.{table}{option.path.removeprefix(above + of.group)}"
        return option._replace(name=typed, path=path), truth

    # `no-` before a truth value.
    group, dot, leaf = name.rpartition(".")
    meant = f"{group}{dot}{leaf.removeprefix('no-')}"
    if leaf.startswith("no-") and meant in options and _is_truth(options[meant].kind):
        return options[meant], False

    # A command that sets options of others takes them behind its `--set`.
    meant = f"did you mean --set {name}=...?" if dot and "set" in options else ""
    raise ValueError(f"--{name} is no option; {meant or nearest('--' + name, _all(options))}")


def _all(options: Mapping[str, Option]) -> list[str]:
    """The options that one may have meant, with their dashes."""
    meant = {name: o for name, o in options.items() if o.is_taken and not o.positional}
    return [f"--{name}" for name in meant]


def _value(option: Option, texts: list[str]) -> Any:
    """The value of the words behind an option."""
    name = option.name.upper() if option.positional else f"--{option.name}"
    if inner := item_kind(option.kind):
        return fit(tuple(_from_text(text, inner) for text in texts), option.kind, name)
    if not texts:
        raise ValueError(f"{name} has no value; give {_words(option.kind)}")
    if texts[0] == "":
        raise ValueError(f"{name} is empty; give {_words(option.kind)} or leave it out")
    return fit(_from_text(texts[0], option.kind), option.kind, name)


def item_kind(kind: Any) -> Any:
    """The kind of a list's values; None where it is no list."""
    lists = (part for part in alternatives(kind) if get_origin(part) is tuple)
    return next((get_args(part)[0] for part in lists), None)


def _from_text(text: str, kind: Any) -> Any:
    """What the text says as one of these kinds; the text itself where it says nothing."""
    kinds = alternatives(kind)
    if type(None) in kinds and text.lower() == "none":
        return None
    for number in (int, float):
        if number in kinds:
            with suppress(ValueError):
                return number(text)
    if float in kinds and text.endswith("%"):
        with suppress(ValueError):
            return float(text.removesuffix("%")) / 100
    return text


def alternatives(kind: Any) -> tuple[Any, ...]:
    """What a type may be, one by one.

    >>> alternatives(Annotated[int | None, "a note"])
    (<class 'int'>, <class 'NoneType'>)
    """
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(part for inner in get_args(kind) for part in alternatives(inner))
    return (kind,)


def _is_truth(kind: Any) -> bool:
    return bool in alternatives(kind)


def help_of(record: type, command: str, common: Sequence[str] = ()) -> str:
    """What a command is for, and each of its options with values, default and meaning, or the
    ``common`` ones alone."""
    every = [option for option in options_of(record) if option.is_taken]
    options = [option for option in every if not common or option.name in common]
    free = "".join(f" {option.name.upper()}" for option in options if option.positional)
    lines = [f"usage: {command}{free} [options]", "", inspect.cleandoc(record.__doc__ or ""), ""]
    for option in options:
        lines.append(f"  {_usage(option)}")
        lines += textwrap.wrap(
            option.text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    rest = "" if len(options) == len(every) else f" (--help all: {len(every)} options)"
    return "\n".join([*lines, f"  -h, --help{rest}"])


def _usage(option: Option) -> str:
    if option.positional:
        return option.name.upper()
    group, dot, leaf = option.name.rpartition(".")
    comes_to = option.means or _default_text(option.default)
    default = "" if option.default is MISSING else f"  (default: {comes_to})"
    if isinstance(option.kind, AsGroup):
        return f"--{option.name}.NAME.OPTION VALUE  (OPTION as of --{option.kind.group})"
    if _is_truth(option.kind):
        return f"--{option.name}, --{group}{dot}no-{leaf}{default}"
    short = f"--{option.short}, " if option.short else ""
    return f"{short}--{option.name} {_words(option.kind)}{default}"


def _default_text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _words(kind: Any) -> str:
    """What may stand behind an option."""
    if inner := item_kind(kind):
        return f"{_words(inner)} ..."
    parts = []
    for part in alternatives(kind):
        if get_origin(part) is Literal:
            parts.append("|".join(map(str, get_args(part))))
        elif isinstance(part, type) and issubclass(part, Enum):
            parts.append("|".join(str(member.value) for member in part))
        else:
            parts.append(_KINDS.get(part, getattr(part, "__name__", str(part))))
    return "|".join(parts)


_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", type(None): "None"}


@cache
def texts_of(record: Any) -> dict[str, str]:
    """The text below each field of a dataclass, read from its source, as one line."""
    bases: Iterator[type] = filter(is_dataclass, reversed(record.__mro__))
    sources = (ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] for base in bases)
    return {
        field.target.id: " ".join(below.value.value.split())
        for described in sources
        if isinstance(described, ast.ClassDef)
        for field, below in pairwise(described.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
