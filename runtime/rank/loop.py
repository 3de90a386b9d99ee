"""The loops of one rank: which thread does which stages, and what travels between them."""

from __future__ import annotations

from collections.abc import Callable

from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.rank.forwarded import ForwardedStages, Prefetched, Written
from runtime.rank.pipe import Pipe
from runtime.rank.stages import Computed, Fetched, RankStages
from runtime.stop import Stop


class RankLoop:
    """A rank's threads of one leg as functions; ``bodies`` says which of them the mode needs.

    The leg begins with the rank's step ``first``.
    """

    def __init__(
        self, rank: int, stages: RankStages, config: TrainConfig, stop: Stop, first: int = 0
    ) -> None:
        self._stages, self._config, self._stop, self._first = stages, config, stop, first
        self._latency_s = config.engine.latency_s
        ahead = config.sync.mode is Mode.LOOKAHEAD
        room = config.sync.ahead if ahead else config.queue_capacity
        self._fetched: Pipe[Fetched | None] = Pipe(f"training of rank {rank}", room, stop)
        self._computed: Pipe[Computed | None] = Pipe(f"pushing of rank {rank}", room, stop)

    def bodies(self) -> dict[str, Callable[[], None]]:
        """By name, what each thread of the rank runs."""
        if self._config.sync.mode.reads_late_rows:
            return {"fetch": self._fetch, "train": self._train, "push": self._push}
        if self._config.sync.mode is Mode.LOOKAHEAD:
            return {"fetch": self._prefetch, "rank": self._train_ahead}
        return {"rank": self._in_turn}

    def _in_turn(self) -> None:
        """sync: everything is exposed."""
        step = self._first
        while (fetched := self._stages.fetch(step)) is not None:
            self._stop.sleep(self._latency_s)
            computed = self._stages.train(fetched)
            self._stop.sleep(self._latency_s)
            self._stages.push(computed)
            step += 1
        self._stages.finish(step)

    def _prefetch(self) -> None:
        """lookahead: at most ``ahead`` steps wait for the training thread."""
        step = self._first
        self._fetched.wait_for_room()
        while (fetched := self._stages.prefetch(step)) is not None:
            self._fetched.put(fetched, self._latency_s)
            self._fetched.wait_for_room()
            step += 1
        self._fetched.put(None)

    def _train_ahead(self) -> None:
        """lookahead: the prefetch is hidden, the re-read of stale rows and the push are not."""
        step = self._first
        while (fetched := self._fetched.get()) is not None:
            final = self._stages.refresh(fetched)
            self._stop.sleep(self._latency_s)
            computed = self._stages.train(final)
            self._stop.sleep(self._latency_s)
            self._stages.push(computed)
            step += 1
        self._stages.finish(step)

    def _fetch(self) -> None:
        """As many lookups are on their way as window, permits and the pipe let in."""
        step = self._first
        self._fetched.wait_for_room()  # before the rows are read: waiting would make them stale
        while (fetched := self._stages.fetch(step)) is not None:
            self._fetched.put(fetched, self._latency_s)
            self._fetched.wait_for_room()
            step += 1
        self._stages.finish(step)
        self._fetched.put(None)

    def _train(self) -> None:
        while (fetched := self._fetched.get()) is not None:
            self._computed.put(self._stages.train(fetched), self._latency_s)
        self._computed.put(None)

    def _push(self) -> None:
        while (computed := self._computed.get()) is not None:
            self._stages.push(computed)


class ForwardedLoop:
    """lookahead `forwarded`: nothing but the other ranks is waited for between two steps."""

    def __init__(
        self, rank: int, stages: ForwardedStages, config: TrainConfig, stop: Stop, first: int = 0
    ) -> None:
        self._stages, self._latency_s, self._first = stages, config.engine.latency_s, first
        ahead = config.sync.ahead
        self._coming: Pipe[Prefetched | None] = Pipe(f"training of rank {rank}", ahead, stop)
        self._going: Pipe[Written | None] = Pipe(f"pushing of rank {rank}", ahead + 1, stop)

    def bodies(self) -> dict[str, Callable[[], None]]:
        """By name, what each thread of the rank runs."""
        return {"fetch": self._prefetch, "train": self._train, "push": self._write_back}

    def _prefetch(self) -> None:
        step = self._first
        self._coming.wait_for_room()
        while (prefetched := self._stages.prefetch_lease(step)) is not None:
            self._coming.put(prefetched, self._latency_s)
            self._coming.wait_for_room()
            step += 1
        self._stages.finish(step)
        self._coming.put(None)

    def _train(self) -> None:
        while (prefetched := self._coming.get()) is not None:
            computed = self._stages.train(self._stages.take_in(prefetched))
            written = self._stages.write(prefetched.at_servers, computed)
            self._going.put(written, self._latency_s)
        self._going.put(None)

    def _write_back(self) -> None:
        while (written := self._going.get()) is not None:
            self._stages.write_back(written)
