"""The training loop of the default executor, top to bottom: rows are exactly ``tau`` steps late.

`ConstantLagRun.run` is the whole algorithm of sync, lookahead, raw_hybrid and hybrid in one thread,
without a clock: the same config and seed give the same bytes. What threads or processes do at the
same time stands here in turn, rank after rank. `docs/batch.md` follows one batch through it.

In async every rank has a step of its own: that order, and one that was recorded or simulated, is
carried out event by event (`runtime.executors.given_order`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import COMMON_STEP, FRESH_TABLES, refuse_unless_carried
from runtime.dense.optimizer import DenseGradients, sums_in_rank_order
from runtime.dense.rules import BarrierRule, LateSum, Loss
from runtime.embedding.batch_rows import Handle, RowGradients
from runtime.embedding.server import EmbeddingServer
from runtime.embedding.sharded import ShardedStore
from runtime.rank.components import Components
from runtime.rank.stages import Team

CARRIES = COMMON_STEP | FRESH_TABLES
"""The modes of which this loop is the order."""


@dataclass(slots=True)
class RankBatch:
    """What one rank trains in one step, between its lookup and the push of its rows."""

    handle: Handle
    """The batch, its distinct ids, and their rows as they were read."""
    step_samples: int
    """Samples of all ranks in this step."""
    row_gradients: RowGradients | None = None
    """None before they are computed, and when they are not finite."""


class ConstantLagRun:
    """Trains the batches of a feed, with the rows of ``tau`` steps on their way to the servers."""

    def __init__(self, components: Components) -> None:
        sync = components.config.sync
        has_fresh = bool(sync.fresh)
        who = "the loop of the constant lag"
        refuse_unless_carried(sync.mode, CARRIES, who, fresh=has_fresh)
        # Rows lie in this process: the loop reads and writes them at the servers itself.
        if not isinstance(components.store, ShardedStore):
            raise ValueError(
                "the executor constant_lag needs rows of this process; use --servers 0"
            )

        # What it works with; the rule of the dense weights is that of the modes with a common step.
        self._components = components
        self._store = components.store
        self._servers = components.store.servers
        self._team = Team(components, _barrier_rule)
        assert isinstance(self._team.rule, BarrierRule)
        self.rule: BarrierRule = self._team.rule
        """The dense weights."""
        # What the mode decides of the loop.
        self._is_lookahead = sync.mode.prefetches_rows
        self._has_fresh = has_fresh
        self._merges = sync.merges
        self._tau = sync.window or 0
        """How many steps late rows are; of a config without a bound, none."""

    def run(self) -> None:
        """Train the batches of the feed's leg; nothing is in flight when it ends."""
        # The components of the run, and the steps that are under way: between the lookup of their
        # rows and training, and between training and the write-back.
        components = self._components
        sync = self._components.config.sync
        feed = components.feed
        worker = components.worker
        learner = components.learner
        meter = components.meter
        ahead = sync.ahead if self._is_lookahead else 0
        looked_up: deque[list[RankBatch]] = deque()  # steps whose rows are read, oldest first
        unwritten: deque[list[RankBatch]] = deque()  # trained steps whose rows are not yet pushed

        self._team.begin_leg()
        step = feed.first
        while feed.has_batch(step):
            # Take the batch, cut into the ranks' shares; in lookahead those of the next steps, too.
            # Look its rows up: the pushes of all steps below step - tau are in them.
            while len(looked_up) <= ahead and feed.has_batch(step + len(looked_up)):
                looked_up.append(self._look_up(step + len(looked_up)))
            batches = looked_up.popleft()
            if self._is_lookahead or self._has_fresh:
                self._read_again(batches)

            # Forward and backward: every rank on the same dense weights, its rows pooled to one
            # vector for each sample and field. Their gradients are summed back onto the rows.
            dense: list[DenseGradients] = []
            losses: list[Loss] = []
            samples = 0
            for batch in batches:
                handle = batch.handle
                samples += handle.batch.size
                vectors = worker.pool(handle, learner.allocate)
                staged = learner.stage(handle.batch, vectors)
                model = self.rule.model(handle.rank)
                result = learner.gradients(model, handle, staged, batch.step_samples)
                if result.finite:
                    dense.append(result.dense)
                    batch.row_gradients = worker.scatter(handle, result.vectors)
                else:
                    meter.skip()
                losses.append(result.loss if result.finite else math.nan)

            # Reduce: the dense gradients of all ranks, summed in rank order, make one update.
            self.rule.apply(step, sums_in_rank_order(dense))

            # Once in a while evaluate: rows as they are written, dense weights after this update.
            meter.update(meter.updates + 1, samples, LateSum(losses), self.rule.snapshot)

            # Write back: the rows' gradients of step - tau; of a synchronous start all at once.
            # Those of fresh tables now, as the next step reads them.
            if self._has_fresh:
                self._write_fresh(batches)
            unwritten.append(batches)
            while unwritten and (len(unwritten) > self._tau or step < sync.sync_steps):
                self._write_back(unwritten.popleft())
            step += 1

        # The data, or the leg, has ended: what is late is written.
        while unwritten:
            self._write_back(unwritten.popleft())
        self._team.end_leg()

    def _look_up(self, step: int) -> list[RankBatch]:
        """Take every rank's batch of a step and read its rows at all servers.

        A prefetch of lookahead creates no row. Where the ranks are computed as one batch (fused),
        rank 0 has it, and the reads of the others are only written down.
        """
        components = self._components
        batches = []
        for rank in range(components.config.sync.ranks):
            if components.fused and rank:
                self._note(Kind.LOOKUP, rank, step)
                continue
            work = components.feed.take(rank, step)
            assert work is not None, "the feed has said that it has a batch"
            handle = self._store.begin(rank, step, work.batch)
            for server in self._servers:
                server.read(handle, create=not self._is_lookahead)
            batches.append(RankBatch(handle, work.step_samples))
        return batches

    def _read_again(self, batches: Sequence[RankBatch]) -> None:
        """Bring prefetched rows up to date with the pushes that came since: in lookahead all, else
        those of fresh tables."""
        for batch in batches:
            for server in self._servers:
                server.refresh(batch.handle)
        if self._components.fused:
            for rank in range(1, self._components.config.sync.ranks):
                self._note(Kind.REFRESH, rank, batches[0].handle.step)

    def _write_back(self, batches: Sequence[RankBatch]) -> None:
        """Push a step's row gradients to all servers, in rank order.

        Merged, a row takes one optimiser update from all ranks; else one from each rank.
        """
        updates = [batches] if self._merges else [[batch] for batch in batches]
        for pushed_together in updates:
            for server in self._servers:
                self._push(server, pushed_together, self._merges)

    def _write_fresh(self, batches: Sequence[RankBatch]) -> None:
        """Push a step's gradients of fresh tables to all servers: always one update of all ranks.

        All servers before any late push, since the next step waits for these alone.
        """
        for server in self._servers:
            assert server.fresh is not None, "tables are fresh at all servers or at none"
            self._push(server.fresh, batches, True)

    def _push(self, server: EmbeddingServer, batches: Sequence[RankBatch], merged: bool) -> None:
        pushes = []
        for batch in batches:
            if batch.row_gradients is None:
                server.lose(batch.handle)
            else:
                pushes.append((batch.handle, batch.row_gradients))
        of_ranks = self._components.config.sync.ranks if self._components.fused else len(pushes)
        server.apply(pushes, merged=merged, of_ranks=of_ranks)

    def _note(self, kind: Kind, rank: int, step: int) -> None:
        for server in self._servers:
            server.note(kind, rank, step)


def _barrier_rule(components: Components, on_update: object) -> BarrierRule:
    """One set of weights; the loop itself counts the updates, so nobody is called back."""
    return BarrierRule(
        components.config, components.learner.model, components.recorder, lambda loss, samples: None
    )
