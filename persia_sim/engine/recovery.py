"""Checkpoints and crashes as the training loops meet them."""

from __future__ import annotations

from persia_sim.engine.clock import Clock, Process
from persia_sim.engine.disturbances import Disturbed
from persia_sim.engine.ledger import Ledger
from persia_sim.engine.rollback import Losses, WorkClock
from persia_sim.model.incidents import Crash
from persia_sim.model.scenario import Scenario


class Recovery:
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
            self._clocks = [WorkClock(found, scenario.checkpoints) for found in crashes]

    def real_end_s(self, loop: int, done_s: float) -> float:
        """When a step of this loop ends, with its checkpoint and after the crashes until then."""
        if not self._clocks:
            return done_s
        clock = self._clocks[loop]
        before = clock.losses.checkpoints
        end_s = clock.end_s(done_s)
        if loop == 0 and clock.losses.checkpoints > before:
            self._ledger.saved_now()
        return end_s

    def start(self) -> None:
        """Wait for the servers that come back as they were at the last checkpoint."""
        for crash in self._disturbed.forgetful:
            self._env.process(self._forget(crash))

    def _forget(self, crash: Crash) -> Process:
        yield self._env.timeout(crash.at_s)
        self._ledger.server_forgets()

    def losses(self, crashes: list[Crash]) -> Losses:
        """What faults cost until now: times are the mean over the loops, but for the outage."""
        crashes = [crash for crash in crashes if crash.at_s <= self._env.now]
        masks = self._ledger.lost.values()
        in_part = [mask for mask in masks if not mask.all()]
        found = Losses(
            crashes=len(crashes),
            outage_s=sum(min(crash.back_s, self._env.now) - crash.at_s for crash in crashes),
            lost_pushes=len(masks) - len(in_part),
            lost_parts=sum(int(mask.sum()) for mask in in_part),
            forgotten_pushes=self._ledger.forgotten,
        )
        for clock in self._clocks:
            found.down_s += clock.losses.down_s / len(self._clocks)
            found.redone_s += clock.losses.redone_s / len(self._clocks)
            found.writing_s += clock.losses.writing_s / len(self._clocks)
            found.checkpoints = max(found.checkpoints, clock.losses.checkpoints)
        return found
