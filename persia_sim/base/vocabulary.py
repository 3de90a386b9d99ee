"""The words that runtime, replay and simulator share (paper, section 3): modes, stages, and
the rows of a trace."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

DEFAULT_TAU = 4
"""Steps of the window where a command is not told them and the mode has a window."""
DEFAULT_AHEAD = 4
"""Steps that lookahead fetches ahead."""
DEFAULT_LOOKUPS_IN_FLIGHT = 10
"""Lookups of a rank that are on their way at once (source: the original)."""
DEFAULT_AVERAGE_EVERY_S = 0.5
"""Seconds between two averagings of async_averaging (source: the original)."""

ENDLESS = 2**62
"""More steps or samples than there are, where a number has no bound; fits into an int64."""


class Stage(StrEnum):
    """What a rank does with one batch, in this order; async adds the last three."""

    LOAD = "load"
    LOOKUP = "lookup"
    COPY_IN = "copy_in"
    REFRESH = "refresh"
    FORWARD = "forward"
    BACKWARD = "backward"
    DENSE_SYNC = "dense_sync"
    COPY_OUT = "copy_out"
    PUSH = "push"
    DENSE_PULL = "dense_pull"
    DENSE_PUSH = "dense_push"
    AVERAGE = "average"


_UNBOUNDED = {"none", "unbounded"}


def with_unbounded(words: Sequence[str]) -> list[str]:
    """Words of a command line in which no bound tau is written as the parsers know it.

    >>> with_unbounded(["--tau", "none", "--steps", "9"]), with_unbounded(["--tau=unbounded"])
    (['--tau', 'None', '--steps', '9'], ['--tau=None'])
    """
    rewritten = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "--tau" and value.lower() in _UNBOUNDED:
            word = "--tau=None"
        elif before == "--tau" and word.lower() in _UNBOUNDED:
            word = "None"
        rewritten.append(word)
        before = word
    return rewritten


class Read(StrEnum):
    """How the rows of a lookup are read."""

    FRESH = "fresh"
    """All pushes of earlier steps are applied."""
    AHEAD = "ahead"
    """Prefetched, and replaced where they were written since: exact."""
    LATE = "late"
    """Up to tau steps of pushes may be missing."""


class Write(StrEnum):
    """How the gradients of rows are written."""

    MERGED = "merged"
    """One update of a row a step, of the gradients of all ranks."""
    CHOSEN = "merged or on arrival"
    """As the option `merge_pushes` says."""
    ON_ARRIVAL = "on arrival"
    """An update for each rank and step, as it comes."""


class Dense(StrEnum):
    """How the dense weights are kept."""

    ALL_REDUCED = "all-reduced"
    """By the mean gradient of all ranks, after the backward pass."""
    OVERLAPPED = "all-reduced, overlapped"
    """The same, bucket by bucket within the backward pass."""
    ON_SERVERS = "on a server"
    """Each rank pulls them, computes, pushes its gradient, and waits for nobody."""
    AVERAGED = "replicas, averaged"
    """Each rank has its own, and all are averaged in the background."""


class Rules(NamedTuple):
    """A mode: how rows are read and written, and how dense weights are kept."""

    read: Read
    write: Write
    dense: Dense
    read_fresh: Read | None = None
    """How the rows of tables named fresh are read, beside late ones; None where no table is. Their
    gradients are always merged."""

    @property
    def mode(self) -> Mode:
        """The mode that has these rules; raises ValueError where there is none.

        >>> str(Mode.HYBRID.rules._replace(dense=Dense.ALL_REDUCED).mode)
        'raw_hybrid'
        """
        for mode, rules in RULES.items():
            if rules == self:
                return mode
        raise ValueError(f"no mode has the rules: {self}; modes are {', '.join(RULES)}")

    def __str__(self) -> str:
        fresh = "" if self.read_fresh is None else f" (those of fresh tables {self.read_fresh})"
        return f"rows {self.read}{fresh}, gradients {self.write}, dense weights {self.dense}"


def refuse_unless_carried(
    mode: Mode, carries: Collection[Rules], engine: str, *, fresh: bool = False
) -> None:
    """Raise ValueError where an engine does not carry out what the mode is, ``fresh``: with tables
    named fresh. Nothing falls through to the rules of another mode."""
    rules = mode.rules_with(fresh)
    if rules in carries:
        return
    remedy = f"choose one of {', '.join(known for known in Mode if known.rules in carries)}"
    if fresh and mode.rules in carries:
        remedy = "remove --fresh"
    raise ValueError(f"mode {mode} ({rules}) is not carried out by {engine}; {remedy}")


COMMON_STEP = frozenset(
    {
        Rules(Read.FRESH, Write.MERGED, Dense.ALL_REDUCED),
        Rules(Read.AHEAD, Write.MERGED, Dense.OVERLAPPED),
        Rules(Read.LATE, Write.CHOSEN, Dense.ALL_REDUCED),
        Rules(Read.LATE, Write.CHOSEN, Dense.OVERLAPPED),
    }
)
"""Modes in which all ranks share one step, as an engine that carries them out says."""
OWN_STEPS = frozenset(
    {
        Rules(Read.LATE, Write.ON_ARRIVAL, Dense.ON_SERVERS),
        Rules(Read.LATE, Write.ON_ARRIVAL, Dense.AVERAGED),
    }
)
"""Modes in which each rank counts its own."""
FRESH_TABLES = frozenset(
    rules._replace(read_fresh=Read.AHEAD) for rules in COMMON_STEP if rules.read is Read.LATE
)
"""Those with late rows and a common step, in which the tables named fresh are exact."""
KNOWN_MODES = COMMON_STEP | OWN_STEPS | FRESH_TABLES
"""The modes of these three sets, as an engine says that knows all of their rules."""


class Mode(StrEnum):
    """How the embedding layer and the dense network are kept up to date (paper, figure 3)."""

    SYNC = "sync"
    """Every stage after the one before: a step reads all pushes of the steps before it."""
    LOOKAHEAD = "lookahead"
    """Rows are fetched ahead and brought up to date before they are used: the bytes of sync."""
    RAW_HYBRID = "raw_hybrid"
    """Rows may be tau steps late; dense weights are all-reduced after the backward pass."""
    HYBRID = "hybrid"
    """Rows as in raw_hybrid, with the all-reduce inside the backward pass."""
    ASYNC = "async"
    """Rows and dense weights may be late: each rank pulls, pushes, and waits for nobody."""
    ASYNC_AVERAGING = "async_averaging"
    """Rows as in async, with a replica of the dense weights a rank, averaged every period."""

    @property
    def rules(self) -> Rules:
        """What the mode is: three rules, and nothing else."""
        return RULES[self]

    def rules_with(self, fresh: bool) -> Rules:
        """The mode's rules, with tables named fresh or without."""
        return self.rules._replace(read_fresh=Read.AHEAD) if fresh else self.rules

    @property
    def has_barrier(self) -> bool:
        """All ranks share one dense update a step, so the dense weights are never late."""
        return self.rules.dense in (Dense.ALL_REDUCED, Dense.OVERLAPPED)

    @property
    def overlaps_dense_sync(self) -> bool:
        """The all-reduce of one bucket runs while the backward pass works on the next."""
        return self.rules.dense is Dense.OVERLAPPED

    @property
    def has_dense_server(self) -> bool:
        """Each rank pulls the dense weights from their server, and pushes their gradients there."""
        return self.rules.dense is Dense.ON_SERVERS

    @property
    def averages_replicas(self) -> bool:
        """Each rank has dense weights of its own, which are averaged now and then."""
        return self.rules.dense is Dense.AVERAGED

    @property
    def reads_late_rows(self) -> bool:
        """A lookup may miss pushes of earlier steps (up to the bound tau)."""
        return self.rules.read is Read.LATE

    @property
    def reads_fresh_rows(self) -> bool:
        """A lookup waits until all pushes of earlier steps are applied."""
        return self.rules.read is Read.FRESH

    @property
    def prefetches_rows(self) -> bool:
        """Rows are fetched ahead, and replaced where they have changed before they are used."""
        return self.rules.read is Read.AHEAD

    @property
    def may_merge(self) -> bool:
        """Merging the pushes of a step is a choice: sync and lookahead always do, async never."""
        return self.rules.write is Write.CHOSEN

    def merges(self, chosen: bool | None) -> bool:
        """Whether a row takes one optimiser update per step from all ranks' gradients.

        >>> Mode.SYNC.merges(None), Mode.HYBRID.merges(None), Mode.HYBRID.merges(False)
        (True, True, False)
        """
        return chosen is not False if self.may_merge else self.rules.write is Write.MERGED

    def window(self, tau: int | None) -> int | None:
        """Steps of pushes that a lookup may miss, None without a bound: tau where rows may be late.

        >>> Mode.HYBRID.window(4), Mode.LOOKAHEAD.window(4), Mode.ASYNC.window(None)
        (4, 0, None)
        """
        return tau if self.reads_late_rows else 0


