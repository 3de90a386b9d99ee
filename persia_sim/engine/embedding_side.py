"""The embedding side of a run as SimPy generators: loaders, lookups, copies, pushes.

Queues and threads are the original's: a loader holds batches ready for a rank, lookups start in
step order, one thread copies to the GPU, one loop trains, one thread copies back, some tasks push.
Finished lookups are handed on in step order, so a rank trains its steps in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import simpy

from persia_sim.engine.disturbances import Disturbed
from persia_sim.engine.hardware import Platform
from persia_sim.engine.order_log import OrderLog
from persia_sim.model.demand import Demand, Fetch, loader_start_s
from persia_sim.model.noise import Purpose, lognormal_factors, stream
from persia_sim.model.scenario import Scenario, WorkerChoice
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import ALL, Kind
from persia_sim.words.vocabulary import Mode
from persia_sim.words.window import Watermarks

Process = Generator[simpy.Event, Any, None]


class Rank:
    """The buffers of one NN worker, as counters and queues, and who waits for what."""

    def __init__(self) -> None:
        self.loaded = 0  # batches delivered by loaders
        self.early: set[int] = set()  # delivered before an earlier one
        self.looked_up = 0  # lookups started
        self.rows_here: set[int] = set()  # looked up, not yet handed on
        self.handed_on = 0  # in step order
        self.copied_in = 0  # copies to the GPU started
        self.on_gpu = 0
        self.trained = 0  # taken by the training loop
        self.returned = 0  # pushes known to be applied
        self.backward: deque[int] = deque()
        self.to_push: deque[int] = deque()
        self.stall_s = 0.0
        self.waits: dict[str, str] = {}
        self.wakers: dict[str, list[simpy.Event]] = {}


class EmbeddingActors:
    """Everything but the training loops, over the state that all processes share."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        need: Demand,
        platform: Platform,
        disturbed: Disturbed,
        order: OrderLog,
    ) -> None:
        self.env = env
        self.scenario = scenario
        self.need = need
        self.platform = platform
        self.disturbed = disturbed
        self.order = order
        self.finished = env.event()
        ranks, steps = scenario.cluster.ranks, scenario.steps
        self.ranks = [Rank() for _ in range(ranks)]
        self.stamps = [[[np.nan] * steps for _ in range(ranks)] for _ in Mark]
        self.marks = Watermarks(ranks)
        self.own_window = not scenario.mode.has_barrier
        self.gate: dict[tuple[int, int], list[simpy.Event]] = {}
        self.closed = [0] * (ranks + 1)
        # Row pushes, and in async dense pushes, that the run still waits for.
        self.missing = ranks * steps * (2 if scenario.mode is Mode.ASYNC else 1)
        self.step_pushes = [0] * steps
        self.arrivals: dict[int, np.ndarray] = {}  # merged pushes: instants of a step's last
        self.dense_version = 0
        self.lost: set[tuple[int, int]] = set()
        self.applied_pushes = self.saved_pushes = 0  # in all, and at the last checkpoint
        self.forgotten_pushes = 0
        self.max_in_flight = 0
        self.in_flight = 0
        noise, seed = scenario.noise, scenario.seed
        self.gpu_factor = [
            lognormal_factors(stream(seed, Purpose.GPU, r), noise.gpu_cv, steps).tolist()
            for r in range(ranks)
        ]
        workers = scenario.cluster.embedding_workers.processes
        self.random_worker = [
            stream(seed, Purpose.WORKER_CHOICE, r).integers(0, workers, steps).tolist()
            if scenario.worker_choice is WorkerChoice.RANDOM
            else []
            for r in range(ranks)
        ]

    def wait(self, r: int, who: str, why: str) -> simpy.Event:
        """An event that `wake` fires; the reason is kept for the message of a deadlock."""
        rank = self.ranks[r]
        rank.waits[who] = why
        event = self.env.event()
        rank.wakers.setdefault(who, []).append(event)
        return event

    def wake(self, r: int, who: str) -> None:
        """Let one waiting process of this name look again."""
        waiting = self.ranks[r].wakers.get(who)
        if waiting:
            waiting.pop(0).succeed()

    def stamp(self, mark: Mark, r: int, s: int) -> None:
        """This batch reached this instant now."""
        self.stamps[mark][r][s] = self.env.now

    def worker_of(self, r: int, s: int) -> int:
        """The embedding worker that serves a batch."""
        cluster, choice = self.scenario.cluster, self.scenario.worker_choice
        workers = cluster.embedding_workers.processes
        if choice is WorkerChoice.RANDOM:
            return int(self.random_worker[r][s])
        batch = s * cluster.ranks + r
        return (batch // cluster.loaders if choice is WorkerChoice.PER_LOADER else batch) % workers

    def load(self, loader: int) -> Process:
        """Build every L-th batch; hold it back while the rank's data set buffer is full.

        Loaders start spread over the time of one batch: in step they would send bursts.
        """
        ranks, steps, loaders = len(self.ranks), self.scenario.steps, self.scenario.cluster.loaders
        room = self.scenario.queues.dataset
        if loader:
            yield self.env.timeout(loader_start_s(loader, self.scenario, self.need.load_s))
        for batch in range(loader, ranks * steps, loaders):
            s, r = divmod(batch, ranks)
            rank = self.ranks[r]
            while s >= rank.looked_up + room:
                yield self.wait(r, f"load {s}", f"room for step {s} among {room} loaded batches")
            yield self.env.timeout(self.need.load_s)
            yield self.platform.to_worker_from_loader(self.worker_of(r, s))
            self.stamp(Mark.LOADED, r, s)
            rank.early.add(s)
            while rank.loaded in rank.early:
                rank.early.remove(rank.loaded)
                rank.loaded += 1
            self.wake(r, "lookup")

    def start_lookups(self, r: int) -> Process:
        """Start this rank's lookups in step order, each inside the window and with a permit."""
        rank, scenario = self.ranks[r], self.scenario
        tasks, room, permits = (
            scenario.queues.lookup_tasks,
            scenario.queues.dataset,
            scenario.permits,
        )
        for s in range(scenario.steps):
            while s >= rank.loaded:
                yield self.wait(r, "lookup", f"a loader to deliver step {s}")
            while not self.inside_window(r, s):
                yield self.window_opens(r, s)
            while s >= rank.handed_on + tasks:
                yield self.wait(r, "lookup", f"one of {tasks} lookup tasks for step {s}")
            while permits is not None and s >= rank.returned + permits:
                yield self.wait(r, "lookup", f"one of {permits} permits for step {s}")
            rank.waits.pop("lookup", None)
            rank.looked_up += 1
            self.wake(r, f"load {s + room}")
            self.stamp(Mark.LOOKUP, r, s)
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            self.env.process(self.look_up(r, s))

    def inside_window(self, r: int, s: int) -> bool:
        """The rule of `Watermarks.may_start`, on the count kept since the last closing."""
        window = self.scenario.window
        return window is None or self.closed[r if self.own_window else ALL] >= s - window

    def window_opens(self, r: int, s: int) -> simpy.Event:
        """An event that fires when all pushes of steps < s - tau are closed."""
        owner = r if self.own_window else ALL
        steps = s - (self.scenario.window or 0)
        whose = f"rank {r}'s own" if self.own_window else "all ranks'"
        self.ranks[r].waits["lookup"] = f"{whose} pushes of steps < {steps}, to start step {s}"
        event = self.env.event()
        self.gate.setdefault((owner, steps), []).append(event)
        return event

    def look_up(self, r: int, s: int) -> Process:
        """One lookup, from the request to pooled rows on the rank's host."""
        worker = self.worker_of(r, s)
        yield self.env.timeout(self.platform.latency_s)
        yield from self.fetch(r, s, worker, self.need.fetch, Kind.LOOKUP, Mark.READ)
        self.stamp(Mark.ROWS, r, s)
        self.ranks[r].rows_here.add(s)
        self.hand_on(r)

    def fetch(self, r: int, s: int, worker: int, part: Fetch, kind: Kind, mark: Mark) -> Process:
        """Worker, all servers, worker, rank; the rows are read when the last server answers."""
        env, platform = self.env, self.platform
        yield from self.disturbed.worker_back(worker)
        yield env.timeout(self.worker_delay(worker, part.worker_forward_s) + platform.latency_s)
        factor = self.server_noise(Purpose.SERVER_LOOKUP, r, s)
        yield from platform.fan_out(
            worker,
            part.request_bytes,
            self.disturbed.at_servers(part.server_s) * factor,
            part.server_memory_bytes,
            part.rows_bytes,
            lambda instants: self.rows_read(r, s, kind, mark, instants),
        )
        yield env.timeout(self.worker_delay(worker, part.worker_pool_s) + platform.latency_s)
        yield platform.to_rank(worker, r, part.activation_bytes)

    def rows_read(self, r: int, s: int, kind: Kind, mark: Mark, instants: np.ndarray) -> None:
        """The last server has read the rows of this batch."""
        self.stamp(mark, r, s)
        self.order.rows(kind, r, s, instants)

    def worker_delay(self, worker: int, service_s: float) -> float:
        """Queue and serve at an embedding worker."""
        service_s = self.disturbed.at_worker(worker, service_s)
        return self.platform.workers[worker].visit(self.env.now, service_s)

    def server_noise(self, purpose: Purpose, r: int, s: int) -> np.ndarray | float:
        """A factor for each server, or 1."""
        scenario = self.scenario
        if scenario.noise.server_cv == 0:
            return 1.0
        draws = stream(scenario.seed, purpose, r, s)
        return lognormal_factors(draws, scenario.noise.server_cv, len(self.need.server_shares))

    def hand_on(self, r: int) -> None:
        """Move finished lookups, in step order, to the copying thread while there is room."""
        rank, room = self.ranks[r], self.scenario.queues.forwarded
        moved = False
        while rank.handed_on in rank.rows_here and rank.handed_on < rank.copied_in + room:
            rank.rows_here.remove(rank.handed_on)
            rank.handed_on += 1
            moved = True
        if moved:
            self.wake(r, "copy in")
            self.wake(r, "lookup")

    def copy_in(self, r: int) -> Process:
        """The thread that copies activations to the GPU."""
        rank, env, need = self.ranks[r], self.env, self.need
        room = self.scenario.queues.on_gpu
        for s in range(self.scenario.steps):
            while s >= rank.handed_on:
                yield self.wait(r, "copy in", f"the rows of step {s}")
            rank.copied_in += 1
            self.hand_on(r)
            self.stamp(Mark.COPY_IN, r, s)
            yield env.timeout(need.fetch.copy_in_s)
            self.stamp(Mark.ON_GPU, r, s)
            while s >= rank.trained + room:
                yield self.wait(r, "copy in", f"room on the GPU for step {s}")
            rank.on_gpu += 1
            self.wake(r, "train")

    def hand_back(self, r: int, s: int) -> Process:
        """The training loop leaves the gradient for the copying thread."""
        rank, room = self.ranks[r], self.scenario.queues.backward
        while len(rank.backward) >= room:
            yield self.wait(r, "train", f"room among {room} gradients for step {s}")
        rank.backward.append(s)
        self.wake(r, "copy out")

    def copy_out(self, r: int) -> Process:
        """The thread that copies row gradients to the host."""
        rank, room = self.ranks[r], self.scenario.queues.copied_back
        for s in range(self.scenario.steps):
            while not rank.backward:
                yield self.wait(r, "copy out", f"the gradient of step {s}")
            rank.backward.popleft()
            self.wake(r, "train")
            self.stamp(Mark.COPY_OUT, r, s)
            yield self.env.timeout(self.need.copy_out_s)
            self.stamp(Mark.COPIED_OUT, r, s)
            while len(rank.to_push) >= room:
                yield self.wait(r, "copy out", f"room among {room} copied gradients for step {s}")
            rank.to_push.append(s)
            self.wake(r, "push")

    def push(self, r: int) -> Process:
        """One push task: rank to worker to all servers, and the answer back."""
        rank, env, need, platform = self.ranks[r], self.env, self.need, self.platform
        nowhere = np.zeros(len(need.server_shares))
        while True:
            while not rank.to_push:
                yield self.wait(r, "push", "a copied gradient")
            s = rank.to_push.popleft()
            self.wake(r, "copy out")
            self.stamp(Mark.PUSH, r, s)
            worker = self.worker_of(r, s)
            started, written = env.now, nowhere
            yield env.timeout(platform.latency_s)
            yield platform.from_rank(worker, r, need.gradient_bytes)
            yield env.timeout(self.worker_delay(worker, need.worker_scatter_s) + platform.latency_s)
            if self.disturbed.worker_lost(worker, started):
                self.lost.add((r, s))
                yield from self.disturbed.worker_back(worker)
            else:
                factor = self.server_noise(Purpose.SERVER_UPDATE, r, s)
                at_servers, written = env.now, nowhere.copy()
                yield from platform.fan_out(
                    worker,
                    need.push_bytes,
                    self.disturbed.at_servers(need.server_update_s) * factor,
                    need.update_memory_bytes,
                    0.0,
                    partial(np.copyto, written),
                )
                if self.disturbed.server_lost(at_servers):
                    self.lost.add((r, s))
            self.applied(r, s, written)
            yield env.timeout(2 * platform.latency_s)
            self.stamp(Mark.RETURNED, r, s)
            rank.returned += 1
            self.wake(r, "lookup")
            self.one_less()

    def one_less(self) -> None:
        """A push is done; the last one ends the run."""
        self.missing -= 1
        if self.missing == 0:
            self.finished.succeed()

    def applied(self, r: int, s: int, instants: np.ndarray) -> None:
        """The push of (r, s) is closed; merged ones take effect with the last rank's, at each
        server when it has them all (or knows that one is lost)."""
        self.stamp(Mark.APPLIED, r, s)
        self.in_flight -= 1
        self.step_pushes[s] += 1
        lost = (r, s) in self.lost
        self.applied_pushes += not lost
        if lost:
            instants = np.full(len(instants), self.env.now)
            self.order.rows(Kind.LOST_PUSH, r, s, instants)
        if not self.scenario.merges:
            if not lost:
                self.order.rows(Kind.PUSH, r, s, instants, pushes=1)
            self.close([(r, s)])
            return
        self.arrivals[s] = np.maximum(self.arrivals.get(s, instants), instants)
        if self.step_pushes[s] == len(self.ranks):
            batches = [(q, s) for q in range(len(self.ranks))]
            merged = sum(batch not in self.lost for batch in batches)
            if merged:
                self.order.rows(Kind.PUSH, ALL, s, self.arrivals.pop(s), pushes=merged)
            self.close(batches)

    def close(self, batches: list[tuple[int, int]]) -> None:
        """Pushes are closed together; lookups whose window opens may start."""
        for rank, step in batches:
            self.marks.close(rank, step)
        owners = [rank for rank, _ in batches] if self.own_window else [ALL]
        for owner in owners:
            if owner == ALL and self.step_pushes[self.closed[ALL]] < len(self.ranks):
                continue  # the earliest open step still misses a rank
            now_closed = self.marks.closed_steps(None if owner == ALL else owner)
            for steps in range(self.closed[owner] + 1, now_closed + 1):
                for event in self.gate.pop((owner, steps), []):
                    event.succeed()
            self.closed[owner] = now_closed
