"""The thread engine: every rank a few threads around the same stage functions.

In sync a rank is one thread that does all stages in turn; lookahead adds one that prefetches. In
the other modes a rank is three: one fetches (load, lookup), one trains (forward, backward, dense),
one pushes, with pipes between them; that is where staleness comes from, and the servers' windows
bound it. Injected latency is a delay of each message: messages of a window travel side by side, a
message that is waited for is exposed (law 15).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from persia_sim.words.vocabulary import Mode
from runtime.dense.rules import AsyncRule, DenseRule, OnUpdate, TimedAveraging
from runtime.dense.threads import SharedWeights
from runtime.embedding.open import use_threads
from runtime.rank.loop import RankLoop
from runtime.rank.parts import Parts
from runtime.rank.stages import ForwardedStages, RankStages
from runtime.rank.team import LosePush, Team, lose_nothing
from runtime.stop import RunStopped


def open_rule(parts: Parts, on_update: OnUpdate) -> DenseRule:
    """The rule of the mode among ranks that are threads of this process."""
    config, learner = parts.config, parts.learner
    if config.sync.mode is Mode.ASYNC:
        return AsyncRule(config, learner.model, parts.recorder, on_update)
    if config.sync.mode is Mode.ASYNC_AVERAGING:
        return TimedAveraging(config, learner.model, parts.recorder, on_update)
    # Hooks see gradients before a loss scale is taken out of them, so a scale is exposed.
    overlapped = config.sync.mode.overlaps_dense_sync and learner.scale.value == 1.0
    return SharedWeights(
        config.model,
        learner.model,
        config.sync.ranks,
        overlapped=overlapped,
        dense_lag=config.sync.dense_lag,
        recorder=parts.recorder,
        on_update=on_update,
        stop=parts.stop,
    )


class ConcurrentRun:
    """Trains with all ranks at once and measures what that does."""

    def __init__(self, parts: Parts, *, lose_push: LosePush = lose_nothing) -> None:
        self._config, self._stop = parts.config, parts.stop
        process = parts.process
        self._team = Team(parts, process.open_rule if process else open_rule, lose_push)
        self.rule = self._team.rule
        """The dense weights."""

    def run(self) -> None:
        """Train the feed's leg, which without cuts is all data; nothing is in flight when it ends.

        Raises what the first failing thread raised.
        """
        alone = len(self._team.ranks) == 1 and self._config.sync.mode is Mode.SYNC
        use_threads(self._config.engine.threads if alone else 1)
        first = self._team.begin_leg()
        threads = [t for rank in self._team.ranks for t in self._threads_of(rank, first[rank])]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)  # short, so that Ctrl-C is heard
        except BaseException as error:
            self._stop.set(error)
            raise
        finally:
            # Every wait of a thread looks at the stop, so this ends within one stage.
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._stop.error is not None:
            raise self._stop.error
        self._team.end_leg()

    def _threads_of(self, rank: int, first: int) -> list[threading.Thread]:
        copies, stages = self._team.copies, RankStages(rank, self._team)
        if copies is not None:
            stages = ForwardedStages(rank, self._team, copies, self._config.sync.ahead)
        loop = RankLoop(rank, stages, self._config, self._stop, first)
        return [
            threading.Thread(target=self._guard, args=(body,), name=f"{name}-{rank}")
            for name, body in loop.bodies().items()
        ]

    def _guard(self, body: Callable[[], None]) -> None:
        torch.set_num_threads(self._config.engine.threads)  # OpenMP keeps this per thread
        try:
            body()
        except RunStopped:
            pass
        except BaseException as error:  # told by run(), after all threads have gone home
            self._stop.set(error)