RULES: dict[Mode, Rules] = {
    Mode.SYNC: Rules(Read.FRESH, Write.MERGED, Dense.ALL_REDUCED),
    Mode.LOOKAHEAD: Rules(Read.AHEAD, Write.MERGED, Dense.OVERLAPPED),
    Mode.RAW_HYBRID: Rules(Read.LATE, Write.CHOSEN, Dense.ALL_REDUCED),
    Mode.HYBRID: Rules(Read.LATE, Write.CHOSEN, Dense.OVERLAPPED),
    Mode.ASYNC: Rules(Read.LATE, Write.ON_ARRIVAL, Dense.ON_SERVERS),
    Mode.ASYNC_AVERAGING: Rules(Read.LATE, Write.ON_ARRIVAL, Dense.AVERAGED),
}
"""The one place where modes are told apart."""

ALL = -1
"""Stands in ``rank`` for every rank at this instant (a merged push), in ``shard`` for every
shard."""


class Kind(IntEnum):
    """What took effect."""

    LOOKUP = 0
    """Rows of one batch were read at a shard. In lookahead: the prefetch, without side effect."""
    REFRESH = 1
    """Prefetched rows with pending pushes were replaced, new rows were created: all rows in
    lookahead, those of fresh tables in a mode with late rows."""
    PUSH = 2
    """Row gradients were applied at a shard; ``rank`` is ALL when those of a step were merged."""
    LOST_PUSH = 3
    """Row gradients that will never be applied (a fault, or non-finite values); closes the step."""
    DENSE_UPDATE = 4
    """Barrier modes: the dense weights took the step's mean gradient."""
    DENSE_PULL = 5
    """Async: a rank copied the dense weights from their server."""
    DENSE_PUSH = 6
    """Async: a rank's dense gradient was applied (at the server, or to the rank's own replica)."""
    AVERAGE_READ = 7
    """async_averaging: a rank's replica entered round ``version``."""
    AVERAGE_WRITE = 8
    """async_averaging: a rank's replica moved by (mean - what it had put in)."""
    FRESH_PUSH = 9
    """Fresh tables: their row gradients were applied, merged. A lookup's and a push's rows are then
    those of the late tables; each group has versions of its own."""
    FRESH_LOST_PUSH = 10
    """Fresh tables: row gradients of theirs that will never be applied."""


OF_FRESH = {
    Kind.REFRESH: Kind.REFRESH,
    Kind.FRESH_PUSH: Kind.PUSH,
    Kind.FRESH_LOST_PUSH: Kind.LOST_PUSH,
}
"""The kinds of a trace that are of its fresh tables, and what each is in lookahead."""


class Event(NamedTuple):
    """One row of the table."""

    kind: int
    rank: int
    step: int
    shard: int = ALL
    version: int = ALL
    """Pushes applied at the shard (or dense updates) just before; ALL if not known."""
