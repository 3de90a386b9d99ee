"""The components of a run, which an executor works with, put together in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from persia_sim.base.trace import Trace, TraceRecorder
from persia_sim.base.vocabulary import Dense
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.data.files import files_of
from runtime.data.negatives import negatives_of
from runtime.data.source import LoadedElsewhere, Source
from runtime.dense.averaging import TimedAveraging
from runtime.dense.rules import AsyncRule, DenseRule, OnUpdate, SharedWeights
from runtime.embedding.config import TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.sharded import ShardedStore
from runtime.embedding.store import EmbeddingStore
from runtime.embedding.worker import EmbeddingWorker
from runtime.models.networks import BUILT_IN
from runtime.rank.doors import RankProcess
from runtime.rank.feed import Feed, StepEnds, TrainedRows, steps_ahead, stream_from
from runtime.rank.learner import Learner, draws_random_numbers
from runtime.rank.progress import Meter, SpanRecorder
from runtime.stop import Stop


class OnlyProcess:
    """A `RankProcess` that is alone: all ranks are threads of this process."""

    alone = True
    """Whether the rows end with this process; else ranks that are processes part by themselves."""
    leads = True
    """Whether this process evaluates, counts the updates of all, and writes everything down."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        """Ranks that live here."""

    def open_rule(self, components: Components, on_update: OnUpdate) -> DenseRule:
        """The rule of the dense weights that the mode asks for; ``on_update`` matters where
        it leads."""
        rule = components.config.sync.mode.rules.dense
        overlapped = rule is Dense.OVERLAPPED
        shared = partial(SharedWeights, overlapped=overlapped, stop=components.stop)
        rules: dict[Dense, Callable[..., DenseRule]] = {
            Dense.ALL_REDUCED: shared,
            Dense.OVERLAPPED: shared,
            Dense.ON_SERVERS: AsyncRule,
            Dense.AVERAGED: TimedAveraging,
        }
        return rules[rule](
            components.config, components.learner.model, components.recorder, on_update
        )

    def begin_leg(self, prepare: Callable[[], None]) -> None:
        """Return when all processes are ready and the leading one has prepared the servers."""
        prepare()

    def open_leg(self, feed: Feed, end: int | None, ends_now: Callable[[], bool]) -> None:
        """Batches of a leg up to ``end``, or less: as soon as ``ends_now`` at any process, all end
        it at one cut."""
        feed.begin_leg(end, ends_now)

    def ended_by(self, why: str | None) -> str | None:
        """Why any process was asked to end the run; None: nobody was."""
        return why

    def end_leg(self, components: Components) -> None:
        """Return when all processes have ended the leg; what they have left out is counted where it
        leads."""


@dataclass(frozen=True, slots=True)
class Components:
    """A run that has not started: data, model, rows, and where it is written down."""

    config: TrainConfig
    learner: Learner
    worker: EmbeddingWorker
    feed: Feed
    recorder: TraceRecorder
    meter: Meter
    spans: SpanRecorder
    stop: Stop
    process: RankProcess
    """This one among those of the run."""
    fused: bool
    """Whether the ranks of a step are computed as one batch."""

    @property
    def store(self) -> EmbeddingStore:
        """The rows of the run, behind the embedding worker."""
        return self.worker.store

    def close(self) -> None:
        """Give back what the run has opened, if it is for this process alone."""
        if self.process.alone:
            self.store.close()

    def again(self, source: Source) -> Components:
        """The same over the stream from its start: model and rows stay, records are fresh."""
        stop = Stop()
        config = self.config
        store = self.store
        store.begin_run(server_rules(config, store.layout, store.tables.values()), stop)
        self.spans.seconds.clear()
        self.spans.paused_s.clear()
        self.store.waited_s.clear()
        feed = _feed(config, source, stop, 0, self.process, fused=self.fused)
        return replace(self, feed=feed, meter=Meter(feed.each), stop=stop)


OpenRows = Callable[[TrainConfig, Layout, list[TableConfig], TraceRecorder, Stop], EmbeddingWorker]
"""Opens a run's rows, behind the embedding worker of this process."""


def rows_here(
    config: TrainConfig,
    layout: Layout,
    tables: list[TableConfig],
    recorder: TraceRecorder,
    stop: Stop,
) -> EmbeddingWorker:
    """Rows in this process."""
    # With rows on lease the worker's copies decide what is read; the servers only follow.
    recorder = TraceRecorder(keep=False) if config.sync.lookahead == "forwarded" else recorder
    return EmbeddingWorker(
        NativeStore(
            layout,
            tables,
            shards=config.engine.shards,
            seed=config.seed,
            recorder=recorder,
            rules=server_rules(config, layout, tables),
            stop=stop,
        )
    )


def assemble(
    config: TrainConfig,
    source: Source,
    tables: Mapping[str, TableConfig] | None = None,
    *,
    samples: int = 0,
    open_rows: OpenRows = rows_here,
    process: RankProcess | None = None,
) -> Components:
    """Build model, store and feed from a config; ``tables`` overrides ``config.rows`` by name.

    The feed begins behind the first ``samples`` of the stream.
    """
    # Model, recorder and rows; from here on the rows hold memory or processes.
    used = tables_of(config, source.layout, tables or {})
    learner = Learner(config, source.layout, {name: t.dim for name, t in used.items()})
    recorder = TraceRecorder(keep=config.engine.trace_order)
    stop = Stop()
    worker = open_rows(config, source.layout, list(used.values()), recorder, stop)
    store = worker.store

    # The rest may fail, and then the rows are given back.
    try:
        spans = SpanRecorder(enabled=config.engine.timeline)
        if config.engine.timeline and isinstance(store, ShardedStore):
            store.record_spans(spans.span)
        fused = not why_one_by_one(config, learner.model, used.values())
        process = process or OnlyProcess(range(config.sync.ranks))
        feed = _feed(config, source, stop, samples, process, fused=fused)
        meter = Meter(feed.each)
        return Components(
            config, learner, worker, feed, recorder, meter, spans, stop, process, fused
        )
    except BaseException:
        store.close()
        raise


