"""JSON and TOML files read with care, and the door of what is read value by value.

A `Node` asks for every value by shape and names a wrong one; `records` makes dataclasses instead.
"""

from __future__ import annotations

import errno
import json
import os
import tomllib
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from persia_sim.words.files import open_regular
from persia_sim.words.rules import require

MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document and where it stands."""

    value: Any
    where: str
    """As a reader finds it: ``laws.load.fixed_s of profile a.json``."""

    def has(self, name: str) -> bool:
        """Whether this object has a member of that name (null is a value like any other)."""
        return name in self.members()

    def __getitem__(self, name: str) -> Node:
        """A member of this object. Raises ValueError when there is none."""
        value = self.members()
        require(name in value, f"{name} in {self.where}", "missing", "it must be there")
        return Node(value[name], f"{name} of {self.where}")

    def members(self, known: set[str] | None = None) -> dict[str, Any]:
        """The object itself, whose names must all be known."""
        found: dict[str, Any] = self._of(dict, "an object {...}")
        unknown = sorted(set(found) - known) if known is not None else []
        if unknown and known is not None:
            raise ValueError(
                f"unknown {', '.join(unknown)} in {self.where}; known: {sorted(known)}"
            )
        return found

    def items(self, length: int | None = None) -> list[Node]:
        """The entries of this list, of which there must be ``length`` if given."""
        found = self._of(list, "a list [...]")
        if length is not None:
            require(len(found) == length, self.where, self._shown(), f"must have {length} entries")
        return [Node(value, f"entry {k} of {self.where}") for k, value in enumerate(found)]

    def number(self, least: float = 0.0, above: float | None = None) -> float:
        """A finite number >= ``least``, or > ``above``."""
        plain = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        require(plain, self.where, self._shown(), "must be a number")
        try:
            found = float(self.value)
        except OverflowError:
            found = float("inf")
        require(isfinite(found), self.where, self._shown(), "must be finite")
        if above is not None:
            require(found > above, self.where, self._shown(), f"must be > {above:g}")
        require(found >= least, self.where, self._shown(), f"must be >= {least:g}")
        return found

    def integer(self, least: int) -> int:
        """A whole number >= ``least``."""
        found = self.number(least)
        require(found.is_integer(), self.where, self._shown(), "must be a whole number")
        return int(found)

    def text(self) -> str:
        """A string."""
        return str(self._of(str, "a string"))

    def _of(self, kind: type, what: str) -> Any:
        require(isinstance(self.value, kind), self.where, self._shown(), f"must be {what}")
        return self.value

    def _shown(self) -> str:
        text = json.dumps(self.value)
        return text if len(text) <= 60 else text[:57] + "..."


def read_document(path: Path) -> Any:
    """The content of a file: TOML when it is called so, else JSON.

    Raises ValueError naming the file when it is no plain file of at most 64 MiB, no UTF-8, not
    well-formed, or when it gives a key twice or a number that is not finite; OSError when it cannot
    be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise ValueError(
                    f"{path} has {size:,} bytes: a document has at most {MOST_BYTES:,}"
                )
            content = file.read()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is not a plain file; name a .json or .toml file") from None
    return parsed(content, path, toml=path.suffix == ".toml")


def parsed(content: bytes, where: object, *, toml: bool = False) -> Any:
    """What the bytes of a document say; raises ValueError naming ``where``, as `read_document`."""
    try:
        text = content.decode("utf-8-sig")
        if toml:
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not text in UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a document of ours") from None
    except ValueError as error:
        kind = "TOML" if toml else "JSON"
        raise ValueError(f"{where} is not well-formed {kind}: {error}") from None


def read_node(path: Path, what: str, remedy: str = "") -> Node:
    """The same as a `Node`, whose errors call the file ``what``; one that is missing names
    ``remedy``."""
    name = f"{what} {path}"
    if not path.exists():
        raise ValueError(f"{name} does not exist" + (f"; {remedy}" if remedy else ""))
    try:
        return Node(read_document(path), name)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")
