"""Which samples (rank, step) trains: the stream, cut and shared out so that each goes out once.

A run is a sequence of legs. A leg trains the batches from one cut to the next and ends with nothing
in flight, so that the whole state of the run can be written down between two of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import NamedTuple

from persia_sim.base.window import first_step
from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.data.fingerprints import NO_ROWS, RowSet, Sketch
from runtime.data.negatives import Negatives
from runtime.data.source import (
    LoadedElsewhere,
    Source,
    rebatch,
    share,
    shuffled,
    shuffled_in_buffer,
)
from runtime.stop import Stop, Turns

MAX_DRIFT_STEPS = 1024
"""Steps of batches kept for slower ranks; a rank that is further ahead waits for them."""
LEAST_AHEAD_STEPS = 16
AHEAD_STEPS = 64
"""Steps whose samples are asked for before any rank wants them: at least half as many are on their
way or here, which hides a loader that is 100 ms away from steps of 3 ms."""
_AHEAD_SAMPLES = 2**18  # of a rank, some 70 MB at 26 fields: larger steps take longer, too


def steps_ahead(batch_per_rank: int) -> int:
    """For how many steps a rank asks for samples ahead.

    >>> [steps_ahead(batch) for batch in (256, 8192, 65_536)]
    [64, 32, 16]
    """
    return max(LEAST_AHEAD_STEPS, min(AHEAD_STEPS, _AHEAD_SAMPLES // batch_per_rank))


class TrainedRows:
    """The rows that are trained, as a sketch: those of the first pass, later ones bring no others.

    Of a stream of names, which loaders hold, those that this process takes.
    """

    def __init__(self) -> None:
        self._sketch = Sketch()
        self._before = NO_ROWS
        self._read: deque[tuple[int, Batch]] = deque()
        self._is_first = True

    def resume(self, before: RowSet) -> None:
        """These were trained before the first batch."""
        self._before = before

    def begin_pass(self, pass_: int) -> None:
        """The batches that are read from now on are of this pass."""
        self._is_first = pass_ == 0

    def note(self, number: int, batch: Batch, promised: int) -> None:
        """A batch that was read, and is perhaps trained in the leg after this; all before
        ``promised`` are trained in this one."""
        if self._is_first:
            self._read.append((number, batch))
        self._take_in(promised)

    def noting(self, asked: Callable[[], Batch]) -> Callable[[], Batch]:
        """What gives samples that are about to be trained, and are noted then."""
        if not self._is_first:
            return asked

        def answer() -> Batch:
            result = asked()
            self._sketch.add_samples(result)
            return result

        return answer

    def rows(self, number: int) -> RowSet:
        """Behind a leg: those of all batches before this one."""
        self._take_in(number)
        return self._sketch.rows().plus(self._before)

    def _take_in(self, before: int) -> None:
        while self._read and self._read[0][0] < before:
            self._sketch.add_samples(self._read.popleft()[1])


class StepEnds:
    """Where the steps of the stream end, in its samples: what was trained in steps, whoever has
    shared them. Updates are no measure of that where each takes a rank's share of a step, for their
    number depends on that of the ranks, which may change at a resume."""

    def __init__(self) -> None:
        self._ends: deque[int] = deque()
        self._read = self._whole = self._samples = 0

    def add(self, samples: int) -> None:
        """The next step of the stream has so many; called before any of them is trained."""
        self._read += samples
        self._ends.append(self._read)

    def whole(self, samples: int) -> int:
        """Steps that end within so many samples of the stream, which only grow."""
        while self._ends and self._ends[0] <= samples:
            self._samples = self._ends.popleft()
            self._whole = self._whole + 1
        return self._whole

    def begun(self, samples: int) -> int:
        """Steps of which some samples, or all, are within so many samples of the stream."""
        return self.whole(samples) + (samples > self._samples)


def training_stream(
    config: TrainConfig,
    source: Source,
    begin_pass: Callable[[int], None] = lambda number: None,
    ends: StepEnds | None = None,
) -> Iterator[Batch]:
    """The batches of all dense updates in turn, pass by pass; a pass may end with a short one.

    Nothing is dropped: a sample is in exactly one batch of each pass. With ``match=global`` a step
    is ``batch`` samples, too, cut into a batch for every rank. ``begin_pass`` is told the number of
    each pass before its first batch, ``ends`` the size of each step.
    """
    # With `match=global` a step of the stream is one batch for every rank; else a batch is an
    # update.
    parts = 1 if config.batch_per_push == config.batch else config.sync.ranks
    passed = source.passed if isinstance(source, LoadedElsewhere) else None
    steps = 0

    # Each pass reads the training part anew, in an order of its own where it is shuffled.
    for pass_ in range(config.data.epochs):
        begin_pass(pass_)
        chunks = _limited(source.chunks("train"), config.data.rows)
        chunks = _behind(chunks, config.data.skip_rows, passed)
        if config.data.shuffle:
            chunks = shuffled(chunks, config.seed, pass_)
        elif config.data.shuffle_buffer is not None:
            chunks = shuffled_in_buffer(chunks, config.seed, pass_, config.data.shuffle_buffer)

        # Cut it into steps; whoever counts steps or releases samples hears of each one.
        for batch in rebatch(chunks, config.batch):
            if steps == config.steps:
                return
            if ends is not None:
                ends.add(batch.size)
            for part in share(batch, parts):
                if part.size:
                    yield part
            if passed is not None:
                passed(batch)  # each part was asked for, or skipped
            steps += 1


def stream_from(
    config: TrainConfig,
    source: Source,
    samples: int,
    begin_pass: Callable[[int], None] = lambda number: None,
    ends: StepEnds | None = None,
) -> tuple[int, Iterator[Batch]]:
    """The rest of the stream behind the first ``samples``, and the number of its first batch.

    The number is that in the whole stream, cut as this config does. Where another number of ranks
    has cut it inside one of these batches, the first one is what is left of that.
    """
    number = passed = 0
    stream = training_stream(config, source, begin_pass, ends)
    while passed < samples:
        batch = next(stream, None)
        if batch is None:
            break
        if passed + batch.size > samples:
            rest = batch.rows(samples - passed, batch.size)
            return number, chain([rest], stream)
        passed += batch.size
        number += 1
    return number, stream


def _limited(chunks: Iterator[Batch], rows: int | None) -> Iterator[Batch]:
    left = rows
    for chunk in chunks:
        if left is None:
            yield chunk
            continue
        if left > 0:
            yield chunk.rows(0, min(left, chunk.size))
        left -= chunk.size
        if left <= 0:
            return


def _behind(
    chunks: Iterator[Batch], rows: int, passed: Callable[[Batch], None] | None
) -> Iterator[Batch]:
    """The chunks without so many first samples; ``passed`` is told of these, for nobody will ask
    for them."""
    left = rows
    for chunk in chunks:
        skipped = min(left, chunk.size)
        left -= skipped
        if skipped and passed is not None:
            passed(chunk.rows(0, skipped))
        if skipped < chunk.size:
            yield chunk.rows(skipped, chunk.size) if skipped else chunk


class Work(NamedTuple):
    """What one rank trains in one step."""

    batch: Batch
    step_samples: int
    """Samples of the whole dense update: the rank's loss is a share of their mean."""


