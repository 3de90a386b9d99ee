"""Who has pushed what: batches in flight, pushes applied, lost and forgotten, and the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import simpy

from persia_sim.model.scenario import Scenario
from persia_sim.words.vocabulary import Mode


class Ledger:
    """Counts of pushes; ``finished`` fires with the last that the run waits for."""

    def __init__(
        self, env: simpy.Environment, scenario: Scenario, on_push: Callable[[], object]
    ) -> None:
        self.finished = env.event()
        self._on_push = on_push
        # Row pushes, and in async dense pushes, that the run still waits for.
        self.missing = pushes_of(scenario)
        self.closed_of_step = [0] * scenario.steps
        self.lost: dict[tuple[int, int], np.ndarray] = {}  # servers without their part, bool [n]
        self.applied = 0
        self.saved = 0  # of the applied ones, those in the last checkpoint
        self.forgotten = 0
        self.in_flight = 0
        self.max_in_flight = 0

    def lookup_started(self) -> None:
        """One more batch between the start of its lookup and the end of its push."""
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def closed(self, r: int, s: int) -> np.ndarray | None:
        """The push of (r, s) is closed; returns the servers at which it was lost, if any."""
        lost = self.lost.get((r, s))
        self.in_flight -= 1
        self.closed_of_step[s] += 1
        self.applied += lost is None or not lost.all()
        return lost

    def returned(self) -> None:
        """A push is done and its sender knows; the last one ends the run."""
        self.missing -= 1
        self._on_push()
        if self.missing == 0:
            self.finished.succeed()

    def saved_now(self) -> None:
        """A checkpoint holds all that is applied."""
        self.saved = self.applied

    def server_forgets(self) -> None:
        """A server is back as it was at the last checkpoint."""
        self.forgotten += self.applied - self.saved


def pushes_of(scenario: Scenario) -> int:
    """Pushes of rows, and in async of dense gradients, of a whole run."""
    return scenario.cluster.ranks * scenario.steps * (2 if scenario.mode is Mode.ASYNC else 1)
