"""How a value that breaks a rule is refused: one sentence with name, value, rule and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import floor, inf, log10
from typing import NamedTuple

Range = tuple[float, float]
"""Least and most that a value may be; inf is "without limit" where that is the most."""

COUNT: Range = (1, 100_000)
"""How many hosts, processes, GPUs or tables there may be: more need arrays that no host has the
memory for."""
SECONDS: Range = (0, 1e7)
"""Longest time that a description may name (four months): a float then still tells instants apart
that lie a nanosecond from each other."""
RATE: Range = (1e-6, inf)
"""A rate of any unit a second; far below what there is, far above where times are no numbers."""
AMOUNT: Range = (1, 1e18)
"""An amount of rows, weights, bytes of a memory, or of a rate that is no limit if absent."""
NUMBERS: Range = (1, 1_000_000)
"""Width of a row or a layer."""
SHARE: Range = (1e-9, 1)
"""A share of something that is not nothing."""
USD: Range = (0, 1e9)
"""Dollars an hour."""


class Quantity(NamedTuple):
    """A note on a figure of a machine: what is possible for a caller from Python, what
    machines from 2006 to 2046 have, as files must say, and the units that are written by mistake.

    In files, too, 0 is "none" wherever it is possible, and inf "without limit" wherever a figure
    that is left out has none. What is ``whole`` is counted one by one.
    """

    may: Range
    least: float
    most: float
    unit: str
    others: tuple[tuple[str, float], ...] = ()
    owner: str = "machines"
    whole: bool = False

    def refuse(self, name: str, value: object) -> None:
        """Raise `Refused` for a number that no machine has, saying what was probably meant.

        >>> Usual.NIC.refuse("nic_bytes_per_s", 400)
        Traceback (most recent call last):
        persia_sim.base.rules.Refused: nic_bytes_per_s is 400: machines have 1e+06 to 1e+14 \
bytes a second; 400 Gbit/s are 5e+10, 400 GB/s are 4e+11
        """
        if not isinstance(value, int | float) or not value:
            return
        meant = [(unit, value * each) for unit, each in self.others]
        meanings = [f"{value:g} {u} are {x:g}" for u, x in meant if self.least <= x <= self.most]
        rule = f"{self.owner} have {self.least:g} to {self.most:g} {self.unit}"
        remedy = "give a large one where it shall not bind" if value == inf else "look at its unit"
        remedy = ", ".join(meanings) or remedy
        require(self.least <= value <= self.most, name, f"{value:g}", rule, remedy)
        if self.whole:
            require(value % 1 == 0, name, value, f"must be a whole number of {self.unit}", remedy)


class Usual:
    """Every quantity of machines that files may say."""

    NIC = Quantity(RATE, 1e6, 1e14, "bytes a second", (("Gbit/s", 1.25e8), ("GB/s", 1e9)))
    BUS = Quantity(RATE, 1e8, 1e16, "bytes a second", (("GB/s", 1e9), ("TB/s", 1e12)))
    FLOPS = Quantity(RATE, 1e9, 1e19, "operations a second", (("GFLOPS", 1e9), ("TFLOPS", 1e12)))
    MEMORY = Quantity(RATE, 1e6, 1e17, "bytes", (("GB", 1e9), ("TB", 1e12)))
    BUCKET = Quantity((1, inf), 1e3, 1e17, "bytes", (("MB", 1e6),))
    NUMBER = Quantity((1, 1e6), 1, 8, "bytes", (("bits", 1 / 8),))
    LATENCY = Quantity((0, 1e6), 0, 1, "seconds", (("ms", 1e-3), ("us", 1e-6)))
    STAGE = Quantity(SECONDS, 0, 1, "seconds", (("ms", 1e-3), ("us", 1e-6)))
    ITEM = Quantity(SECONDS, 0, 0.01, "seconds", (("us", 1e-6), ("ns", 1e-9)))
    BYTE = Quantity(SECONDS, 0, 1e-6, "seconds", (("us", 1e-6), ("ns", 1e-9)))
    SPEED = Quantity((1e-4, 1e4), 0.01, 100, "times the speed of the measured core")
    ROWS = Quantity(
        AMOUNT, *AMOUNT, "rows", (("million", 1e6), ("billion", 1e9)), owner="tables", whole=True
    )
    PRICE = Quantity(USD, 0, 1e4, "dollars an hour", (("dollars a month", 1 / 730),))


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages.

    >>> counted(1, "rank"), counted(2, "rank"), counted(3, "crash")
    ('1 rank', '2 ranks', '3 crashes')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def price(usd: float) -> str:
    """Dollars for messages, in mills; what is less than ten of them to two figures.

    >>> price(363.0), price(0.0291), price(0.000266)
    ('$363.000', '$0.029', '$0.00027')
    """
    return f"${usd:.{max(3, 1 - floor(log10(usd or 1)))}f}"


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


class Refused(ValueError):
    """A value that breaks a rule: the name of what has it, and the rule with value and remedy."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field} {rule}")
        self.field = field
        self.rule = rule

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return type(self), (self.field, self.rule)


OURS = ("persia_sim", "runtime", "experiments", "paper_figs")
"""The packages of this project."""


def left_out(error: ModuleNotFoundError) -> str | None:
    """What to say where a part of this project was left out of this copy of it, as annexes may be;
    None where another module is not there.

    >>> left_out(ModuleNotFoundError(name="runtime.hosts"))
    'this needs runtime.hosts, which this copy of the project was made without: install all of it'
    >>> left_out(ModuleNotFoundError(name="ray"))
    """
    if str(error.name).partition(".")[0] not in OURS:
        return None
    return (
        f"this needs {error.name}, which this copy of the project was made without: install all of"
        " it"
    )


def require(holds: bool, name: str, value: object, rule: str, remedy: str = "") -> None:
    """Raise `Refused`, a ValueError that names what is wrong, its value, the rule and what to do.

    >>> require(False, "tau", -1, "must be >= 0", "use 0 for sync")
    Traceback (most recent call last):
    persia_sim.base.rules.Refused: tau is -1: must be >= 0; use 0 for sync
    """
    if not holds:
        raise Refused(name, f"is {value}: {rule}" + (f"; {remedy}" if remedy else ""))


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
            how = "twice" if seen[option] == flag else f"as {seen[option]}, too"
            raise ValueError(f"{flag} is typed {how}, and only one of them can count; give it once")
        seen[option] = flag


def require_within(record: object, of: str = "", *, prefix: str = "", **ranges: Range) -> None:
    """Hold fields of a record against ranges; None is a value that is not given.

    ``ranges``: a `Range` for each field. The sentence calls a field ``prefix`` + its name + ``of``.

    >>> from types import SimpleNamespace
    >>> require_within(SimpleNamespace(cores=0), " of host a", cores=COUNT)
    Traceback (most recent call last):
    persia_sim.base.rules.Refused: cores of host a is 0: must lie in [1, 100,000]
    """
    for field, (least, most) in ranges.items():
        value = getattr(record, field)
        if value is None or least <= value <= most:
            continue  # a scenario holds hundreds of values, and each would format its rule
        rule = f"must lie in [{_bound(least)}, {_bound(most)}]"
        if most == inf:
            rule = f"must be >= {_bound(least)} (inf: without limit)"
        require(False, f"{prefix}{field}{of}", value, rule)


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
