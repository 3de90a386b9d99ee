"""JSON documents read at the door: every value is asked for by shape, and a wrong one is named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from persia_sim.words.rules import require


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


def read_json(path: Path, what: str, remedy: str = "") -> Node:
    """The document in a file. Raises ValueError when there is none, or when it is not JSON."""
    name = f"{what} {path}"
    if not path.exists():
        raise ValueError(f"{name} does not exist" + (f"; {remedy}" if remedy else ""))
    require(path.is_file(), name, "no regular file", "it must be a JSON file", remedy)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return Node(json.loads(path.read_bytes(), parse_constant=refuse), name)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