def tables_of(
    config: TrainConfig, layout: Layout, overrides: Mapping[str, TableConfig]
) -> dict[str, TableConfig]:
    """The tables that the layout's fields name, each as overridden or else as ``config.rows``."""
    names = list(dict.fromkeys(f.table for f in layout.fields))
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise ValueError(f"tables {unknown} are used by no field; the fields use {names}")
    return {name: replace(overrides.get(name, config.rows), name=name) for name in names}


ALL_TABLES = "all"
"""In `sync.fresh`, every table."""


def fresh_tables(named: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """The tables that ``sync.fresh`` means, sorted; raises ValueError for a name that the data
    lack, and for fields that share a table with all the others: then nothing would be late."""
    tables = {field.table for field in layout.fields}
    of_fields = {field.name: field.table for field in layout.fields}
    if ALL_TABLES in named:
        return tuple(sorted(tables))
    meant = set()
    for name in named:
        if name not in tables and name not in of_fields:
            raise ValueError(
                f"sync.fresh names {name!r}, which is no field or table of the data; choose among"
                f" {', '.join(dict.fromkeys([*of_fields, *sorted(tables)]))}, or {ALL_TABLES}"
            )
        meant.add(name if name in tables else of_fields[name])

    # Who names one field means that the others are late.
    besides = [f.name for f in layout.fields if not {f.name, f.table} & {*named}]
    if meant == tables and besides:
        raise ValueError(
            f"sync.fresh {' '.join(named)} means every table of the data, as {besides[0]} shares"
            f" one: no row would be late; give {named[0]} a table of its own in the schema"
            f' (columns = [{{ name = "{named[0]}", table = "{named[0]}" }}, ...]), or name'
            f" {ALL_TABLES}"
        )
    return tuple(sorted(meant))


def server_rules(config: TrainConfig, layout: Layout, tables: Iterable[TableConfig]) -> ServerRules:
    """How lookups and pushes of this run meet at a server."""
    sync = config.sync
    fresh = fresh_tables(sync.fresh, layout)
    ordered = {table.name for table in tables if table.depends_on_lookup_order}
    pushes = sync.ranks if sync.mode.has_barrier else config.dense_updates_per_step
    exact = sync.mode.has_barrier and (sync.window == 0 or sync.sync_steps > 0)
    return ServerRules(
        ranks=sync.ranks,
        tau=sync.window,
        sync_steps=sync.sync_steps,
        per_rank_window=not sync.mode.has_barrier,
        merges=sync.merges,
        # Row updates that take ``batch`` samples together.
        updates_per_step=1 if sync.merges else pushes,
        in_rank_order=exact and bool(ordered - {*fresh}),
        fresh_in_rank_order=bool(ordered & {*fresh}),
        fresh=fresh,
        delay_compensation=sync.delay_compensation,
        lr_by_staleness=sync.lr_by_staleness,
        half=sync.half,
    )


def _feed(
    config: TrainConfig,
    source: Source,
    stop: Stop,
    samples: int,
    process: RankProcess,
    *,
    fused: bool,
) -> Feed:
    # Rows of files may come again in other files; what is written down of them is written by one.
    trained = TrainedRows() if process.leads and files_of(source) is not None else None
    begin_pass = (lambda number: None) if trained is None else trained.begin_pass
    ends = StepEnds() if process.leads and config.shares_steps else None
    first, stream = stream_from(config, source, samples, begin_pass, ends)
    barrier = config.sync.mode.has_barrier
    return Feed(
        stream,
        config.sync.ranks,
        barrier,
        stop,
        first,
        local_ranks=process.ranks,
        fused=fused,
        asks=source.ask if isinstance(source, LoadedElsewhere) else None,
        trained=trained,
        negatives=negatives_of(source, config.seed),
        ends=ends,
        ahead=steps_ahead(-(-config.batch_per_push // (config.sync.ranks if barrier else 1))),
    )


FUSED = "ranks_fused"
"""What a trace says of itself when its run was computed so: its replay is, too."""


def why_one_by_one(config: TrainConfig, model: nn.Module, tables: Iterable[TableConfig]) -> str:
    """Why the ranks of this run are computed one by one; "" when they are one batch."""
    sync = config.sync
    engine = config.engine

    # A replay does as the recorded run did, to give its bytes.
    if engine.executor == "replay" and engine.trace is not None:
        was_fused = Trace.load(engine.trace).meta.get(FUSED)
        return "" if was_fused else "the recorded run did so"

    # Every reason for which a joint batch would compute something else than the ranks do (law 14).
    name = config.model.name
    independent = name in BUILT_IN or getattr(model, "samples_are_independent", False)
    reasons = {
        "it was asked for": not engine.fuse_ranks,
        "there is one rank": sync.ranks == 1,
        "only executor constant_lag reads the same rows for all": engine.executor != "constant_lag",
        f"mode {sync.mode} has no common step": not sync.mode.has_barrier,
        "pushes are applied on arrival": not sync.merges,
        "nonfinite skip leaves out single ranks": config.nonfinite == "skip",
        "each rank's gradients are rounded as they travel": sync.half,
        f"precision {engine.precision} rounds more than sums": engine.precision
        not in ("float32", "float64"),
        "the model draws random numbers for each rank": draws_random_numbers(model),
        f"model {name} does not say samples_are_independent = True": not independent,
        "what a table holds depends on the order of its lookups": any(
            table.depends_on_lookup_order for table in tables
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
