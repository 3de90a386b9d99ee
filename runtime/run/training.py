"""A run under way: its components and executor, its legs, and what is written down between two."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch import nn

from persia_sim.base.rules import Refused
from persia_sim.base.schema import parse
from persia_sim.base.staleness import StalenessCounter, StalenessSummary, summary_of
from persia_sim.base.trace import Trace
from runtime.checkpoint.initial import begin_with_files
from runtime.checkpoint.lineage import RunLineage
from runtime.checkpoint.places import DENSE
from runtime.checkpoint.rows import Taken, ensure_seen, load, load_values, take
from runtime.checkpoint.whole import Checkpoint, RunState
from runtime.config import TrainConfig
from runtime.dense.state import drain_into, load_generators, load_model
from runtime.executors.constant_lag import CARRIES, ConstantLagRun
from runtime.executors.given_order import OrderedRun
from runtime.executors.open import merged_trace
from runtime.executors.replayable import other_facts
from runtime.executors.threads import ConcurrentRun
from runtime.rank.components import Components, server_rules
from runtime.rank.progress import Evaluate, OnFigures
from runtime.run.figures import Figures, History
from runtime.run.folder import plain
from runtime.run.saver import Cut, RunFailover, Saver, Saving
from runtime.stop import ENOUGH

Judge = Callable[[nn.Module], float]
"""The score of the weights given and the rows as they are."""


def open_executor(components: Components) -> ConcurrentRun | ConstantLagRun | OrderedRun:
    """Who trains the batches: threads, the loop of a constant lag, or a given order of events.

    Replay has its order from a trace; in async the constant lag is an order of events, too.
    """
    if components.config.engine.executor == "concurrent":
        return ConcurrentRun(components)
    is_lag = components.config.engine.executor == "constant_lag"
    sync = components.config.sync
    if is_lag and sync.mode.rules_with(bool(sync.fresh)) in CARRIES:
        return ConstantLagRun(components)
    return OrderedRun(components)


INITIAL_ROWS = "initial_rows"
"""In a run's facts, per table the SHA-256 of the file with which its rows began."""


