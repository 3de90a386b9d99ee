"""The thread engine: every rank a few threads around the same stage functions.

In sync a rank is one thread that does all stages in turn; lookahead adds one that prefetches. In
the other modes a rank is three: one fetches (load, lookup), one trains (forward, backward, dense),
one pushes, with pipes between them; that is where staleness comes from, and the servers' windows
bound it. Injected latency is a delay of each message: messages of a window travel side by side, a
message that is waited for is exposed (law 15).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from persia_sim.base.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.embedding.native.store import use_threads
from runtime.rank.learner import enter_device
from runtime.rank.parts import Parts
from runtime.rank.progress import TRAINING
from runtime.rank.stages import Fetched, ForwardedStages, LosePush, RankStages, Team
from runtime.stop import RunStopped, Stop, Turns


class ConcurrentRun:
    """Trains with all ranks at once and measures what that does."""

    def __init__(self, parts: Parts, *, lose_push: LosePush | None = None) -> None:
        self._config = parts.config
        self._stop = parts.stop
        self._device = str(parts.learner.device)
        self._team = Team(parts, parts.process.open_rule, lose_push)
        self._spans = parts.spans
        self.rule = self._team.rule
        """The dense weights."""

    def run(self) -> None:
        """Train the feed's leg, which without cuts is all data; nothing is in flight when it ends.

        Raises what the first failing thread raised.
        """
        engine = self._config.engine
        alone = len(self._team.ranks) == 1 and self._config.sync.mode is Mode.SYNC
        # Beside a GPU the cores have nothing to do but the rows.
        use_threads(engine.threads if alone or engine.device != "cpu" else 1)
        first = self._team.begin_leg()
        threads = [t for rank in self._team.ranks for t in self._threads_of(rank, first[rank])]
        began_s = time.perf_counter()
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
        for rank in self._team.ranks:
            self._spans.add(rank, TRAINING, time.perf_counter() - began_s)
        self._team.end_leg()

    def _threads_of(self, rank: int, first: int) -> list[threading.Thread]:
        copies = self._team.copies
        stages = RankStages(rank, self._team)
        if copies is not None:
            stages = ForwardedStages(rank, self._team, copies, self._config.sync.ahead)
        loop = RankLoop(rank, stages, self._config, self._stop, first)
        return [
            threading.Thread(target=self._guard, args=(body,), name=f"{name}-{rank}")
            for name, body in loop.bodies().items()
        ]

    def _guard(self, body: Callable[[], None]) -> None:
        torch.set_num_threads(self._config.engine.threads)  # OpenMP keeps this per thread
        enter_device(self._device)
        try:
            body()
        except RunStopped:
            pass
        except BaseException as error:  # told by run(), after all threads have gone home
            self._stop.set(error)


T = TypeVar("T")


class RankLoop:
    """A rank's threads of one leg as functions; ``bodies`` says which of them the mode needs.

    The leg begins with the rank's step ``first``.
    """

    def __init__(
        self, rank: int, stages: RankStages, config: TrainConfig, stop: Stop, first: int = 0
    ) -> None:
        self._stages = stages
        self._config = config
        self._stop = stop
        self._first = first
        self._latency_s = config.engine.latency_s
        ahead = config.sync.mode is Mode.LOOKAHEAD
        room = config.sync.ahead if ahead else config.queue_capacity
        self._fetched: Pipe[Any] = Pipe(f"training of rank {rank}", room, stop)
        self._computed: Pipe[Any] = Pipe(f"pushing of rank {rank}", room + ahead, stop)

    def bodies(self) -> dict[str, Callable[[], None]]:
        """By name, what each thread of the rank runs."""
        stages = self._stages
        if isinstance(stages, ForwardedStages):
            # Nothing but the other ranks is waited for between two steps.
            return {
                "fetch": partial(self._fetch, stages.prefetch_lease),
                "train": partial(self._compute, stages.train_on_lease),
                "push": partial(self._push, stages.write_back),
            }
        if self._config.sync.mode.reads_late_rows:
            return {
                "fetch": partial(self._fetch, stages.fetch),
                "train": partial(self._compute, stages.forward_backward),
                "push": partial(self._push, stages.push),
            }
        if self._config.sync.mode is Mode.LOOKAHEAD:
            # The prefetch is hidden, the re-read of stale rows and the push are not.
            return {
                "fetch": partial(self._fetch, stages.prefetch, finishes=False),
                "rank": partial(self._in_turn, self._refreshed),
            }
        return {"rank": partial(self._in_turn, stages.fetch)}

    def _in_turn(self, fetch: Callable[[int], Fetched | None]) -> None:
        """Whatever is done here is exposed."""
        step = self._first
        while (fetched := fetch(step)) is not None:
            self._stop.sleep(self._latency_s)
            computed = self._stages.forward_backward(fetched)
            self._stop.sleep(self._latency_s)
            self._stages.push(computed)
            step += 1
        self._stages.finish(step)

    def _refreshed(self, step: int) -> Fetched | None:
        fetched: Fetched | None = self._fetched.get()
        return None if fetched is None else self._stages.refresh(fetched)

    def _fetch(self, fetch: Callable[[int], T | None], *, finishes: bool = True) -> None:
        """Keep as many lookups on their way as window, permits and the pipe let in."""
        step = self._first
        self._fetched.wait_for_room()  # before the rows are read: waiting would make them stale
        while (fetched := fetch(step)) is not None:
            self._fetched.put(fetched, self._latency_s)
            self._fetched.wait_for_room()
            step += 1
        if finishes:
            self._stages.finish(step)
        self._fetched.put(None)

    def _compute(self, compute: Callable[[Any], object]) -> None:
        while (fetched := self._fetched.get()) is not None:
            computed = compute(fetched)
            self._computed.wait_for_room()
            self._computed.put(computed, self._latency_s)
        self._computed.put(None)

    def _push(self, push: Callable[[Any], None]) -> None:
        while (computed := self._computed.get()) is not None:
            push(computed)


class Pipe(Generic[T]):
    """First in, first out; an item can be taken ``delay_s`` after it was put.

    Delays run side by side, as messages on a network do: that is what lets a window of tau steps
    hide latency (law 15). Every wait ends when the run stops.
    """

    def __init__(self, name: str, capacity: int, stop: Stop) -> None:
        self._name = name
        self._capacity = capacity
        self._stop = stop
        self._items: deque[tuple[float, T]] = deque()
        self._changed = Turns()
        stop.on_stop(self._changed.wake)

    def wait_for_room(self) -> None:
        """Return when an item can be put without waiting (by the only thread that puts)."""
        with self._changed:
            self._changed.wait_until(
                lambda: len(self._items) < self._capacity,
                self._stop,
                lambda: f"{self._name} waits for room among {self._capacity} batches",
            )

    def put(self, item: T, delay_s: float = 0.0) -> None:
        """Add an item; it arrives ``delay_s`` later. Who puts has waited for room."""
        arrives_s = time.monotonic() + delay_s
        if delay_s:
            self._stop.busy_until(arrives_s)
        with self._changed:
            self._items.append((arrives_s, item))
            self._changed.notify_all()

    def get(self) -> T:
        """Take the oldest item, once it has arrived."""
        with self._changed:
            self._changed.wait_until(
                lambda: bool(self._items),
                self._stop,
                lambda: f"{self._name} waits for a batch to come",
            )
            arrives_s = self._items[0][0]
        left_s = arrives_s - time.monotonic()
        if left_s > 0:
            self._stop.sleep(left_s)
        with self._changed:
            _, item = self._items.popleft()
            self._changed.notify_all()
        return item
