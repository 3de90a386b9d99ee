"""The concurrent executor: every rank a few threads around the same stage functions.

In sync a rank is one thread that does all stages in turn; lookahead adds one that prefetches. In
the other modes a rank is three: one fetches (load, lookup), one trains (forward, backward, dense),
one pushes, with pipes between them; that is where staleness comes from, and the servers' windows
bound it. Where rows live in other processes fetching is two: one asks, and one takes the answers in
that order, so that `lookups_in_flight` lookups are on their way at once (law 15).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from persia_sim.base.vocabulary import ENDLESS, KNOWN_MODES, refuse_unless_carried
from runtime.config import TrainConfig
from runtime.embedding.native.store import use_threads
from runtime.rank.components import Components
from runtime.rank.learner import enter_device
from runtime.rank.progress import TRAINING
from runtime.rank.stages import Fetched, ForwardedStages, LosePush, RankStages, Team
from runtime.stop import RunStopped, Stop, Turns

CARRIES = KNOWN_MODES
"""The modes that these threads carry out."""


class ConcurrentRun:
    """Trains with all ranks at once and measures what that does."""

    def __init__(self, components: Components, *, lose_push: LosePush | None = None) -> None:
        sync = components.config.sync
        refuse_unless_carried(sync.mode, CARRIES, "the concurrent executor", fresh=bool(sync.fresh))
        self._config = components.config
        self._stop = components.stop
        self._device = str(components.learner.device)
        self._team = Team(components, components.process.open_rule, lose_push)
        self._spans = components.spans
        self.rule = self._team.rule
        """The dense weights."""

    def run(self) -> None:
        """Train the feed's leg, which without cuts is all data; nothing is in flight when it ends.

        Raises what the first failing thread raised.
        """
        engine = self._config.engine
        alone = len(self._team.ranks) == 1 and self._config.sync.mode.reads_fresh_rows
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
        ahead = config.sync.mode.prefetches_rows
        room = config.sync.ahead if ahead else config.queue_capacity
        if config.sync.lookahead == "forwarded":
            room += 1  # the servers' windows hold it back, one more and no more than they let in
        lookups = config.engine.lookups_in_flight
        self._asked: Pipe[Any] = Pipe(f"fetching of rank {rank}", lookups, stop)
        self._fetched: Pipe[Any] = Pipe(f"training of rank {rank}", room, stop, lookups)
        self._computed: Pipe[Any] = Pipe(f"pushing of rank {rank}", room + ahead, stop)

    def bodies(self) -> dict[str, Callable[[], None]]:
        """By name, what each thread of the rank runs."""
        stages = self._stages
        if isinstance(stages, ForwardedStages):
            # Nothing but the other ranks is waited for between two steps.
            return self._fetching(stages.ask_lease, stages.prefetch_lease) | {
                "train": partial(self._compute, stages.train_on_lease),
                "push": partial(self._push, stages.write_back),
            }
        if self._config.sync.fresh:
            # Late rows are read and written beside training; bringing fresh tables up to date is
            # exposed, and so is the push that the next step's waits for.
            return self._fetching(stages.ask, stages.look_up_late, finishes=False) | {
                "train": partial(self._compute, self._train_refreshed, finishes=True),
                "push": partial(self._push, stages.push),
            }
        if self._config.sync.mode.reads_late_rows:
            return self._fetching(stages.ask, stages.look_up) | {
                "train": partial(self._compute, stages.forward_backward),
                "push": partial(self._push, stages.push),
            }
        if self._config.sync.mode.prefetches_rows:
            # The prefetch is hidden, the re-read of stale rows and the push are not.
            return self._fetching(stages.ask_ahead, stages.prefetch, finishes=False) | {
                "rank": partial(self._in_turn, self._refreshed),
            }
        return {"rank": partial(self._in_turn, stages.fetch)}

    def _fetching(
        self,
        ask: Callable[[int], Fetched | None],
        answer: Callable[[Fetched], object],
        *,
        finishes: bool = True,
    ) -> dict[str, Callable[[], None]]:
        """One thread asks and takes the answer; where answers travel, two do that side by side."""
        if self._stages.answers_later:
            return {
                "ask": partial(self._ask, ask),
                "fetch": partial(self._fetch, self._answerable(), answer, finishes),
            }
        return {"fetch": partial(self._fetch, self._asked_in_turn(ask), answer, finishes)}

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

    def _ask(self, ask: Callable[[int], Fetched | None]) -> None:
        """Keep as many lookups on their way as `lookups_in_flight`, permits and the pipe let in;
        those that the window does not let in wait at the servers."""
        step = self._first
        while True:
            # Room for the rows, before they are read: waiting would make them stale.
            self._asked.wait_for_room()
            self._fetched.wait_for_room(self._asked)
            asked = ask(step)
            if asked is None:
                return self._asked.put(None)
            self._asked.put(asked, self._latency_s)
            step += 1

    def _answerable(self) -> Iterator[Fetched]:
        """What another thread has asked for; it is on its way until the next one is wanted."""
        while (asked := self._asked.first()) is not None:
            yield asked
            self._asked.get()
            self._fetched.wake()

    def _asked_in_turn(self, ask: Callable[[int], Fetched | None]) -> Iterator[Fetched]:
        """What this thread asks for, as soon as there is room for its rows."""
        step = self._first
        self._fetched.wait_for_room()
        while (asked := ask(step)) is not None:
            yield asked
            self._fetched.wait_for_room()
            step += 1

    def _fetch(
        self, asked: Iterable[Fetched], answer: Callable[[Fetched], object], finishes: bool
    ) -> None:
        """Take the answers in the order of what was asked."""
        latency_s = 0.0 if self._stages.answers_later else self._latency_s
        steps = self._first
        for one in asked:
            self._fetched.put(answer(one), latency_s)
            steps += 1
        if finishes:  # nobody is told before the last lookup is served
            self._stages.finish(steps)
        self._fetched.put(None)

    def _train_refreshed(self, fetched: Fetched) -> object:
        refreshed = self._stages.refresh(fetched)
        self._stop.sleep(self._latency_s)
        return self._stages.forward_backward(refreshed)

    def _compute(self, compute: Callable[[Any], object], *, finishes: bool = False) -> None:
        steps = self._first
        while (fetched := self._fetched.get()) is not None:
            computed = compute(fetched)
            self._computed.wait_for_room()
            self._computed.put(computed, self._latency_s)
            steps += 1
        if finishes:  # the last rows are up to date
            self._stages.finish(steps)
        self._computed.put(None)

    def _push(self, push: Callable[[Any], None]) -> None:
        while (computed := self._computed.get()) is not None:
            push(computed)


class Pipe(Generic[T]):
    """First in, first out; an item can be taken ``delay_s`` after it was put.

    Delays run side by side, as messages on a network do: that is what lets a window of tau steps
    hide latency (law 15). Every wait ends when the run stops.
    """

    def __init__(self, name: str, capacity: int, stop: Stop, most_delayed: int = ENDLESS) -> None:
        """``most_delayed``: so many items, at most, may have been put and not arrived."""
        self._name = name
        self._capacity = capacity
        self._most_delayed = most_delayed
        self._stop = stop
        self._items: deque[tuple[float, T]] = deque()
        self._changed = Turns()
        stop.on_stop(self._changed.wake)

    def wait_for_room(self, before: Sized = ()) -> None:
        """Return when an item can be put without waiting (by the only thread that puts), and
        ``before`` it those that will come from there."""
        with self._changed:
            self._changed.wait_until(
                lambda: len(self._items) + len(before) < self._capacity,
                self._stop,
                lambda: f"{self._name} waits for room among {self._capacity} batches",
            )
            delayed = len(self._items) >= self._most_delayed
            arrives_s = self._items[-self._most_delayed][0] if delayed else 0.0
        self._sleep_until(arrives_s)

    def __len__(self) -> int:
        return len(self._items)

    def wake(self) -> None:
        """Who waits for room looks again: there are fewer items ``before`` this pipe."""
        self._changed.wake()

    def put(self, item: T, delay_s: float = 0.0) -> None:
        """Add an item; it arrives ``delay_s`` later. Who puts has waited for room."""
        arrives_s = time.monotonic() + delay_s
        if delay_s:
            self._stop.busy_until(arrives_s)
        with self._changed:
            self._items.append((arrives_s, item))
            self._changed.notify_all()

    def first(self) -> T:
        """The oldest item, once it has arrived; it stays (for the only thread that takes)."""
        with self._changed:
            self._changed.wait_until(
                lambda: bool(self._items),
                self._stop,
                lambda: f"{self._name} waits for a batch to come",
            )
            arrives_s, item = self._items[0]
        self._sleep_until(arrives_s)
        return item

    def get(self) -> T:
        """Take the oldest item, once it has arrived."""
        item = self.first()
        with self._changed:
            self._items.popleft()
            self._changed.notify_all()
        return item

    def _sleep_until(self, instant_s: float) -> None:
        left_s = instant_s - time.monotonic()
        if left_s > 0:
            self._stop.sleep(left_s)
