"""What a checkpoint of a run says in words and numbers: where its stream stands, its counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from persia_sim.words.rules import require
from persia_sim.words.schema import Count, Within, fit, parse
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.store import STALENESS_BINS
from runtime.files import BrokenFileError, read_sealed, write_sealed

FORMAT = "persia-testbed-run-2"
NAME = "state.json"


class Means(TypedDict):
    """State of a `BlockMeans`; None: a sum that is no number."""

    sums: list[float | None]
    counts: list[Count]
    filled: Count
    values_per_point: Count


class Instants(TypedDict):
    """State of a `Thinned`: running totals and the seconds at which they were reached."""

    kept: list[tuple[Count, float]]
    last: tuple[Count, float]
    stride: Count
    length: Count


class Meter(TypedDict):
    """State of the run's meter."""

    updates: Count
    samples: Count
    batches_skipped: Count
    pushes_lost: Count
    losses: Means
    instants: Instants


class Scale(TypedDict):
    """State of the loss scale."""

    value: Annotated[float, Within(2.0**-200, 2.0**100)]
    calm: Count
    step: Count
    found_finite: bool
    found_overflow: bool


class Learner(TypedDict):
    """The loss scale, and what was noticed of the model and of its rows."""

    scale: Scale
    drew_unseeded: bool
    rows: dict[str, bool]


class ServerCounters(TypedDict):
    """What an embedding server has counted."""

    version: Count
    updates: Count
    rows_replaced: Count
    lost: Count
    row_staleness: list[Count]


class Clock(TypedDict):
    """The servers' clock: the update and the step from which it counts."""

    updates_per_step: Annotated[int, Within(1, 2**53)]
    base_update: Count
    base_step: Count


class Staleness(TypedDict):
    """Totals of a `StalenessCounter`."""

    any_push: bool
    batches: Count
    steps_missed: Count
    most_missed: Count
    oldest: Count
    pushes: Count
    pushes_missed: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two legs: all pushes are applied and no batch is in flight.

    All plain JSON. What holds arrays stands beside it in files, whose digests are in ``files``.
    """

    samples: Count
    """The cursor: samples of the stream, all passes in a row, that are trained. It fits any number
    of ranks and any way to cut the stream into batches."""
    updates: Count
    """Dense updates so far."""
    config: dict[str, Any]
    """The `TrainConfig` that it was trained with."""
    tables: dict[str, dict[str, Any]]
    """Per table the `TableConfig` that it was trained with, whoever set it."""
    layout: dict[str, Any]
    """The `Layout` that it was trained on."""
    facts: dict[str, Any]
    """What must be the same for a replay (`trace_meta`): seed, data, versions and so on."""
    servers: list[ServerCounters]
    """One of each embedding server."""
    clock: Clock
    learner: Learner
    meter: Meter
    """Losses, instants, and what was skipped or lost."""
    staleness: Staleness | None = None
    """Staleness so far, of a run that keeps no trace."""
    score: float | None = None
    """Of this very state, by the score that ``keep_best`` names; None: it was not judged."""
    told: dict[str, Any]
    """What the summary says of the time before: seconds, warnings, pauses."""
    files: dict[str, str]
    """Digests of the files beside it."""
    format: str = FORMAT

    def write(self, folder: Path) -> None:
        """Make the folder's checkpoint complete."""
        write_sealed(folder / NAME, self)


def read_state(folder: Path) -> RunState:
    """The folder's state; raises `BrokenFileError` with the file's name and what is wrong."""
    file = folder / NAME
    state = read_sealed(RunState, file, FORMAT, "state of a run")
    try:
        _check(state)
    except ValueError as error:
        raise BrokenFileError(f"{file} is not what a run writes: {error}") from None
    return state


def _check(state: RunState) -> None:
    """Hold against each other what stands there twice."""
    rule = "what the meter counts"
    for name in ("samples", "updates"):
        ours, counted = getattr(state, name), dict(state.meter)[name]
        require(ours == counted, name, ours, f"must be {counted}, {rule}")
    require(bool(state.servers), "servers", state.servers, "must have one entry or more")
    for number, server in enumerate(state.servers):
        bins = len(server["row_staleness"])
        name = f"servers[{number}].row_staleness"
        require(bins == STALENESS_BINS, name, bins, f"must have {STALENESS_BINS} entries")
    for name, kind in _FACTS.items():
        fit(state.facts.get(name), kind, f"facts.{name}")
    parse(TrainConfig, state.config, "config")
    for name, table in state.tables.items():
        parse(TableConfig, table, f"tables.{name}")
    parse(Layout, state.layout, "layout")


_FACTS = {"ranks": Count, "shards": Count, "data_sha256": str}
"""Those of the facts that are asked for by name; the others are held against those of a run."""
