"""Checkpoints of a whole run: a folder each, named by the samples trained, complete or ignored.

`checkpoints/<samples>/` holds `rows/` (see `rows`), `dense.pt`, `trace.npz` where the order is
kept (and beside it, not yet merged, what each server process has written down), `trained.arrays`
(sketches of the samples that trained, see `lineage`), and `state.json`, written last: a folder
without it was never finished, and nobody reads it. The state seals the other files by their
digests.

Of a run whose folder is a URL, the same names lie in the store, and `state.json` is sent last; its
working folder has all but the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from persia_sim.base.rules import require
from persia_sim.base.schema import Count, fit, parse
from persia_sim.base.trace import Trace
from runtime.checkpoint.lineage import Lineage, TrainedOn
from runtime.checkpoint.places import (
    CHECKPOINTS,
    DENSE,
    RECORDINGS,
    ROWS,
    SEALED,
    STATE,
    TRACE,
    TRAINED,
    checkpoints_in_store,
    complete_checkpoints,
    fetched,
    folder_of,
    is_checkpoint,
    remove_checkpoint,
    send_checkpoint,
)
from runtime.checkpoint.shard import MANIFEST, read_manifest
from runtime.checkpoint.sketches import Sketches, read_sketches, write_sketches
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.data.fingerprints import NO_ROWS
from runtime.data.split import Split
from runtime.dense.state import DenseState
from runtime.embedding.batch_rows import STALENESS_BINS
from runtime.embedding.config import TableConfig
from runtime.files import (
    BrokenFileError,
    digest_of,
    flush_folder,
    read_arrays,
    read_dense,
    read_sealed,
    write_arrays,
    write_dense,
    write_sealed,
)
from runtime.object_store import address_of, brought, ensure_file, named_as, store_behind

FORMAT = "persia-testbed-run-8"


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


class MeterState(TypedDict):
    """State of the run's meter."""

    updates: Count
    samples: Count
    steps: Count
    batches_skipped: Count
    pushes_lost: Count
    losses: Means
    instants: Instants


class LearnerState(TypedDict):
    """What was noticed of the model and of its rows."""

    drew_unseeded: bool
    rows: dict[str, bool]


class GroupCounters(TypedDict):
    """What an embedding server has counted of a group of tables."""

    version: Count
    updates: Count
    rows_replaced: Count
    lost: Count
    row_staleness: list[Count]


class OfFreshTables(TypedDict, total=False):
    """What is counted apart where tables are named fresh."""

    fresh: GroupCounters


class ServerCounters(GroupCounters, OfFreshTables):
    """What an embedding server has counted, but for the tables named fresh."""

    counters: dict[str, Count]


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
    learner: LearnerState
    meter: MeterState
    """Losses, instants, and what was skipped or lost."""
    staleness: Staleness | None = None
    """Staleness so far, of a run that keeps no trace."""
    score: float | None = None
    """Score of this very state, by the score that ``keep_best`` names; None: it was not judged."""
    history: dict[str, Any]
    """What the summary says of the time before: seconds, warnings, pauses."""
    lineage: Lineage = field(default_factory=Lineage)
    """What trained it, and the models that it was started from."""
    files: dict[str, str]
    """Digests of the files beside it."""
    format: str = FORMAT


def read_state(folder: Path) -> RunState:
    """The folder's state; raises `BrokenFileError` with the file's name and what is wrong."""
    file = folder / STATE
    state = read_sealed(RunState, file, FORMAT, "state of a run")
    try:
        _check(state)
    except ValueError as error:
        raise BrokenFileError(f"{file} is not what a run writes: {error}") from None
    return state


def _check(state: RunState) -> None:
    """Hold against each other what stands there twice."""
    # The cursor and the meter count the same.
    rule = "what the meter counts"
    for name in ("samples", "updates"):
        ours = getattr(state, name)
        counted = dict(state.meter)[name]
        require(ours == counted, name, ours, f"must be {counted}, {rule}")

    # Files of a checkpoint, and no way to another folder.
    for name in state.files:
        require(name in SEALED, "a name in files", name, f"must be one of {', '.join(SEALED)}")

    # A count for each server, of this version's form.
    require(bool(state.servers), "servers", state.servers, "must have one entry or more")
    for number, server in enumerate(state.servers):
        bins = len(server["row_staleness"])
        name = f"servers[{number}].row_staleness"
        require(bins == STALENESS_BINS, name, bins, f"must have {STALENESS_BINS} entries")

    # Config, tables, layout and lineage can be read as what they are.
    for name, kind in _FACTS.items():
        fit(state.facts.get(name), kind, f"facts.{name}")
    parse(TrainConfig, state.config, "config")
    for name, table in state.tables.items():
        parse(TableConfig, table, f"tables.{name}")
    parse(Layout, state.layout, "layout")
    for number, origin in enumerate(state.lineage.origins):
        if origin.files:
            parse(Split, origin.split, f"lineage.origins[{number}].split")


