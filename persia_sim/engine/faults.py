"""Stragglers, crashes and checkpoints as they act on a run's processes and training loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from persia_sim.cluster.incidents import Checkpoints, Crash, SlowDown, Target
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.clock import Clock, Process
from persia_sim.engine.hardware import Platform
from persia_sim.engine.rank import Ledger


class Disturbed:
    """Answers, at the present simulated time, how slow a process is and when it is back."""

    def __init__(
        self, env: Clock, disturbances: tuple[SlowDown | Crash, ...], platform: Platform
    ) -> None:
        self._env = env
        self._slow: dict[Target, list[SlowDown]] = {target: [] for target in Target}
        self._crashes: dict[Target, list[Crash]] = {target: [] for target in Target}
        for event in disturbances:
            if isinstance(event, SlowDown):
                self._slow[event.target].append(event)
            else:
                self._crashes[event.target].append(event)
                if event.target is not Target.RANK:
                    env.process(self._strike(event, platform))

    def _strike(self, crash: Crash, platform: Platform) -> Process:
        yield crash.at_s
        if crash.target is Target.SERVER:
            platform.close_server_until(crash.index, crash.back_s)
        else:
            platform.workers[crash.index].close_until(crash.back_s)

    def factor(self, target: Target, index: int) -> float:
        """How many times as long a rank or worker takes as without its slow-downs."""
        now = self._env.now
        factor = 1.0
        for slow in self._slow[target]:
            if slow.index == index and slow.start_s <= now < slow.end_s:
                factor *= slow.factor
        return factor

    def at_servers(self, service_s: np.ndarray) -> np.ndarray:
        """The service times of all servers, with their slow-downs."""
        now = self._env.now
        live = [s for s in self._slow[Target.SERVER] if s.start_s <= now < s.end_s]
        if live:
            service_s = service_s.copy()
            for slow in live:
                service_s[slow.index] *= slow.factor
        return service_s

    def worker_back(self, worker: int) -> Process:
        """Wait until a crashed worker serves again (its batch is fetched anew)."""
        for crash in self._crashes[Target.WORKER]:
            if crash.index == worker and crash.at_s <= self._env.now < crash.back_s:
                yield crash.back_s - self._env.now

    def worker_lost(self, worker: int, since_s: float) -> bool:
        """Whether the worker crashed while it held a push since then."""
        return any(
            c.index == worker and since_s <= c.at_s <= self._env.now
            for c in self._crashes[Target.WORKER]
        )

    def servers_lost(self, arrived_s: np.ndarray, done_s: np.ndarray) -> np.ndarray | None:
        """Which servers crashed while they held their part of a push (and nobody does it again):
        bool [servers], or None where none did. ``arrived_s`` and ``done_s`` are per server."""
        lost = None
        for c in self._crashes[Target.SERVER]:
            if arrived_s[c.index] <= c.at_s <= done_s[c.index] and not c.full:
                lost = np.zeros(len(done_s), bool) if lost is None else lost
                lost[c.index] = True
        return lost

    def strikes_loop(self, r: int, barrier: bool) -> list[Crash]:
        """The crashes that throw the training loop of a rank back."""
        ranks = [c for c in self._crashes[Target.RANK] if barrier or c.index == r]
        return ranks + [c for c in self._crashes[Target.SERVER] if c.full]

    @property
    def forgetful(self) -> list[Crash]:
        """The crashes in which a server alone goes back to its checkpoint."""
        return [c for c in self._crashes[Target.SERVER] if not c.full]


@dataclass(slots=True)
class Losses:
    """What faults cost one run; times are the mean over the training loops."""

    crashes: int = 0
    """Crashes that fell into the run."""
    outage_s: float = 0.0
    """Crashed processes did not serve, from crash to return: the sum over the crashes."""
    down_s: float = 0.0
    """Training loops stood still for their own crash: detection, restart, load."""
    redone_s: float = 0.0
    """Work since the last checkpoint that was done again."""
    checkpoints: int = 0
    """Checkpoints written (of one loop)."""
    writing_s: float = 0.0
    """Training stood still to write them."""
    lost_pushes: int = 0
    """Pushes that no server ever applied."""
    lost_parts: int = 0
    """Lost parts of pushes that some servers applied: parts, each one server's, that were never
    applied."""
    forgotten_pushes: int = 0
    """Pushes since the last checkpoint of which a crashed server forgot its part, each once."""


class WorkClock:
    """Moves the end of a step past checkpoints and crashes.

    A crash throws the loop back to the last checkpoint, and the work since then takes as long
    again as it did. It is done again in the same order with the same batches, so the order of
    events that survives is the one that the trace holds, each batch once.
    """

    def __init__(self, crashes: Iterable[Crash], checkpoints: Checkpoints | None) -> None:
        self._crashes = deque(sorted(crashes, key=lambda crash: crash.at_s))
        self._checkpoints = checkpoints
        self._began_s = 0.0  # of the present attempt, at the last checkpoint's state
        self.losses = Losses()

    def end_s(self, done_s: float) -> float:
        """When a step really ends whose work would be done at this time.

        >>> from persia_sim.cluster.incidents import Target
        >>> crash = Crash(target=Target.RANK, index=0, at_s=7.0, detect_s=1.0, restart_s=2.0)
        >>> clock = WorkClock([crash], Checkpoints(interval_s=4.0, write_s=0.5))
        >>> clock.end_s(5.0), clock.end_s(8.0)  # 1.5 s of work are lost, 3 s pass, 2.5 s redone
        (5.5, 12.5)
        """
        # The work that is to do in this attempt, with a checkpoint if one is due.
        policy = self._checkpoints
        losses = self.losses
        writes = policy is not None and done_s - self._began_s >= policy.interval_s
        pause_s = policy.write_s if policy is not None and writes else 0.0
        end_s = done_s + pause_s
        work_s = end_s - self._began_s

        # Every crash on the way throws the loop back to the last checkpoint.
        while self._crashes and self._crashes[0].at_s <= end_s:
            crash = self._crashes.popleft()
            losses.crashes += 1
            stopped_s = max(crash.at_s, self._began_s)
            losses.redone_s += stopped_s - self._began_s
            self._began_s = max(crash.back_s, self._began_s)
            losses.down_s += self._began_s - stopped_s
            end_s = self._began_s + work_s

        # A checkpoint that is written is where the next crash goes back to.
        if writes:
            losses.checkpoints += 1
            losses.writing_s += pause_s
            self._began_s = end_s
        return end_s


class RunRecovery:
    """The work clock of each rank's loop, or the one of the barrier; none if nothing can happen."""

    def __init__(
        self, env: Clock, scenario: Scenario, disturbed: Disturbed, ledger: Ledger
    ) -> None:
        self._env = env
        self._disturbed = disturbed
        self._ledger = ledger
        barrier = scenario.mode.has_barrier
        loops = range(1 if barrier else scenario.cluster.ranks)
        crashes = [disturbed.strikes_loop(r, barrier) for r in loops]
        self._clocks: list[WorkClock] = []
        if scenario.checkpoints is not None or any(crashes):
            self._clocks = [WorkClock(of_loop, scenario.checkpoints) for of_loop in crashes]

    def real_end_s(self, loop: int, done_s: float) -> float:
        """When a step of this loop ends, with its checkpoint and after the crashes until then."""
        if not self._clocks:
            return done_s
        clock = self._clocks[loop]
        before = clock.losses.checkpoints
        end_s = clock.end_s(done_s)
        if loop == 0 and clock.losses.checkpoints > before:
            self._ledger.saved = self._ledger.applied
        return end_s

    def start(self) -> None:
        """Wait for the servers that come back as they were at the last checkpoint."""
        for crash in self._disturbed.forgetful:
            self._env.process(self._forget(crash))

    def _forget(self, crash: Crash) -> Process:
        yield crash.at_s
        self._ledger.server_forgets()

    def losses(self, crashes: list[Crash]) -> Losses:
        """What faults cost until now: times are the mean over the loops, but for the outage."""
        # Whole pushes that were lost, and parts of others.
        crashes = [crash for crash in crashes if crash.at_s <= self._env.now]
        masks = self._ledger.lost.values()
        in_part = [mask for mask in masks if not mask.all()]
        total = Losses(
            crashes=len(crashes),
            outage_s=sum(min(crash.back_s, self._env.now) - crash.at_s for crash in crashes),
            lost_pushes=len(masks) - len(in_part),
            lost_parts=sum(int(mask.sum()) for mask in in_part),
            forgotten_pushes=self._ledger.forgotten,
        )

        # Times of the loops: what stood still, was done again, or was written.
        for clock in self._clocks:
            total.down_s += clock.losses.down_s / len(self._clocks)
            total.redone_s += clock.losses.redone_s / len(self._clocks)
            total.writing_s += clock.losses.writing_s / len(self._clocks)
            total.checkpoints = max(total.checkpoints, clock.losses.checkpoints)
        return total
