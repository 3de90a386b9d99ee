"""Work, checkpoints and crashes of one training loop, or of all of them at their barrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from persia_sim.model.incidents import Checkpoints, Crash


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
    """Of pushes that some servers applied: parts, each one server's, that were never applied."""
    forgotten_pushes: int = 0
    """Pushes since the last checkpoint of which a crashed server forgot its part."""


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

        >>> from persia_sim.model.incidents import Target
        >>> crash = Crash(target=Target.RANK, index=0, at_s=7.0, detect_s=1.0, restart_s=2.0)
        >>> clock = WorkClock([crash], Checkpoints(interval_s=4.0, write_s=0.5))
        >>> clock.end_s(5.0), clock.end_s(8.0)  # 1.5 s of work are lost, 3 s pass, 2.5 s redone
        (5.5, 12.5)
        """
        policy, losses = self._checkpoints, self.losses
        writes = policy is not None and done_s - self._began_s >= policy.interval_s
        pause_s = policy.write_s if policy is not None and writes else 0.0
        end_s = done_s + pause_s
        work_s = end_s - self._began_s
        while self._crashes and self._crashes[0].at_s <= end_s:
            crash = self._crashes.popleft()
            losses.crashes += 1
            stopped_s = max(crash.at_s, self._began_s)
            losses.redone_s += stopped_s - self._began_s
            self._began_s = max(crash.back_s, self._began_s)
            losses.down_s += self._began_s - stopped_s
            end_s = self._began_s + work_s
        if writes:
            losses.checkpoints += 1
            losses.writing_s += pause_s
            self._began_s = end_s
        return end_s
