"""The oracle: instants of a run without contention, step by step, without an event engine.

Every instant is the largest of the instants that it waits for, plus a delay. It uses the same
numbers and the same order of additions as the SimPy model, so the two agree to the last bit when
nothing is shared: discipline ``unshared`` and ``infinite_cpus``.
"""

from __future__ import annotations

from bisect import insort

import numpy as np

from persia_sim.base.rules import require
from persia_sim.bounds.transfers import Transfers
from persia_sim.cluster.allreduce import sync_delay
from persia_sim.cluster.demand import Demand, Fetch, Push, demand, loader_start_s
from persia_sim.cluster.incidents import Purpose, lognormal_factors, stream
from persia_sim.cluster.scenario import Discipline, Scenario
from persia_sim.cluster.stamps import Mark


def instants(scenario: Scenario, need: Demand | None = None) -> np.ndarray:
    """Simulated seconds of every mark, float64 [marks, ranks, steps], as `simulate` stamps them."""
    require(
        scenario.discipline is Discipline.UNSHARED and scenario.infinite_cpus,
        "discipline and infinite_cpus",
        (str(scenario.discipline), scenario.infinite_cpus),
        "the oracle is exact only without contention",
        "set unshared and True",
    )
    require(not scenario.disturbances, "disturbances", "set", "the oracle knows none")
    averaging = scenario.mode.averages_replicas and scenario.cluster.ranks > 1
    require(not averaging, "mode", scenario.mode, "the oracle has no background averaging")
    return _Recursion(scenario, need or demand(scenario)).run()


