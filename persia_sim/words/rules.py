"""How a value that breaks a rule is refused: one sentence with name, value, rule and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages.

    >>> counted(1, "rank"), counted(2, "rank"), counted(3, "crash")
    ('1 rank', '2 ranks', '3 crashes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def printable(text: object, keep: str = "") -> str:
    """Text from a file as a terminal may show it.

    What would steer the terminal, reorder the line or cannot be written is told by its escape;
    characters of ``keep`` stay.

    >>> printable("Zürich"), printable("a\\x1b[2Jb\\u202e"), printable("two\\nlines", keep="\\n")
    ('Zürich', 'a\\\\x1b[2Jb\\\\u202e', 'two\\nlines')
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def require(holds: bool, name: str, value: object, rule: str, remedy: str = "") -> None:
    """Raise ValueError that names what is wrong, its value, the rule and what to do.

    >>> require(False, "tau", -1, "must be >= 0", "use 0 for sync")
    Traceback (most recent call last):
    ValueError: tau is -1: must be >= 0; use 0 for sync
    """
    if not holds:
        raise ValueError(f"{name} is {value}: {rule}" + (f"; {remedy}" if remedy else ""))


def refuse_doubled(words: Iterable[str]) -> None:
    """Raise ValueError for an option that a command line has twice: one of them would count,
    without a word.

    >>> refuse_doubled(["--tau", "1", "--no-shuffle", "--tau=2"])
    Traceback (most recent call last):
    ValueError: --tau is typed twice, and only one of them can count; give it once
    """
    seen: dict[str, str] = {}
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith("--"):
            continue
        option = re.sub(r"^--((?:.*\.)?)no-", r"--\1", flag.replace("_", "-"))
        if option in seen:
            told = "twice" if seen[option] == flag else f"as {seen[option]}, too"
            raise ValueError(
                f"{flag} is typed {told}, and only one of them can count; give it once"
            )
        seen[option] = flag
