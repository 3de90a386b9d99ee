"""How a value that breaks a rule is refused: one sentence with name, value, rule and remedy."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages.

    >>> counted(1, "rank"), counted(2, "rank"), counted(3, "crash")
    ('1 rank', '2 ranks', '3 crashes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def require(holds: bool, name: str, value: object, rule: str, remedy: str = "") -> None:
    """Raise ValueError that names what is wrong, its value, the rule and what to do.

    >>> require(False, "tau", -1, "must be >= 0", "use 0 for sync")
    Traceback (most recent call last):
    ValueError: tau is -1: must be >= 0; use 0 for sync
    """
    if not holds:
        raise ValueError(f"{name} is {value}: {rule}" + (f"; {remedy}" if remedy else ""))