_FACTS = {"ranks": Count, "shards": Count, "data_sha256": str}
"""Facts that are asked for by name; the others are held against those of a run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, and the doors to what it holds."""

    folder: Path
    state: RunState

    @property
    def rows(self) -> Path:
        """The folder that `runtime.checkpoint.rows.load` takes."""
        return self.folder / ROWS

    def dense(self) -> DenseState:
        """The dense network and its optimisers; weights only."""
        return cast(DenseState, read_dense(self._file(DENSE), self.state.files[DENSE]))

    def trace(self) -> Trace | None:
        """The order of events so far, without that of servers; None of a run that keeps none."""
        if TRACE not in self.state.files:
            return None
        file = self.folder / TRACE
        ensure_file(file, self.state.files[TRACE])
        return Trace.load(file)

    def recordings(self) -> list[np.ndarray]:
        """What each server process has written down, int64 [n, 5], in its order."""
        if RECORDINGS not in self.state.files:
            return []
        arrays = read_arrays(self._file(RECORDINGS), self.state.files[RECORDINGS])[1]
        return list(arrays.values())

    def sketches(self) -> Sketches:
        """The samples that trained it, as far as they are known."""
        if TRAINED not in self.state.files:
            return NO_ROWS, NO_ROWS
        return read_sketches(self._file(TRAINED), self.state.files[TRAINED])

    def _file(self, name: str) -> Path:
        """One of the files that the state seals, here."""
        return brought(self.folder / name, self.state.files[name])

    def trained_on(self) -> TrainedOn:
        """The samples that trained it, and the models that it was started from."""
        of_run, before = self.sketches()
        lineage = self.state.lineage
        if not lineage.origins:
            lineage = Lineage(unknown=[str(self.folder)])
        return TrainedOn(lineage=lineage, rows=of_run.behind(before))

    def started_from(self) -> TrainedOn:
        """The samples that trained the models that its run was started from."""
        known = self.state.lineage
        if known.origins:
            lineage = replace(known, origins=known.origins[1:])
            return TrainedOn(lineage=lineage, rows=self.sketches()[1])
        origin = self.state.config.get("warm_start")
        unknown = [] if origin is None else [str(origin)]
        return TrainedOn(lineage=Lineage(unknown=unknown, in_part=True))


def write_checkpoint(
    run: Path,
    state: RunState,
    dense: DenseState,
    trace: Trace | None,
    write_rows: Callable[[Path], object],
    recordings: Sequence[np.ndarray] = (),
    sketches: Sketches = (NO_ROWS, NO_ROWS),
) -> Checkpoint:
    """Write a checkpoint into the run's folder; it counts from the instant of its last file.

    ``write_rows`` fills a folder with the rows of the same instant. ``recordings`` are of server
    processes: merging them takes long, and is left to who goes on. ``sketches`` are those of the
    state's lineage. ``state.files`` is filled in here. Raises OSError when the disk does, and then
    leaves nothing behind; the checkpoints before are untouched.
    """
    folder = folder_of(run, state.samples)
    remove_checkpoint(folder)
    try:
        # Rows and dense weights first, each with its digest.
        folder.mkdir(parents=True, exist_ok=True)  # files of others may be left there
        write_rows(folder / ROWS)
        files = {f"{ROWS}/{MANIFEST}": digest_of(folder / ROWS / MANIFEST)}
        files[DENSE] = write_dense(folder / DENSE, dense)

        # The order so far, and which rows have trained it.
        if trace is not None:
            trace.save(folder / TRACE, compress=False)  # there is little time after a signal
            files[TRACE] = digest_of(folder / TRACE)
        if recordings:
            arrays = {str(server): events for server, events in enumerate(recordings)}
            files[RECORDINGS] = write_arrays(folder / RECORDINGS, {}, arrays).digest
        if state.lineage.origins:
            files[TRAINED] = write_sketches(folder / TRAINED, sketches)

        # The state comes last: a folder without it is no checkpoint.
        whole = replace(state, files=files)
        write_sealed(folder / STATE, whole)
        flush_folder(folder.parent)
        send_checkpoint(run, folder)
    except BaseException:
        remove_checkpoint(folder)
        raise
    return Checkpoint(folder, whole)


def read_checkpoint(folder: Path) -> Checkpoint:
    """A complete checkpoint; raises `BrokenFileError` naming the file that cannot be trusted.

    Rows, weights and trace are checked when they are read.
    """
    state = read_state(folder)
    manifest = f"{ROWS}/{MANIFEST}"
    for name in (manifest, DENSE):
        if name not in state.files:
            raise BrokenFileError(f"{folder / STATE} names no {name}")
    ensure_file(folder / manifest, state.files[manifest])
    return Checkpoint(folder, state)