class Training:
    """From assembled components, fresh or as a checkpoint has them, to the end of the data."""

    def __init__(
        self,
        components: Components,
        facts: dict[str, Any],
        saving: Saving | None = None,
        origin: Checkpoint | None = None,
        line: RunLineage | None = None,
    ) -> None:
        """``facts`` are those of `trace_meta`; ``saving`` says what is gone on from, ``origin``
        whose rows and weights a new run begins with, ``line`` who knows what trained that."""
        # What is gone on from, and the history that the summary goes on telling.
        config = components.config
        saving = saving or Saving()
        start = self._start = saving.start
        self.components = components
        self.facts = facts
        self._saving = saving
        self._line = line or RunLineage(None, config, "")
        self.leads = components.process.leads
        """Whether this process evaluates and saves, for all."""
        self.history = (
            parse(History, start.state.history, f"{start.folder}: history") if start else History()
        )

        # Staleness is counted on the way where no order is kept.
        self._rules = server_rules(
            config, components.store.layout, components.store.tables.values()
        )
        self._counter = StalenessCounter(config.sync.mode, config.sync.ranks)
        if not components.recorder.keeps:
            components.recorder.listen(self._counter.note)
        components.store.run_folder = saving.run
        if saving.run is not None and config.checkpoint.at_end:
            ensure_seen(components.store, saving.run)

        # Weights first, from a checkpoint or from another model: the executor copies them for its
        # ranks.
        dense = start.dense() if start else None
        if start is not None and dense is not None:
            with _naming(start.folder / DENSE):
                load_model(components.learner.model, dense)
        by_file = any(table.initial_file for table in components.store.tables.values())
        self._is_warm = origin is not None or by_file
        if by_file and origin is not None:
            raise Refused("warm_start", "and a file of initial rows both say where rows begin")
        if by_file and start is not None:
            self.facts[INITIAL_ROWS] = start.state.facts.get(INITIAL_ROWS)
        elif by_file and self.leads and self._line.source is not None:
            run = saving.run if components.store.answers_later else None
            self.facts[INITIAL_ROWS] = begin_with_files(components.store, self._line.source, run)
        if origin is not None:
            self._begin_with(origin)
        if start is not None and self.leads:
            components.feed.resume(start.sketches()[0])

        # Then the executor, and what it and its optimisers had.
        self.executor = open_executor(components)
        if start is not None and dense is not None:
            self._go_on(start)
            with _naming(start.folder / DENSE):
                self.executor.rule.load_state_dict(dense)
                load_generators(dense)

        # Who writes checkpoints, and brings a dead server back.
        self.saver: Saver | None = None
        if saving.run is not None:
            self.saver = Saver(
                saving.run, config.checkpoint, saving.on_warning, start, saving.ending
            )
        self.failover: RunFailover | None = None
        self._began_s = time.perf_counter()
        self._judge: Judge | None = None
        self._score: float | None = None

    def begin(
        self,
        evaluate: Evaluate | None,
        on_samples: Callable[[int], None] | None,
        on_figures: OnFigures | None = None,
        judge: Judge | None = None,
    ) -> None:
        """The first sample is about to be read; ``judge`` gives the score of each checkpoint."""
        # The meter counts on from the checkpoint, and evaluates on the way where this one leads.
        self._judge = judge
        components = self.components
        self._began_s = time.perf_counter()
        every = components.config.evaluation.evaluate_every_steps if self.leads else None
        ends = components.feed.ends
        components.meter.start(
            every=every,
            evaluate=evaluate,
            on_samples=on_samples,
            on_figures=on_figures,
            ends=ends,
        )
        if self._start is not None:
            components.meter.load_state_dict(self._start.state.meter)
            if not self.leads:  # these are counted already, where they are told
                components.meter.batches_skipped = components.meter.pushes_lost = 0

        # In modes that read late rows a server that dies may come back with those of a checkpoint.
        if components.config.sync.mode.reads_late_rows:
            self.failover = RunFailover(
                components.store, self._rules, self._saving.run, warm=self._is_warm
            )
            self._note_cut()
            self.failover.allow(self._saving.on_warning)

    def train_legs(self) -> bool:
        """Train leg by leg, and save the run between two of them; whether all data is trained.

        If not, somebody has asked the run to end. When this returns nothing is in flight, and the
        last checkpoint may still be on its way to the disk.
        """
        components = self.components
        try:
            while True:
                # Train to the next cut; nothing is in flight there.
                self._open_leg()
                self.executor.run()
                with components.meter.pause():
                    drained_s = time.perf_counter()
                    at_end, asked = self._end_leg()
                if at_end or asked:
                    return at_end
                pause_s = time.perf_counter() - drained_s
                self.history.longest_pause_s = max(self.history.longest_pause_s, pause_s)
        except BaseException:
            if self.saver is not None:
                self.saver.wait()  # a checkpoint of before is worth waiting for
            raise

    def _end_leg(self) -> tuple[bool, str | None]:
        """Between two legs: save the run where a checkpoint is due; whether all data is trained,
        and why the run is to end if it is."""
        components = self.components
        ending = self._saving.ending
        at_end = components.feed.is_at_the_end()
        self._note_cut()
        # Read once: who is asked behind this ends the next leg, with all the other ranks.
        asked = components.process.ended_by(ending.why)
        ending.why = asked or ending.why  # at every rank the same, whoever else was asked
        at_end = at_end or asked == ENOUGH

        # Save at cuts that a checkpoint is due at, and at the end where it is asked for.
        due = asked not in (None, ENOUGH) or components.config.checkpoint.at_end
        if self.saver is not None and components.meter.samples and due:
            self._score = self._judged(ends=asked not in (None, ENOUGH))
            self.saver.save(components.meter.samples, self.take)
        return at_end, asked

    def _open_leg(self) -> None:
        """Up to its cut: those by steps are the same in every run of a config. When the time is
        over, or somebody asks the run to end, a leg ends as soon as it can."""
        components = self.components
        ending = self._saving.ending
        every_s = components.config.checkpoint.every_s
        ends = []
        for steps in self._cuts_every_steps():
            batches = steps * components.config.dense_updates_per_step
            ends.append((components.feed.next_number // batches + 1) * batches)
        end = min(ends, default=None)
        ending.leg_ends_at_s = time.monotonic() + (every_s or math.inf)
        components.process.open_leg(components.feed, end, ending.ends_leg)

    def _cuts_every_steps(self) -> list[int]:
        """Steps from a cut to the next: those of checkpoints, and where the best one is to stay
        those of evaluations on the way, so that it can be the best of them all."""
        config = self.components.config
        every = [config.checkpoint.every_steps]
        if config.checkpoint.keep_best is not None:
            every.append(config.evaluation.evaluate_every_steps)
        return [steps for steps in every if steps is not None]

    def _judged(self, *, ends: bool) -> float | None:
        """The score of what is about to be saved, as it is when opened: with the gradients applied
        that wait (a dense lag). After a signal there is no time for it."""
        if self._judge is None or ends:
            return None
        config = self.components.config
        rule = self.executor.rule
        with self.components.stop.working():
            model = rule.snapshot()
            state = rule.state_dict() if config.sync.dense_lag else None
            if state:
                drain_into(model, config, state)
            score = self._judge(model)
            if state:
                load_model(model, state)  # in place: not of every model a copy can be made
        return score if math.isfinite(score) else None

    def note_score(self, score: float, stop_after: int) -> None:
        """An evaluation on the way; so many in a row that are no better end the run."""
        history = self.history
        better = history.best_score is None or score > history.best_score
        history.best_score = score if better else history.best_score
        # Once it is enough it stays so: a batch that was under way then may be better again.
        history.since_best = (
            0 if better and history.since_best < stop_after else history.since_best + 1
        )
        if history.since_best >= stop_after:
            self._saving.ending.ask(ENOUGH)

    def _note_cut(self) -> None:
        """Here a server that dies may go on."""
        if self.failover is not None:
            feed = self.components.feed
            steps = feed.first_steps(feed.next_number)
            self.failover.note_cut(self.components.meter.samples, steps)

    @property
    def is_whole(self) -> bool:
        """Whether the order of every server is known: none has died and come back."""
        return self.failover is None or not self.failover.notices

    def figures(self, wall_s: float) -> Figures:
        """What has been counted so far, in so many seconds."""
        # Counted by the meter, by the history over all resumes, and by the servers.
        components = self.components
        meter = self.components.meter
        history = self.history
        counts = components.store.counters
        servers = components.store.statuses()
        of_meter = (
            "samples",
            "steps",
            "updates",
            "updates_per_loss",
            "batches_skipped",
            "pushes_lost",
        )
        of_history = ("longest_pause_s", "resumed_at_samples", "trace_since_samples")

        # Rows and pushes are sums over the servers, and at each over its late and fresh tables.
        groups = [[server, *([server["fresh"]] if "fresh" in server else [])] for server in servers]
        lost, replaced = (
            [sum(group[name] for group in of_server) for of_server in groups]
            for name in ("lost", "rows_replaced")
        )
        return Figures(
            wall_s=wall_s,
            samples_per_s=meter.samples_per_s(),
            rows_evicted=counts["evicted"],
            rows_expired=counts["expired"],
            lookups_not_admitted=counts["not_admitted"],
            row_gradients_dropped=sum(counts[name] for name in counts if "gradients_" in name),
            pushes_lost_at=lost,
            rows_replaced=sum(replaced),
            ranks_fused=components.fused,
            checkpoints_written=history.checkpoints_written - history.checkpoints_failed,
            checkpoints_failed=history.checkpoints_failed,
            stopped_early=history.since_best
            >= (components.config.evaluation.stop_after or math.inf),
            **{name: getattr(meter, name) for name in of_meter},
            **{name: getattr(history, name) for name in of_history},
            **{name: sum(s[name] for s in servers) for name in ("rows", "resident_bytes")},
        )

    def wall_s(self) -> float:
        """Seconds of training, over any number of resumes."""
        return self.history.wall_s + time.perf_counter() - self._began_s

    def staleness_of_fresh_tables(self, trace: Trace) -> StalenessSummary | None:
        """That of the tables named fresh beside late ones; None where there are not both, or no
        order was kept."""
        recorded = self.components.recorder.keeps and self.is_whole
        beside = self._rules.fresh and not self._all_fresh
        return summary_of(trace.of_fresh_tables()) if beside and recorded else None

    @property
    def _all_fresh(self) -> bool:
        return {*self._rules.fresh} == {*self.components.store.tables}

    def staleness(self, trace: Trace) -> StalenessSummary:
        """Staleness of the whole run, of its late tables, or of all where every one is fresh;
        ``trace`` is its order, where it was recorded.

        None where nobody knows it: servers that are processes count none themselves, and
        one that has died has taken what it had recorded with it.
        """
        unrecorded = self.components.config.engine.servers and not self.components.recorder.keeps
        if unrecorded or not self.is_whole:
            return StalenessSummary(None, None, None, None)
        if self.components.recorder.keeps:
            return summary_of(trace.of_fresh_tables() if self._all_fresh else trace)
        counted = self._counter.summary()  # of late tables alone
        return StalenessSummary(None, None, None, None) if self._all_fresh else counted

    def take(self) -> Cut:
        """The whole run as it is between two legs."""
        self.history.checkpoints_written += 1
        self.history.checkpoints_failed = self.saver.failed if self.saver else 0
        rows = take(self.components.store)
        try:
            return self._cut(rows)
        except BaseException:
            rows.drop()
            raise

    def _cut(self, rows: Taken) -> Cut:
        # Everything but rows and weights, as plain JSON.
        components = self.components
        history = self.history
        recorder = self.components.recorder
        meter = components.meter
        servers = components.config.engine.servers
        state = RunState(
            samples=meter.samples,
            updates=meter.updates,
            config=plain(components.config),
            tables=plain(components.store.tables),
            layout=plain(components.store.layout),
            facts=plain(self.facts),
            servers=plain(components.store.server_counters()),
            learner={
                "drew_unseeded": components.learner.drew_unseeded,
                "rows": components.worker.state_dict(),
            },
            meter=plain(meter.state_dict()),
            staleness=None if recorder.keeps or servers else cast(Any, self._counter.state_dict()),
            score=self._score,
            history=plain(asdict(history)) | {"wall_s": self.wall_s()},
            lineage=self._line.lineage(meter.samples, in_part=components.feed.notes_a_share),
            files={},
        )

        # The dense weights, and a sketch of what has trained the rows.
        dense = self.executor.rule.state_dict()
        sketches = components.feed.trained_rows(), self._line.before.rows
        if not (recorder.keeps and self.is_whole):
            return Cut(state, dense, None, rows, sketches)

        # The order, merged later: it must not hold training up.
        facts = {**self.facts, "updates": meter.updates}
        order_so_far = functools.partial(recorder.so_far(), **facts)
        return Cut(state, dense, order_so_far, rows, sketches, components.store.recorded())

    def _begin_with(self, origin: Checkpoint) -> None:
        """Take the values of another model, nothing of how it came to them. Ranks that are other
        processes are given the weights by this one."""
        load_values(self.components.store, origin.rows)
        model = self.components.learner.model
        config = origin.state.config
        with _naming(origin.folder / DENSE):
            dense = origin.dense()
            load_model(model, dense)
            drain_into(model, parse(TrainConfig, config, "config"), dense)

    def _go_on(self, start: Checkpoint) -> None:
        """Take up everything but the dense weights and the meter."""
        components = self.components
        state = start.state
        self.history.resumed_at_samples.append(state.samples)
        if self.leads:
            load(components.store, start.rows)
        if self.leads:
            components.store.resume_run(self._rules, state.servers)
        components.learner.drew_unseeded = state.learner["drew_unseeded"]
        components.worker.load_state_dict(state.learner["rows"])
        self._go_on_with_order(start)

    def _go_on_with_order(self, start: Checkpoint) -> None:
        """The order so far, if this run keeps it and it fits; else the staleness so far."""
        # Without an order only the counts go on.
        components = self.components
        before = start.state.facts
        first_steps = components.feed.first_steps()
        if not components.recorder.keeps:
            if start.state.staleness is not None:
                self._counter.load_state_dict(cast(Any, start.state.staleness), first_steps)
            return

        # With the same ranks and shards the order goes on, else it begins here.
        other = other_facts(before, self.facts)
        trace = start.trace()
        if trace is not None and all(before[k] == self.facts[k] for k in ("ranks", "shards")):
            components.recorder.resume(merged_trace(trace, start.recordings()).events)
            self.facts |= {k: before[k] for k in ("not_replayable", "first_step") if k in before}
        else:
            self.history.trace_since_samples = start.state.samples
            self.facts["first_step"] = min(first_steps) or None

        # An order of two settings is no order of one run.
        if other:
            self.facts["not_replayable"] = f"it was resumed with other settings; {other}"


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """The file stands before what is wrong with its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
