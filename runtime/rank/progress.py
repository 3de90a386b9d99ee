"""What a run tells while it trains: samples, losses, spans, what was left out, what bound it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from persia_sim.base.chrome import Moment, Span
from persia_sim.base.vocabulary import Stage
from runtime.dense.rules import Loss, is_known
from runtime.rank.feed import StepEnds

Snapshot = Callable[[], nn.Module]
Evaluate = Callable[[int, int, nn.Module], None]
"""Given updates and samples so far, and the model as it is."""
OnFigures = Callable[[Mapping[str, float]], None]
"""Told figures by name as they come: the loss, and at an evaluation on the way the AUC."""
MOST_UNREAD = 4
"""Updates whose losses may be on their way from a GPU."""
SHARE_OF_THE_LAST = 0.05
"""Of an update's loss in the recent one, which so goes back some twenty updates."""


class Meter:
    """Counts, times, and evaluates every so many updates."""

    def __init__(self, each: int = 1) -> None:
        """``each``: samples that train for one of the data's, which alone are counted."""
        self._each = each
        self.updates = self.samples = self.steps = 0
        self.batches_skipped = self.pushes_lost = 0
        self._counting = threading.Lock()
        self._losses = BlockMeans()
        self._unread: deque[tuple[Loss, int]] = deque()
        self._paused: tuple[float, float | None] = (0.0, None)
        """Seconds of pauses that are over, and when the one began that is not; one object, for
        other threads."""
        self.start()

    def start(
        self,
        *,
        every: int | None = None,
        evaluate: Evaluate | None = None,
        on_samples: Callable[[int], None] | None = None,
        on_figures: OnFigures | None = None,
        ends: StepEnds | None = None,
    ) -> None:
        """The first sample is about to be read; snapshots are evaluated ``every`` steps.
        ``on_figures`` is told the recent loss after each update. ``ends``: of the steps; None: each
        update is one."""
        self._on_figures = on_figures
        self._recent_loss = math.nan
        self._every = every
        self._evaluate = evaluate
        self._on_samples = on_samples
        self._ends = ends
        self._whole_steps = 0
        self._instants = Thinned()
        self._instants.append(0, time.perf_counter())

    @property
    def losses(self) -> list[float]:
        """Mean loss of each dense update; NaN where all of it was left out.

        Of a long run, the mean over each ``updates_per_loss`` updates.
        """
        return self._losses.points

    @property
    def updates_per_loss(self) -> int:
        """Dense updates behind each of ``losses``: 1, unless the run is long."""
        return self._losses.values_per_point

    def evaluates_at(self, updates: int, samples: int) -> bool:
        """Whether a snapshot is evaluated after so many updates, the last of which takes so many
        samples: another ``every`` steps are whole then."""
        if self._every is None:
            return False
        whole = self._whole_after(updates, self.samples + samples // self._each)
        return whole // self._every > self._whole_steps // self._every

    def _whole_after(self, updates: int, samples: int) -> int:
        return updates if self._ends is None else self._ends.whole(samples)

    def update(self, updates: int, samples: int, loss: Loss, snapshot: Snapshot) -> None:
        """A dense update took ``samples`` samples of mean ``loss``; ``updates`` are done so far.

        A loss that is still on its way from a GPU is read some updates later.
        """
        evaluates = self.evaluates_at(updates, samples)
        samples //= self._each
        self._count(updates, self.samples + samples)
        self._unread.append((loss, self.samples))
        self.settle(MOST_UNREAD)
        if self._on_figures and not math.isnan(self._recent_loss):
            self._on_figures({"loss": self._recent_loss})
        if self._on_samples:
            self._on_samples(samples)
        if self._evaluate and evaluates:
            self.settle()
            with self.pause():
                self._evaluate(updates, self.samples, snapshot())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The time of the body is that of an evaluation or of a checkpoint, with all that it takes
        to hold and release the servers: no training. One pause may lie in another."""
        over_s, began_s = self._paused
        if began_s is not None:
            yield
            return
        began_s = time.perf_counter()
        self._paused = over_s, began_s
        try:
            yield
        finally:
            self._paused = over_s + time.perf_counter() - began_s, None

    @property
    def paused_s(self) -> float:
        """Seconds of pauses that are over."""
        return self._paused[0]

    def pauses_s(self) -> float:
        """Seconds of pauses up to now, be one under way; of any thread."""
        over_s, began_s = self._paused
        return over_s if began_s is None else over_s + time.perf_counter() - began_s

    def _count(self, updates: int, samples: int) -> None:
        self.updates = updates
        self.samples = samples
        self._whole_steps = self._whole_after(updates, samples)
        self.steps = updates if self._ends is None else self._ends.begun(samples)

    def settle(self, unread: int = 0) -> None:
        """Read the losses that are known, and wait for all but the last ``unread``.

        An update's instant is that at which its loss was known, whoever waited for it: the push of
        a batch does, often long before the loss is read here. Raises the error of a step whose loss
        or gradients are not finite.
        """
        while self._unread and (len(self._unread) > unread or is_known(self._unread[0][0])):
            loss, samples = self._unread.popleft()
            self._note_loss(float(loss))
            known_s = None if isinstance(loss, float) else loss.known_s
            at_s = time.perf_counter() if known_s is None else known_s
            over_s, began_s = self._paused
            if began_s is not None:  # what a pause waits for was known when it began
                at_s = min(at_s, began_s)
            self._instants.append(samples, at_s - over_s)

    def _note_loss(self, loss: float) -> None:
        self._losses.append(loss)
        if math.isnan(self._recent_loss):
            self._recent_loss = loss
        elif not math.isnan(loss):
            self._recent_loss += SHARE_OF_THE_LAST * (loss - self._recent_loss)

    def skip(self) -> None:
        """A batch was left out because its loss or a gradient was not finite."""
        with self._counting:
            self.batches_skipped += 1

    def lose(self) -> None:
        """A push was lost; its step was closed all the same."""
        with self._counting:
            self.pushes_lost += 1

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; plain JSON."""
        return {
            "updates": self.updates,
            "samples": self.samples,
            "steps": self.steps,
            "batches_skipped": self.batches_skipped,
            "pushes_lost": self.pushes_lost,
            "losses": self._losses.state_dict(),
            "instants": self._instants.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from what `state` gave; the time in between does not count. After `start`."""
        self._count(state["updates"], state["samples"])
        self.batches_skipped = state["batches_skipped"]
        self.pushes_lost = state["pushes_lost"]
        self._losses.load_state_dict(state["losses"])
        later_s = time.perf_counter() - self.paused_s - state["instants"]["last"][1]
        self._instants.load_state_dict(state["instants"], later_s)

    def samples_per_s(self, skip: int | None = None) -> float:
        """Without the first ``skip`` updates (default: a tenth, for warm-up) and pauses."""
        skip = len(self._instants) // 10 if skip is None else skip
        if skip >= len(self._instants) - 1:
            return math.nan
        first = self._instants.at(skip)
        last = self._instants.last
        return (last[0] - first[0]) / max(last[1] - first[1], 1e-9)


MOST_POINTS = 16_384
"""Points kept, twice as many at most; a curve of more has nothing to show for them."""


class BlockMeans:
    """Values in their order; once there are too many, neighbours are merged into their mean.

    A block's mean is over its values that are not NaN, and NaN where all are.

    >>> means = BlockMeans(most_points=2)
    >>> for value in (1.0, 3.0, 5.0, 7.0, 9.0):
    ...     means.append(value)
    >>> means.points, means.values_per_point
    ([2.0, 6.0, 9.0], 2)
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most = 2 * most_points
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._filled = 0  # values in the last block
        self.values_per_point = 1

    def append(self, value: float) -> None:
        """The next value."""
        if self._filled in (0, self.values_per_point):
            if len(self._sums) >= self._most:
                self._sums = [sum(self._sums[k : k + 2]) for k in range(0, self._most, 2)]
                self._counts = [sum(self._counts[k : k + 2]) for k in range(0, self._most, 2)]
                self.values_per_point *= 2
            self._sums.append(0.0)
            self._counts.append(0)
            self._filled = 0
        self._filled += 1
        if not math.isnan(value):
            self._sums[-1] += value
            self._counts[-1] += 1

    @property
    def points(self) -> list[float]:
        """One mean for every ``values_per_point`` values; the last block may be shorter."""
        pairs = zip(self._sums, self._counts, strict=True)
        return [total / count if count else math.nan for total, count in pairs]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; plain JSON."""
        return {
            "sums": list(self._sums),
            "counts": list(self._counts),
            "filled": self._filled,
            "values_per_point": self.values_per_point,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Append to what `state` gave."""
        # JSON has null for a sum that is no number.
        self._sums = [math.nan if total is None else total for total in state["sums"]]
        self._counts = list(state["counts"])
        self._filled = state["filled"]
        self.values_per_point = state["values_per_point"]


class Thinned:
    """Every n-th of a row of points, with n doubled whenever there are too many; the last is kept.

    >>> kept = Thinned(most_points=2)
    >>> for point in range(10):
    ...     kept.append(point, float(point))
    >>> kept.at(0), kept.at(7), kept.last
    ((0, 0.0), (4, 4.0), (9, 9.0))
    """

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most = 2 * most_points
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._length = 0
        self.last: tuple[int, float] = (0, 0.0)

    def __len__(self) -> int:
        return self._length

    def append(self, total: int, at_s: float) -> None:
        """A running total and the instant at which it was reached."""
        self.last = total, at_s
        if self._length % self._stride == 0:
            self._points.append(self.last)
            if len(self._points) > self._most:
                self._points = self._points[::2]
                self._stride *= 2
        self._length += 1

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; plain JSON."""
        return {
            "kept": [list(point) for point in self._points],
            "last": list(self.last),
            "stride": self._stride,
            "length": self._length,
        }

    def load_state_dict(self, state: Mapping[str, Any], later_s: float) -> None:
        """Append to what `state` gave, its instants moved by ``later_s`` seconds."""
        self._points = [(total, at_s + later_s) for total, at_s in state["kept"]]
        self._stride = state["stride"]
        self._length = state["length"]
        self.last = state["last"][0], state["last"][1] + later_s

    def at(self, number: int) -> tuple[int, float]:
        """The point of this number, or the nearest one before it that was kept."""
        return self._points[number // self._stride]


class SpanRecorder:
    """Sums the seconds of each stage, of any number of threads, and keeps all spans if enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._zero_s = time.perf_counter()
        self.spans: list[Span] = []
        self.moments: list[Moment] = []
        """What is to be said of them."""
        self.seconds: dict[tuple[int, str], float] = {}
        """By rank and stage."""
        self.paused_s: dict[int, float] = {}
        """By rank: of its exchanges, while the run was paused, whoever did that."""
        self._adding = threading.Lock()

    @contextmanager
    def span(self, track: str, stage: str, rank: int, step: int) -> Iterator[None]:
        """Time the body as one stage on one track of the rank."""
        start_s = self.now_s()
        try:
            yield
        finally:
            end_s = self.now_s()
            self.add(rank, stage, end_s - start_s)
            if self._enabled:
                self.spans.append(Span(rank, track, stage, step, start_s, end_s))

    @contextmanager
    def exchange(self, rank: int, pauses_s: Callable[[], float]) -> Iterator[None]:
        """The body is an exchange of the rank with the others; ``pauses_s``: of the run so far."""
        before_s = pauses_s()
        try:
            yield
        finally:
            with self._adding:
                more_s = pauses_s() - before_s
                self.paused_s[rank] = self.paused_s.get(rank, 0.0) + more_s

    def now_s(self) -> float:
        """By the clock of the spans."""
        return time.perf_counter() - self._zero_s

    def take_in(self, rank: int, spans: Iterable[list[Any]], behind_s: float, off_s: float) -> None:
        """The spans of a rank in another process, whose clock is ``behind_s`` behind this one, or
        up to ``off_s`` more or less."""
        for span in map(Span._make, spans):
            start_s = span.start_s + behind_s
            end_s = span.end_s + behind_s
            self.spans.append(span._replace(start_s=start_s, end_s=end_s))
        sentence = f"rank {rank}'s clock: within {1e3 * off_s:.2f} ms of rank 0's"
        self.moments = [m for m in self.moments if m.rank != rank] + [Moment(rank, sentence, 0.0)]

    def add(self, rank: int, stage: str, seconds: float) -> None:
        """So many seconds more."""
        with self._adding:
            self.seconds[rank, str(stage)] = self.seconds.get((rank, str(stage)), 0.0) + seconds


TRAINING = "training"
"""Beside the stages: all of a rank's time."""
_EXCHANGES = (Stage.DENSE_SYNC, Stage.DENSE_PULL, Stage.DENSE_PUSH, Stage.AVERAGE)


def bound_by(
    seconds: Mapping[tuple[int, str], float],
    waits: Mapping[tuple[int, int], float],
    paused_s: Mapping[int, float],
) -> str:
    """What took most of the time of the slowest rank, in words; empty if no rank has trained.

    ``seconds``: by rank and stage; ``waits``: by rank and server; ``paused_s``: by rank, of its
    exchanges, in which an evaluation was waited for. The slowest rank is the one that waits least
    in exchanges with the others. What is left beside them and its dense network is time in which it
    had no rows to train on. Shares are of these three together: none is above the whole.

    >>> bound_by({(0, "training"): 9.0, (0, "forward"): 2.0, (0, "load"): 5.0}, {}, {})
    'its data (78 % of the time of rank 0)'
    """

    def spent(rank: int, *stages: str) -> float:
        return sum(seconds.get((rank, stage), 0.0) for stage in stages)

    def exchanged(rank: int) -> float:
        return max(0.0, spent(rank, *_EXCHANGES) - paused_s.get(rank, 0.0))

    # Who waits least for the others is the slowest rank: the others wait for it.
    ranks = [rank for rank, stage in seconds if stage == TRAINING]
    if not ranks:
        return ""
    slowest = min(ranks, key=exchanged)

    # Its time is its dense network, its exchanges, and a rest in which it had no rows to train on.
    dense_s = spent(slowest, Stage.FORWARD, Stage.BACKWARD)
    rest_s = max(0.0, spent(slowest, TRAINING) - dense_s - spent(slowest, *_EXCHANGES))
    summing = "summing and " if len(ranks) > 1 else ""
    shares_s = {
        "its dense network": dense_s,
        f"{summing}applying dense gradients": exchanged(slowest),
        "its data" if 2 * spent(slowest, Stage.LOAD) > rest_s else "its rows": rest_s,
    }
    most = max(shares_s, key=shares_s.__getitem__)
    share = shares_s[most] / max(sum(shares_s.values()), 1e-9)
    sentence = f"{most} ({100 * share:.0f} % of the time of rank {slowest})"

    # Of rows, one server may be the slow one.
    waits_here = {server: s for (rank, server), s in waits.items() if rank == slowest}
    if most == "its rows" and len(waits_here) > 1:
        longest = max(waits_here, key=waits_here.__getitem__)
        share = waits_here[longest] / max(sum(waits_here.values()), 1e-9)
        sentence += f", {100 * share:.0f} % of the waiting for server {longest}"
    return sentence