class _Recursion:
    def __init__(self, scenario: Scenario, need: Demand) -> None:
        self.scenario = scenario
        self.need = need
        self.ranks, self.steps = scenario.cluster.ranks, scenario.steps
        self.latency_s = scenario.cluster.link.latency_s
        self.transfers = Transfers(scenario, need)
        self.at = np.full((len(Mark), self.ranks, self.steps), np.nan)
        self.handed_on = np.zeros((self.ranks, self.steps))
        self.taken = np.zeros((self.ranks, self.steps))  # by the training loop
        noise, seed = scenario.noise, scenario.seed
        self.gpu = np.array(
            [
                lognormal_factors(stream(seed, Purpose.GPU, r), noise.gpu_cv, self.steps)
                for r in range(self.ranks)
            ]
        )

    def run(self) -> np.ndarray:
        at, ranks, queues = self.at, self.ranks, self.scenario.queues
        copying = np.zeros(ranks)  # when the thread that copies in is free
        training = np.zeros(ranks)
        copying_back = np.zeros(ranks)
        pushing = np.zeros((ranks, queues.push_tasks))
        loaders = self.scenario.cluster.loaders
        loader = np.array(
            [loader_start_s(number, self.scenario, self.need.load_s) for number in range(loaders)]
        )
        returned: list[list[float]] = [[] for _ in range(ranks)]
        delivered = np.zeros(ranks)
        closed = np.zeros(ranks)
        closed_before: list[np.ndarray] = []  # by step: when this and all earlier are closed
        exact = 0.0
        self.exact_before: list[float] = []  # by step: when its rows and all earlier are exact
        self.forwarded = 0.0  # when the workers had the gradients of all earlier steps
        everyone = np.arange(ranks)
        copy_in_s = self.need.fetch.copy_in_s
        copy_out_s = self.need.push.copy_out_s
        fresh_out_s = self.need.fresh.copy_out_s if self.need.fresh else 0.0
        for s in range(self.steps):
            self._load(s, loader)
            delivered = np.maximum(delivered, at[Mark.LOADED, :, s])
            opens = 0.0
            if self.scenario.steps_ahead is not None and s > self.scenario.steps_ahead:
                opens = closed_before[s - self.scenario.steps_ahead - 1]
            self._start_lookups(s, delivered, returned, opens)
            begins = at[Mark.LOOKUP, :, s] + self.latency_s
            read, rows = self._fetch(begins, s, self.need.fetch, Purpose.SERVER_LOOKUP, opens)
            at[Mark.READ, :, s], at[Mark.ROWS, :, s] = read, rows
            handed = np.maximum(rows, self._past(self.handed_on, s - 1))
            handed = np.maximum(handed, self._past(at[Mark.COPY_IN], s - queues.forwarded))
            self.handed_on[:, s] = handed
            at[Mark.COPY_IN, :, s] = np.maximum(handed, copying)
            at[Mark.ON_GPU, :, s] = at[Mark.COPY_IN, :, s] + copy_in_s
            copying = np.maximum(at[Mark.ON_GPU, :, s], self._past(self.taken, s - queues.on_gpu))
            self.taken[:, s] = np.maximum(copying, training)
            self._train(s, self.taken[:, s])
            updated = at[Mark.UPDATED, :, s]
            training = np.maximum(updated, self._past(at[Mark.COPY_OUT], s - queues.backward))
            at[Mark.COPY_OUT, :, s] = np.maximum(training, copying_back)
            copied = at[Mark.COPY_OUT, :, s]
            fresh = []
            if self.need.fresh is not None:
                copied = copied + fresh_out_s
                fresh.append(self._push(copied, s, self.need.fresh))
            at[Mark.COPIED_OUT, :, s] = copied + copy_out_s
            waiting = self._past(at[Mark.PUSH], s - queues.copied_back)
            copying_back = np.maximum(at[Mark.COPIED_OUT, :, s], waiting)
            task = pushing.argmin(1)
            at[Mark.PUSH, :, s] = np.maximum(copying_back, pushing[everyone, task])
            applied = self._push(at[Mark.PUSH, :, s], s, self.need.push)
            at[Mark.APPLIED, :, s] = np.maximum.reduce([*fresh, applied])
            at[Mark.RETURNED, :, s] = at[Mark.APPLIED, :, s] + 2 * self.latency_s
            pushing[everyone, task] = at[Mark.RETURNED, :, s]
            if self.scenario.permits is not None:
                for r in range(ranks):
                    insort(returned[r], at[Mark.RETURNED, r, s])
            closed = np.maximum(closed, applied)
            barrier = self.scenario.mode.has_barrier
            closed_before.append(np.full(ranks, closed.max()) if barrier else closed)
            exact = max(exact, float(np.max([*fresh, applied][0])))
            self.exact_before.append(exact)
        return at

    def _past(self, instants_of_steps: np.ndarray, s: int) -> np.ndarray | float:
        return instants_of_steps[:, s] if s >= 0 else 0.0

    def _load(self, s: int, loader: np.ndarray) -> None:
        at, room = self.at, self.scenario.queues.dataset
        for r in range(self.ranks):
            number = (s * self.ranks + r) % len(loader)
            start = loader[number]
            if s >= room:
                start = max(start, at[Mark.LOOKUP, r, s - room])
            transfers = self.transfers
            sent = (start + self.need.load_s) + transfers.load_s()
            loader[number] = sent + transfers.input_s()
            at[Mark.LOADED, r, s] = loader[number]

    def _start_lookups(
        self,
        s: int,
        delivered: np.ndarray,
        returned: list[list[float]],
        opens: np.ndarray | float,
    ) -> None:
        scenario = self.scenario
        start = np.maximum(delivered, self._past(self.at[Mark.LOOKUP], s - 1))
        if not scenario.waits_at_servers:
            start = np.maximum(start, opens)
        start = np.maximum(start, self._past(self.handed_on, s - scenario.queues.lookups_in_flight))
        if scenario.queues.reserve:
            start = np.maximum(start, self._past(self.taken, s - scenario.queues.on_gpu))
        if scenario.asks_in_turn:
            start = np.maximum(start, self._past(self.at[Mark.PUSH], s - 1))
        if scenario.permits is not None and s >= scenario.permits:
            # The k-th permit is back at the k-th smallest return, whichever batch it was.
            start = np.maximum(start, [ends[s - scenario.permits] for ends in returned])
        self.at[Mark.LOOKUP, :, s] = start

    def _noise(self, purpose: Purpose, s: int) -> list[np.ndarray | float]:
        cv, seed = self.scenario.noise.server_cv, self.scenario.seed
        if cv == 0:
            return [1.0] * self.ranks
        servers = len(self.need.server_shares)
        return [
            lognormal_factors(stream(seed, purpose, r, s), cv, servers) for r in range(self.ranks)
        ]

    def _at_servers(
        self, service_s: np.ndarray, join_s: float, noise: list[np.ndarray | float]
    ) -> np.ndarray:
        return np.array([float((service_s * factors).max()) + join_s for factors in noise])

    def _fetch(
        self,
        start: np.ndarray,
        s: int,
        part: Fetch,
        purpose: Purpose,
        opens: np.ndarray | float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """When the last server has read, which ``opens`` lets it, and when the rows are on the
        rank's host."""
        asked = start + (part.worker_forward_s + self.latency_s)
        noise = self._noise(purpose, s)
        now = np.maximum(asked + self.transfers.fan_s(part.request_bytes), opens)
        read = now + self._at_servers(part.server_s, part.join_s, noise)
        now = read + self.latency_s if self.latency_s else read
        now = now + self.transfers.fan_s(part.rows_bytes)
        now = now + (part.worker_pool_s + self.latency_s)
        there = self.transfers.rank_s(part.activation_bytes)
        return read, now + there

    def _train(self, s: int, taken: np.ndarray) -> None:
        at, need = self.at, self.need
        now = taken
        if need.forward is not None:
            now = np.maximum(now, self.forwarded)
            now = now + (need.forward.worker_s + self.latency_s)
            size_bytes = need.forward.activation_bytes
            now = now + self.transfers.rank_s(size_bytes)
            now = now + need.forward.copy_in_s
        if need.refresh is not None:
            if s:
                now = np.maximum(now, self.exact_before[s - 1])
            now = now + self.latency_s
            now = self._fetch(now, s, need.refresh, Purpose.SERVER_LOOKUP, 0.0)[1]
            now = now + need.refresh.copy_in_s
        at[Mark.REFRESHED, :, s] = now
        if self.scenario.mode.has_dense_server:
            now = (now + self.latency_s) + self.transfers.dense_served_s()
            now = (now + self.latency_s) + self.transfers.dense_s()
        at[Mark.START, :, s] = now
        forward = need.forward_s * self.gpu[:, s]
        backward = need.backward_s * self.gpu[:, s]
        end = now + (forward + backward)
        at[Mark.BACKWARD_END, :, s] = end
        if self.scenario.mode.has_barrier:
            last = float(end.max())
            overlapped = self.scenario.mode.overlaps_dense_sync
            end = np.full(
                self.ranks,
                last
                + sync_delay(
                    last, now + forward, backward, need.buckets, overlapped, need.sync_overhead_s
                ),
            )
        at[Mark.UPDATED, :, s] = end

    def _push(self, start: np.ndarray, s: int, push: Push) -> np.ndarray:
        need = self.need
        now = start + self.latency_s
        now = now + self.transfers.rank_s(push.gradient_bytes)
        now = now + (push.worker_scatter_s + self.latency_s)
        if need.forward is not None:
            there = float((now + self.transfers.worker_s(need.forward.exchange_bytes)).max())
            self.forwarded = max(self.forwarded, there)
        noise = self._noise(Purpose.SERVER_UPDATE, s)
        now = now + self.transfers.fan_s(push.push_bytes)
        applied: np.ndarray = now + self._at_servers(
            push.server_update_s, push.update_join_s, noise
        )
        return applied
