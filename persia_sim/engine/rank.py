"""The buffers of one rank, as counters and queues, and who waits for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum

import simpy

from persia_sim.cluster.scenario import Scenario


class Waiter(IntEnum):
    """A process of a rank that may have to wait."""

    LOADER = 0
    LOOKUP = 1
    COPY_IN = 2
    TRAIN = 3
    COPY_OUT = 4
    PUSH = 5


class Rank:
    """Counters say how many batches have passed a point; a batch is known by its step."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env

        # How many batches have passed each stage, in step order.
        self.loaded = 0  # batches delivered by loaders
        self.early: set[int] = set()  # delivered before an earlier one
        self.looked_up = 0  # lookups started
        self.rows_here: set[int] = set()  # looked up, not yet handed on
        self.handed_on = 0  # in step order
        self.copied_in = 0  # copies to the GPU started
        self.on_gpu = 0
        self.trained = 0  # taken by the training loop
        self.pushed = 0  # pushes that have set off
        self.returned = 0  # pushes known to be applied

        # Batches between two stages, and what stops the rank from computing.
        self.backward: deque[int] = deque()
        self.to_push: deque[int] = deque()
        self.computes = False
        self.stall_s = 0.0  # of this step: the replica is locked by a round of averaging
        self.locked_until_s = 0.0  # by a round that began while the rank did not compute

        # Who sleeps, and what it waits for: a deadlock is explained by it.
        self.reasons: dict[Waiter, str] = {}
        self._asleep: list[list[simpy.Event]] = [[] for _ in Waiter]
        self._loaders: dict[int, simpy.Event] = {}  # asleep, by batch

    def wait(self, who: Waiter, why: str, batch: int = 0) -> simpy.Event:
        """An event that `wake` fires; the reason is kept for the message of a deadlock.

        ``batch`` tells loaders apart, which wait for room for one batch each.
        """
        self.reasons[who] = why
        event = simpy.Event(self._env)  # `env.event` looks for its class first
        if who is Waiter.LOADER:
            self._loaders[batch] = event
        else:
            self._asleep[who].append(event)
        return event

    def wake(self, who: Waiter) -> None:
        """Let one waiting process of this kind look again."""
        waiting = self._asleep[who]
        if waiting:
            waiting.pop(0).succeed()

    def wake_loader(self, batch: int) -> None:
        """Let the loader of this batch look again."""
        waiting = self._loaders.pop(batch, None)
        if waiting is not None:
            waiting.succeed()

    def is_waiting(self, who: Waiter) -> bool:
        """Whether a process of this kind sleeps until `wake`."""
        return bool(self._asleep[who])


class Ledger:
    """Counts of pushes; ``finished`` fires with the last that the run waits for."""

    def __init__(
        self, env: simpy.Environment, scenario: Scenario, on_push: Callable[[], object]
    ) -> None:
        self.finished = env.event()
        self._on_push = on_push
        # Pushes that the run still waits for.
        self.missing = pushes_of(scenario)
        self.closed_of_step = [0] * scenario.steps
        self.in_flight = 0
        self.max_in_flight = 0

    def lookup_started(self) -> None:
        """One more batch between the start of its lookup and the end of its push."""
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def closed(self, s: int) -> None:
        """A push of step s is closed."""
        self.in_flight -= 1
        self.closed_of_step[s] += 1

    def returned(self) -> None:
        """A push is done and its sender knows; the last one ends the run."""
        self.missing -= 1
        self._on_push()
        if self.missing == 0:
            self.finished.succeed()


def pushes_of(scenario: Scenario) -> int:
    """Pushes of rows of a run, and as many of dense gradients (async) or to workers (forwarded)."""
    twice = scenario.mode.has_dense_server or scenario.lookahead == "forwarded"
    return scenario.cluster.ranks * scenario.steps * (2 if twice else 1)
