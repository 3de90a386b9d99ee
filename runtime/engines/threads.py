"""The concurrent executor: every rank a set of threads around the same stage functions.

In sync and lookahead a rank is one thread that does all stages in turn. In the other modes it is
three: one fetches (load, lookup), one trains (forward, backward, dense), one pushes, with bounded
queues between them; that is where staleness comes from, and the gate bounds it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from persia_sim.words.vocabulary import Mode
from runtime.embedding.open import use_threads
from runtime.rank.parts import Parts
from runtime.rank.stages import Computed, Fetched, LosePush, Stages
from runtime.stop import RunStopped

T = TypeVar("T")


class ConcurrentRun:
    """Trains with all ranks at once and measures what that does."""

    def __init__(self, parts: Parts, *, lose_push: LosePush = lambda rank, step: False) -> None:
        self._config, self._stop = parts.config, parts.stop
        self._stages = Stages(parts, lose_push)

    def run(self) -> None:
        """Train to the end of the data. Raises what the first failing thread raised."""
        if self._config.engine == "native":
            alone = self._config.ranks == 1 and not self._config.mode.reads_late_rows
            use_threads(self._config.threads if alone else 1)
        threads = [t for rank in range(self._config.ranks) for t in self._threads_of(rank)]
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

    def snapshot(self) -> nn.Module:
        """The model to evaluate."""
        return self._stages.snapshot()

    def _threads_of(self, rank: int) -> list[threading.Thread]:
        if not self._config.mode.reads_late_rows:
            work = self._run_lookahead if self._config.mode is Mode.LOOKAHEAD else self._run_in_turn
            bodies = {"rank": lambda: work(rank)}
        else:
            size = self._config.queue_capacity
            fetched: queue.Queue[Fetched | None] = queue.Queue(size)
            computed: queue.Queue[Computed | None] = queue.Queue(size)
            bodies = {
                "fetch": lambda: self._run_fetch(rank, fetched),
                "train": lambda: self._run_train(rank, fetched, computed),
                "push": lambda: self._run_push(computed),
            }
        return [
            threading.Thread(target=self._guard, args=(body,), name=f"{name}-{rank}")
            for name, body in bodies.items()
        ]

    def _guard(self, body: Callable[[], None]) -> None:
        torch.set_num_threads(self._config.threads)  # OpenMP keeps this per thread
        try:
            body()
        except RunStopped:
            pass
        except BaseException as error:  # told by run(), after all threads have gone home
            self._stop.set(error)

    # The four kinds of thread.

    def _run_in_turn(self, rank: int) -> None:
        step = 0
        while (fetched := self._stages.fetch(rank, step)) is not None:
            self._stages.push(self._stages.train(rank, fetched))
            step += 1
        self._stages.finish(rank, step)

    def _run_lookahead(self, rank: int) -> None:
        ready: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        step = 0
        ended = False
        while True:
            while not ended and ready.qsize() <= self._config.prefetched_steps:
                fetched = self._stages.prefetch(rank, step + ready.qsize())
                ended = fetched is None
                if fetched is not None:
                    ready.put(fetched)
            if ready.empty():
                break
            fetched = self._stages.refresh(rank, ready.get())
            self._stages.push(self._stages.train(rank, fetched))
            step += 1
        self._stages.finish(rank, step)

    def _run_fetch(self, rank: int, out: queue.Queue[Fetched | None]) -> None:
        step = 0
        while (fetched := self._stages.fetch(rank, step)) is not None:
            self._put(out, fetched)
            step += 1
        self._stages.finish(rank, step)
        self._put(out, None)

    def _run_train(
        self, rank: int, source: queue.Queue[Fetched | None], out: queue.Queue[Computed | None]
    ) -> None:
        while (fetched := self._get(source)) is not None:
            self._put(out, self._stages.train(rank, fetched))
        self._put(out, None)

    def _run_push(self, source: queue.Queue[Computed | None]) -> None:
        while (computed := self._get(source)) is not None:
            self._stages.push(computed)

    def _put(self, target: queue.Queue[T], item: T) -> None:
        while True:
            self._stop.check()
            try:
                return target.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _get(self, source: queue.Queue[T]) -> T:
        while True:
            self._stop.check()
            try:
                return source.get(timeout=0.1)
            except queue.Empty:
                continue