def newest(run: Path, on_warning: Callable[[str], None] = lambda text: None) -> Checkpoint:
    """The newest checkpoint that can be trusted; ``on_warning`` is told of damaged newer ones.

    Raises `BrokenFileError` when there is none.
    """
    damaged = []
    for folder in reversed(complete_checkpoints(run)):
        try:
            result = read_whole(folder)
        except BrokenFileError as error:
            damaged.append(str(error))
            continue
        for reason in damaged:
            on_warning(f"{reason}; the checkpoint at {result.state.samples:,} samples is used")
        return result
    why = "; ".join(damaged) or f"there is no complete folder in {run / CHECKPOINTS}"
    raise BrokenFileError(f"{run} holds no checkpoint that can be used: {why}")


def read_whole(folder: Path) -> Checkpoint:
    """Read a checkpoint (`read_checkpoint`), with every file read once and held to its digest; but
    rows in a store are left to whoever loads them: they may be more than this host holds."""
    result = read_checkpoint(folder)
    for name, digest in result.state.files.items():
        ensure_file(folder / name, digest)
    if store_behind(folder) is None:
        rows = read_manifest(result.rows)
        for name, digest in zip(rows.files, rows.digests, strict=True):
            ensure_file(result.rows / name, digest)
    return result


def best(run: Path, by: str | None) -> Path | None:
    """The folder of the complete checkpoint with the best score, the newest of equal ones; None
    where none was judged so (a resume may ask for another score), or nothing is asked for."""
    sign = -1.0 if by in ("log_loss", "mse") else 1.0  # of these, lower is better
    judged: list[tuple[float, Path]] = []
    for folder in complete_checkpoints(run) if by else []:
        with suppress(BrokenFileError):  # whoever reads it says so
            state = read_state(folder)
            if state.score is not None and state.config["checkpoint"].get("keep_best") == by:
                judged.append((sign * state.score, folder))
    return max(judged)[1] if judged else None


def find_checkpoint(
    path: Path, on_warning: Callable[[str], None] = lambda text: None
) -> Checkpoint:
    """The checkpoint of this folder, or of this run's folder: the best where the run was
    to keep it, else the newest that can be trusted. Each may be a URL.

    Raises ValueError naming the path and what it would have to hold; ``on_warning`` is told of
    damaged newer checkpoints.
    """
    here = fetched(path)
    with named_as(address_of(here), here):
        return _checkpoint_in(here, on_warning)


def _checkpoint_in(path: Path, on_warning: Callable[[str], None]) -> Checkpoint:
    # A checkpoint's own folder, or what is none.
    if not path.is_dir():
        there = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {there}; give the folder of a run, or of one of its checkpoints")
    if (path / STATE).exists():
        return read_whole(path)
    if path.parent.name == CHECKPOINTS:
        raise BrokenFileError(f"{path} was never finished: it has no {STATE}; give another one")

    # A run that has none.
    if not (path / CHECKPOINTS).is_dir() and (path / "config.json").exists():
        raise ValueError(
            f"the run in {path} wrote no checkpoint, so its model is gone; train with"
            " --checkpoint-every end, or with steps or a time, to keep one"
        )
    if not (path / CHECKPOINTS).is_dir():
        raise ValueError(
            f"{path} holds no {CHECKPOINTS}/ and no {STATE}: it is neither the folder of a run that"
            " wrote checkpoints nor a checkpoint"
        )

    # The best one where the run was told to keep it; if that is damaged, the newest.
    last = newest(path, on_warning)
    folder = best(path, last.state.config["checkpoint"].get("keep_best"))
    if folder in (None, last.folder):
        return last
    try:
        return read_whole(folder)
    except BrokenFileError as error:
        on_warning(f"{error}; the newest checkpoint is used in place of this, the best")
        return last


def keep_newest(run: Path, last: Path, count: int, best_by: str | None = None) -> None:
    """Remove all complete checkpoints but the newest ``count`` up to ``last``, which was written
    just now, and the best; what was left half written; and what lies behind ``last``: a run that
    went on from before it could not trust it."""
    for folder in complete_checkpoints(run):
        if folder.name > last.name:
            remove_checkpoint(folder)
    keep = {*complete_checkpoints(run)[-count:], best(run, best_by)}
    listed = {*(run / CHECKPOINTS).glob("[0-9]*"), *checkpoints_in_store(run)}
    for folder in filter(is_checkpoint, listed):
        if folder not in keep:
            remove_checkpoint(folder)
