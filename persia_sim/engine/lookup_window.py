"""The window as events: lookups that lie outside it wait until pushes close."""

from __future__ import annotations

import simpy

from persia_sim.model.scenario import Scenario
from persia_sim.words.trace import ALL
from persia_sim.words.window import Watermarks, steps_to_close


class LookupWindow:
    """The rule of `Watermarks`, and who waits for it to hold."""

    def __init__(self, env: simpy.Environment, scenario: Scenario) -> None:
        self._env = env
        self._tau = scenario.window
        self._own_only = not scenario.mode.has_barrier
        self._marks = Watermarks(scenario.cluster.ranks)
        self._waiting: dict[tuple[int, int], list[simpy.Event]] = {}

    def admits(self, r: int, s: int) -> bool:
        """Whether the lookup of (r, s) may start."""
        return self._marks.may_start(r, s, self._tau, self._own_only)

    def opens(self, r: int, s: int) -> tuple[simpy.Event, str]:
        """An event that fires when the lookup of (r, s) may start, and what it waits for."""
        steps = steps_to_close(s, self._tau or 0)
        whose = f"rank {r}'s own" if self._own_only else "all ranks'"
        event = self._closes(r if self._own_only else ALL, steps)
        return event, f"{whose} pushes of steps < {steps}, to start step {s}"

    def all_closed(self, steps: int) -> bool:
        """Whether all ranks' pushes of so many leading steps are closed."""
        return self._marks.closed_steps() >= steps

    def all_close(self, steps: int) -> simpy.Event:
        """An event that fires when they are."""
        return self._closes(ALL, steps)

    def _closes(self, owner: int, steps: int) -> simpy.Event:
        event = self._env.event()
        self._waiting.setdefault((owner, steps), []).append(event)
        return event

    @property
    def holds_back(self) -> bool:
        """Whether any lookup (or refresh) waits."""
        return bool(self._waiting)

    def close(self, batches: list[tuple[int, int]]) -> None:
        """These pushes are closed together; lookups whose window opens may start."""
        owner = batches[0][0] if self._own_only else ALL
        rank = None if owner == ALL else owner
        before = self._marks.closed_steps(rank)
        for r, s in batches:
            self._marks.close(r, s)
        for steps in range(before + 1, self._marks.closed_steps(rank) + 1):
            for event in self._waiting.pop((owner, steps), []):
                event.succeed()
