"""How ranks that are processes end a leg early, all at the same batch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from runtime.dense.group import RankGroup
from runtime.rank.feed import Feed
from runtime.stop import RunStopped, Stop

LOOK_EVERY_S = 0.1


class LegWatch:
    """One leg's thread beside training.

    When a rank wants the leg to end, every rank stops handing out batches, says which it would hand
    out next, and goes on to the furthest of these: so a batch that any rank has begun is trained by
    all, and nobody waits for the gradients of a batch that another one never takes.
    """

    def __init__(
        self, group: RankGroup, leg: int, feed: Feed, ends_now: Callable[[], bool]
    ) -> None:
        self._group, self._leg, self._feed, self._ends_now = group, leg, feed, ends_now
        self._over = Stop()
        self._thread = threading.Thread(target=self._watch, name="leg", daemon=True)
        self._thread.start()

    def over(self) -> None:
        """Every rank has ended the leg."""
        self._over.set(None)
        self._thread.join()

    def _watch(self) -> None:
        wanted = f"leg {self._leg} is to end"
        try:
            while True:
                self._over.sleep(LOOK_EVERY_S)
                if self._ends_now():
                    self._group.say(wanted)
                if self._group.is_said(wanted):
                    self._feed.end_with(self._agreed)
                    return
        except RunStopped:
            pass
        except Exception as error:  # nobody hands out batches now: the run ends, in a sentence
            self._group.fail(error)

    def _agreed(self, promised: int, asked: int) -> tuple[int, int]:
        told = json.dumps([promised, asked])
        said = self._group.gather(f"leg {self._leg} has promised", told, self._over)
        furthest, last = zip(*map(json.loads, said), strict=True)
        return max(furthest), max(last)