Share = Batch | Callable[[], Batch]
"""What a rank trains in a step; of a stream of names, what waits for the samples."""


class Feed:
    """Hands out the batch of each (rank, step), in any interleaving of the ranks.

    Barrier modes: step s is the s-th batch of the stream, split over the ranks. Async: the batches
    go round the ranks in turn. Safe for threads; a batch is kept until its last taker has it.

    ``first`` is the number of the stream's first batch. ``fused``: rank 0 takes the batches of all
    ranks as one, the others take nothing. Without `begin_leg` there is one leg.
    """

    def __init__(
        self,
        stream: Iterator[Batch],
        ranks: int,
        barrier: bool,
        stop: Stop,
        first: int = 0,
        *,
        local_ranks: Sequence[int] | None = None,
        fused: bool = False,
        asks: Callable[[Batch], Callable[[], Batch]] | None = None,
        trained: TrainedRows | None = None,
        negatives: Negatives | None = None,
        ends: StepEnds | None = None,
        ahead: int = AHEAD_STEPS,
    ) -> None:
        """``local_ranks``: those that take their batches here; None: all. Every process reads all.

        ``asks``: of a stream of names, which is read ahead: asks for the samples of a part, and
        gives what waits for them. ``trained``: notes the rows. ``negatives``: are
        drawn beside each sample when it is handed out: all else counts the data's samples alone.
        ``ends``: of the stream's steps, where an update is no step. ``ahead``: steps for which
        samples are asked for at once."""
        self.ends = ends

        # What is handed out, and to which ranks of this process.
        self._local_ranks = frozenset(range(ranks) if local_ranks is None else local_ranks)
        self._stream = stream
        self._ranks = ranks
        self._barrier = barrier
        self._stop = stop
        self._shares = 1 if fused else ranks

        # A stream of names is read ahead, so that its samples are under way when a rank wants them.
        self._asks = asks
        self._trained = trained
        self._negatives = negatives
        self._ahead = 0 if asks is None else ahead * (1 if barrier else ranks)
        self._reads_ahead = False
        self._error: BaseException | None = None  # of the stream, which has ended so

        # How far the stream is read, and how far its batches are promised to ranks.
        self._untaken: dict[tuple[int, int], tuple[Share, int, int]] = {}
        self._read = self._promised = self.first = first
        self._end: int | None = None
        self._ends_now: Callable[[], bool] = lambda: False
        self._asked = first - 1
        self._ended = self._agreeing = self._reading = False
        self._changed = Turns()
        stop.on_stop(self._changed.wake)

    def begin_leg(self, end: int | None, ends_now: Callable[[], bool] = lambda: False) -> None:
        """Go on where the last leg ended, up to batch ``end`` (not included; None: all there is).

        ``ends_now`` is asked before each batch that nobody has been promised yet: when it says so,
        the leg ends there. A slower rank still gets the batches before it, so all stop at one cut.
        """
        with self._changed:
            self.first = self._promised
            self._end = end
            self._ends_now = ends_now

    def end_with(self, agree: Callable[[int, int], tuple[int, int]]) -> None:
        """End the leg before the batch that all processes agree upon.

        ``agree`` is given the first batch that nobody here has been promised and the last one that
        the stream was asked for, and gives the largest of each of all processes. Meanwhile no more
        are promised. It is called without the lock: others must be able to read on, for a loader
        that waits for one process to read keeps the others waiting, too.
        """
        with self._changed:
            self._agreeing = True
        try:
            end, asked = agree(self._promised, self._asked)
            with self._changed:
                self._end = end if self._end is None else min(end, self._end)
                self._asked = max(asked, self._asked)
        finally:
            with self._changed:
                self._agreeing = False
                self._changed.notify_all()

    def first_steps(self, number: int | None = None) -> list[int]:
        """Per rank, its first step from a batch on; None: from the first one of this leg."""
        number = self.first if number is None else number
        if self._barrier:
            return [number] * self._ranks
        return [first_step(number, rank, self._ranks) for rank in range(self._ranks)]

    @property
    def each(self) -> int:
        """Samples that are handed out for one of the stream."""
        return 1 if self._negatives is None else self._negatives.each

    @property
    def next_number(self) -> int:
        """The number of the first batch that has not been handed out; behind a leg, of its cut."""
        return self._promised

    def trained_rows(self) -> RowSet:
        """Behind a leg: the rows that were trained so far, as far as this process notes them."""
        return NO_ROWS if self._trained is None else self._trained.rows(self.next_number)

    @property
    def notes_a_share(self) -> bool:
        """Whether other processes take samples that this one does not see."""
        return self._asks is not None and len(self._local_ranks) < self._ranks

    def resume(self, trained: RowSet) -> None:
        """These rows were trained before the first batch."""
        if self._trained is not None:
            self._trained.resume(trained)

    def is_at_the_end(self) -> bool:
        """Whether there is no batch behind the cut."""
        with self._changed:
            while self._lacks(self._promised):
                self._read_one(self._promised)
            return self._promised >= self._read

    def has_batch(self, number: int) -> bool:
        """Whether the leg has a batch of this number (a dense update): then it will be trained."""
        asks = True  # once for a batch, however often it is read on for
        with self._changed:
            while number >= self._promised:
                if self._agreeing:
                    self._changed.wait_until(
                        lambda: not self._agreeing, self._stop, self._who_agrees
                    )
                open_ended = self._end is None or self._promised < self._end
                if asks and open_ended and self._ends_now():
                    self._end = self._promised
                asks = False
                last = number if self._end is None else min(number, self._end - 1)
                # Behind the cut, too, if another process does: it waits until all have read so far.
                through = last if last == number else max(last, self._asked)
                if self._lacks(through):
                    self._read_one(through)  # meanwhile the end may have changed
                    continue
                # Also what lies between: another process may train it, and this one starts behind.
                self._promised = max(self._promised, min(last + 1, self._read))
                break
            return number < self._promised

    def take(self, rank: int, step: int) -> Work | None:
        """The batch of (rank, step), once; None past the end of the data."""
        number = step if self._barrier else step * self._ranks + rank

        # A rank that is far ahead of the others waits: their batches are kept meanwhile.
        most = MAX_DRIFT_STEPS * len(self._local_ranks)
        with self._changed:
            if number >= self._read and len(self._untaken) >= most:
                self._changed.wait_until(
                    lambda: number < self._read or len(self._untaken) < most,
                    self._stop,
                    lambda: (
                        f"rank {rank} is {MAX_DRIFT_STEPS} steps ahead of the others at step {step}"
                    ),
                )

        # Read the stream as far as this batch; None where the leg or the data ends before it.
        if not self.has_batch(number):
            return None

        # Take it out; where samples are asked for by name, those of later steps are asked for now.
        with self._changed:
            self._changed.notify_all()
            if (untaken := self._untaken.pop((rank, step), None)) is None:
                raise ValueError(f"the order has rank {rank}, step {step} behind its last push")
            own, first, step_samples = untaken
            begins = self._lacks(self._promised + self._ahead // 2 - 1) and not self._reads_ahead
            self._reads_ahead |= begins
        if begins:
            threading.Thread(target=self._read_ahead, name="feed", daemon=True).start()
        batch = own if isinstance(own, Batch) else self._answer(own)
        if self._negatives is None:
            return Work(batch, step_samples)
        drawn_beside = self._negatives.beside(batch, number, first)
        return Work(drawn_beside, step_samples * self.each)

    def _answer(self, asked: Callable[[], Batch]) -> Batch:
        with self._stop.working():
            return asked()

    def _read_ahead(self) -> None:
        """Until enough is asked for; what goes wrong is told to who wants the next batch."""
        with self._changed:
            with suppress(BaseException):
                while not self._ended and self._read < self._promised + self._ahead:
                    self._read_one(self._asked)
            self._reads_ahead = False

    def _lacks(self, number: int) -> bool:
        return self._read <= number and not self._ended

    def _who_agrees(self) -> str:
        return "a rank waits until all processes agree where the leg ends"

    def _read_one(self, through: int) -> None:
        """The next batch of the stream, of those up to ``through`` that are asked for.

        One thread reads, without the lock, the others wait for it.
        """
        self._asked = max(through, self._asked)

        # A stream that has failed stays failed; while another thread reads, wait for that one.
        if self._error is not None:
            raise self._error
        if self._reading:
            self._changed.wait(timeout=1.0)
            return

        # Read without the lock: parsing takes long, and a rank whose batch is here must not wait.
        self._reading = True
        self._changed.release()
        try:
            with self._stop.working():
                batch = next(self._stream, None)
                requested = {} if batch is None else self._requested(batch)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()

        # With the lock again, hand the shares out; None was the end of the stream.
        self._untaken |= requested
        self._ended = batch is None
        self._read += batch is not None

    def _requested(self, batch: Batch) -> dict[tuple[int, int], tuple[Share, int, int]]:
        """By rank and step, what ranks here train of the next batch; asked for, where these are
        names."""
        # In barrier modes every rank has a share of the batch, in async it is one rank's.
        if self._barrier:
            step = self._read
            shares = dict(enumerate(share(batch, self._shares)))
            sizes = [shares[rank].size for rank in range(len(shares))]
            firsts = dict(enumerate(accumulate(sizes, initial=0)))
        else:
            step, rank = divmod(self._read, self._ranks)
            shares, firsts = {rank: batch}, {rank: 0}

        # Note the rows that train: now, or of names when their samples are about to be trained.
        samples = batch.size
        trained = self._trained
        if trained is not None and self._asks is None:
            trained.note(self._read, batch, self._promised)
        result: dict[tuple[int, int], tuple[Share, int, int]] = {}
        for rank in shares.keys() & self._local_ranks:
            own: Share = shares[rank]
            if self._asks is not None:
                ask = self._asks(shares[rank])
                own = ask if trained is None else trained.noting(ask)
            result[rank, step] = own, firsts[rank], samples
        return result
