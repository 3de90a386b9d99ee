"""The training loops of a run as SimPy generators, and the start of every process.

Barrier modes meet once a step; async modes wait for nobody, and may average in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import simpy

from persia_sim.engine.dense_traffic import ReduceOnCards
from persia_sim.engine.disturbances import Disturbed
from persia_sim.engine.embedding_side import EmbeddingActors, Process
from persia_sim.engine.hardware import Platform
from persia_sim.engine.order_log import OrderLog
from persia_sim.engine.rollback import WorkClock
from persia_sim.model.allreduce import sync_delay
from persia_sim.model.demand import Demand
from persia_sim.model.incidents import Crash
from persia_sim.model.scenario import Scenario
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import ALL, Kind
from persia_sim.words.vocabulary import Mode


class Actors(EmbeddingActors):
    """All processes of one run."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        need: Demand,
        platform: Platform,
        disturbed: Disturbed,
        order: OrderLog,
    ) -> None:
        super().__init__(env, scenario, need, platform, disturbed, order)
        self.arrived: list[tuple[int, float, float]] = []
        self.barrier = env.event()
        self.clocks = self.work_clocks()
        self.reduce: ReduceOnCards | None = None
        self.reduced: simpy.Event | None = None
        if scenario.dense_on_cards and scenario.mode.has_barrier:
            self.reduce = ReduceOnCards(env, platform, need.buckets, len(self.ranks))

    def work_clocks(self) -> list[WorkClock]:
        """The clock of each rank's loop, or the one of the barrier; none if nothing can happen."""
        barrier, checkpoints = self.scenario.mode.has_barrier, self.scenario.checkpoints
        loops = range(1 if barrier else len(self.ranks))
        crashes = [self.disturbed.strikes_loop(r, barrier) for r in loops]
        if checkpoints is None and not any(crashes):
            return []
        return [WorkClock(found, checkpoints) for found in crashes]

    def real_end_s(self, loop: int, done_s: float) -> float:
        """When a step of this loop ends, with its checkpoint and after the crashes until then."""
        if not self.clocks:
            return done_s
        clock = self.clocks[loop]
        before = clock.losses.checkpoints
        end_s = clock.end_s(done_s)
        if loop == 0 and clock.losses.checkpoints > before:
            self.saved_pushes = self.applied_pushes
        return end_s

    def forget(self, crash: Crash) -> Process:
        """A server comes back as it was at the last checkpoint."""
        yield self.env.timeout(crash.at_s)
        self.forgotten_pushes += self.applied_pushes - self.saved_pushes

    def start(self) -> None:
        """Create every long-lived process."""
        env, scenario = self.env, self.scenario
        for loader in range(min(scenario.cluster.loaders, len(self.ranks) * scenario.steps)):
            env.process(self.load(loader))
        train = self.train if scenario.mode.has_barrier else self.train_async
        for r in range(len(self.ranks)):
            env.process(self.start_lookups(r))
            env.process(self.copy_in(r))
            env.process(train(r))
            env.process(self.copy_out(r))
            for _ in range(min(scenario.queues.push_tasks, scenario.steps)):
                env.process(self.push(r))
        for crash in self.disturbed.forgetful:
            env.process(self.forget(crash))
        if scenario.mode is Mode.ASYNC_AVERAGING and len(self.ranks) > 1:
            env.process(self.average())

    def take(self, r: int, s: int) -> Process:
        """The training loop waits for its next batch; lookahead brings its rows up to date."""
        rank = self.ranks[r]
        while s >= rank.on_gpu:
            yield self.wait(r, "train", f"step {s} on the GPU")
        rank.trained += 1
        self.wake(r, "copy in")
        if self.need.refresh is not None:
            while self.closed[ALL] < s:
                rank.waits["train"] = f"all ranks' pushes of steps < {s}, to refresh step {s}"
                event = self.env.event()
                self.gate.setdefault((ALL, s), []).append(event)
                yield event
            yield self.env.timeout(self.platform.latency_s)
            part = self.need.refresh
            yield from self.fetch(r, s, self.worker_of(r, s), part, Kind.REFRESH, Mark.REFRESHED)
            yield self.env.timeout(part.copy_in_s)
        self.stamp(Mark.REFRESHED, r, s)

    def compute_s(self, r: int, s: int) -> tuple[float, float]:
        """Forward and backward of this step, with noise and slow-downs."""
        factor = self.disturbed.at_rank(r, self.gpu_factor[r][s])
        return self.need.forward_s * factor, self.need.backward_s * factor

    def train(self, r: int) -> Process:
        """Barrier modes: compute, wait until the gradient of all ranks is summed."""
        env, rank = self.env, self.ranks[r]
        for s in range(self.scenario.steps):
            yield from self.take(r, s)
            self.stamp(Mark.START, r, s)
            forward, backward = self.compute_s(r, s)
            started = env.now
            if self.reduce is not None and self.scenario.mode.overlaps_dense_sync:
                self.reduced = self.reduce.will_compute(started + forward, backward)
            yield env.timeout(forward + backward)
            self.stamp(Mark.BACKWARD_END, r, s)
            rank.waits["train"] = f"the other ranks' gradients of step {s}"
            yield self.meet(s, r, started + forward, backward)
            self.stamp(Mark.UPDATED, r, s)
            yield from self.hand_back(r, s)

    def meet(self, s: int, r: int, forward_end_s: float, backward_s: float) -> simpy.Event:
        """The barrier of step s: fires for everyone when the dense weights are updated."""
        self.arrived.append((r, forward_end_s, backward_s))
        met = self.barrier
        if len(self.arrived) == len(self.ranks) and self.reduce is not None:
            self.arrived = []
            self.barrier = self.env.event()
            self.env.process(self.meet_on_cards(s, met, self.reduced or self.reduce.reduce_now()))
            self.reduced = None
        elif len(self.arrived) == len(self.ranks):
            _, ends, backwards = np.array(sorted(self.arrived)).T
            overlapped = self.scenario.mode.overlaps_dense_sync
            delay = sync_delay(
                self.env.now,
                ends,
                backwards,
                self.need.buckets,
                overlapped,
                self.need.sync_overhead_s,
            )
            delay += self.real_end_s(0, self.env.now + delay) - (self.env.now + delay)
            self.arrived = []
            self.barrier = self.env.event()

            def updated(_: simpy.Event) -> None:
                self.order.dense(Kind.DENSE_UPDATE, ALL, s)
                met.succeed()

            if delay < inf:
                self.env.timeout(delay).callbacks.append(updated)
        return met

    def meet_on_cards(self, s: int, met: simpy.Event, reduced: simpy.Event) -> Process:
        """The same where the all-reduce is traffic: everybody waits for its last bucket."""
        yield reduced
        end_s = self.real_end_s(0, self.env.now + self.need.sync_overhead_s)
        yield self.env.timeout(end_s - self.env.now) if end_s < inf else self.env.event()
        self.order.dense(Kind.DENSE_UPDATE, ALL, s)
        met.succeed()

    def train_async(self, r: int) -> Process:
        """Async modes: compute on weights of one's own and wait for nobody."""
        env, rank, need, platform = self.env, self.ranks[r], self.need, self.platform
        pulls = self.scenario.mode is Mode.ASYNC
        for s in range(self.scenario.steps):
            yield from self.take(r, s)
            if pulls:
                wait = platform.dense_server.visit(env.now, need.dense_copy_s)
                yield env.timeout(wait + 2 * platform.latency_s)
                if self.scenario.dense_on_cards:
                    yield platform.dense_to_rank(r)
                self.order.dense(Kind.DENSE_PULL, r, s, self.dense_version)
            self.stamp(Mark.START, r, s)
            forward, backward = self.compute_s(r, s)
            yield env.timeout(forward + backward)
            while rank.stall_s > 0:
                stall, rank.stall_s = rank.stall_s, 0.0
                yield env.timeout(stall)
            stopped = self.real_end_s(r, env.now) - env.now
            if stopped:
                rank.waits["train"] = f"rank {r} to come back"
                yield env.timeout(stopped) if stopped < inf else env.event()
            self.stamp(Mark.BACKWARD_END, r, s)
            if pulls and self.scenario.dense_on_cards:
                env.process(self.push_dense(r, s))
            elif pulls:
                wait = platform.dense_server.visit(env.now, need.dense_copy_s)
                sent = env.timeout(wait + platform.latency_s)
                sent.callbacks.append(self.dense_applied(r, s))
            else:
                self.order.dense(Kind.DENSE_PUSH, r, s)
            self.stamp(Mark.UPDATED, r, s)
            yield from self.hand_back(r, s)

    def push_dense(self, r: int, s: int) -> Process:
        """A dense gradient crosses both cards before its server takes it."""
        yield self.env.timeout(self.platform.latency_s)
        yield self.platform.dense_from_rank(r)
        wait = self.platform.dense_server.visit(self.env.now, self.need.dense_copy_s)
        sent = self.env.timeout(wait)
        sent.callbacks.append(self.dense_applied(r, s))

    def dense_applied(self, r: int, s: int) -> Callable[[simpy.Event], None]:
        """What happens when the dense server has taken this gradient."""

        def applied(_: simpy.Event) -> None:
            self.order.dense(Kind.DENSE_PUSH, r, s, self.dense_version)
            self.dense_version += 1
            self.one_less()

        return applied

    def average(self) -> Process:
        """Background rounds: every replica enters, and leaves one all-reduce later."""
        rounds, duration = self.scenario.rounds, self.need.averaging_s
        number = still = seen = 0
        while still < 1000:  # a thousand rounds without a trained batch: leave, it is a deadlock
            trained = sum(rank.trained for rank in self.ranks)
            still, seen = (still + 1, seen) if trained == seen else (0, trained)
            yield self.env.timeout(max(0.0, rounds.period_s - (duration if number else 0.0)))
            for kind, wait in ((Kind.AVERAGE_READ, duration), (Kind.AVERAGE_WRITE, 0.0)):
                for r, rank in enumerate(self.ranks):
                    self.order.dense(kind, r, max(0, rank.trained - 1), number)
                    if kind is Kind.AVERAGE_READ:
                        rank.stall_s += rounds.stall_share * duration
                if wait and self.scenario.dense_on_cards:
                    yield self.platform.ring(self.need.averaging_card_bytes, wait)
                else:
                    yield self.env.timeout(wait)
            number += 1
