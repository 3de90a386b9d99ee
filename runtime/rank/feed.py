"""Which samples (rank, step) trains: the stream, cut and shared out so that each goes out once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.data.source import Source, rebatch, share, shuffled
from runtime.stop import Stop, wait_for

MAX_DRIFT_STEPS = 1024
"""Steps of batches kept for slower ranks; a rank that is further ahead waits for them."""


def training_stream(config: TrainConfig, source: Source) -> Iterator[Batch]:
    """The batches of all dense updates in turn, pass by pass; a pass may end with a short one.

    Nothing is dropped: a sample is in exactly one batch of each pass. With ``match=global`` a step
    is ``batch`` samples, too, cut into a batch for every rank.
    """
    parts = 1 if config.batch_per_push == config.batch else config.sync.ranks
    steps = 0
    for pass_ in range(config.data.passes):
        chunks = _limited(source.chunks("train"), config.data.rows)
        if config.data.shuffle:
            chunks = shuffled(chunks, config.seed, pass_)
        for batch in rebatch(chunks, config.batch):
            if steps == config.steps:
                return
            yield from (part for part in share(batch, parts) if part.size)
            steps += 1


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


class Work(NamedTuple):
    """What one rank trains in one step."""

    batch: Batch
    step_samples: int
    """Samples of the whole dense update: the rank's loss is a share of their mean."""


class Feed:
    """Hands out the batch of each (rank, step), in any interleaving of the ranks.

    Barrier modes: step s is the s-th batch of the stream, split over the ranks. Async: the batches
    go round the ranks in turn. Safe for threads; a batch is kept until its last taker has it.
    """

    def __init__(self, stream: Iterator[Batch], ranks: int, barrier: bool, stop: Stop) -> None:
        self._stream, self._ranks, self._barrier, self._stop = stream, ranks, barrier, stop
        self._parts: dict[tuple[int, int], Work] = {}
        self._read = 0
        self._ended = False
        self._changed = threading.Condition()
        stop.on_stop(self._wake)

    def has_batch(self, number: int) -> bool:
        """Whether the stream has a batch of this number (a dense update)."""
        with self._changed:
            while self._read <= number and not self._ended:
                self._read_one()
            return number < self._read

    def take(self, rank: int, step: int) -> Work | None:
        """The batch of (rank, step), once; None past the end of the data."""
        number = step if self._barrier else step * self._ranks + rank

        def has_room() -> bool:
            return number < self._read or len(self._parts) < MAX_DRIFT_STEPS * self._ranks

        def who() -> str:
            return f"rank {rank} is {MAX_DRIFT_STEPS} steps ahead of the others at step {step}"

        with self._changed:
            wait_for(self._changed, has_room, self._stop, who)
            if not self.has_batch(number):
                return None
            self._changed.notify_all()
            return self._parts.pop((rank, step))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _read_one(self) -> None:
        batch = next(self._stream, None)
        if batch is None:
            self._ended = True
            return
        if self._barrier:
            for rank, part in enumerate(share(batch, self._ranks)):
                self._parts[rank, self._read] = Work(part, batch.size)
        else:
            work = Work(batch, batch.size)
            self._parts[self._read % self._ranks, self._read // self._ranks] = work
        self._read += 1
