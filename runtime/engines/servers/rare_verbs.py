"""What an embedding server is asked now and then: figures, tables, traces, evaluation, a new run,
the rows of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia_sim.words.vocabulary import ALL
from runtime.checkpoint.shard import load_rows, see_folder, write_rows
from runtime.embedding.native.store import freeze
from runtime.engines.servers.rank_batches import RankBatches
from runtime.engines.transport.calls import Said, Verbs, answer, tell
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.messages import Message, MessageKind
from runtime.engines.transport.segments import Segment
from runtime.engines.transport.waits import Steps, patiently
from runtime.stop import RunStopped

if TYPE_CHECKING:
    from runtime.engines.servers.server_process import Service


class RareVerbs:
    """The control connection of one client; its requests are answered one after the other."""

    def __init__(self, service: Service, channel: Channel, run: str | None) -> None:
        """``run``: the folder below which files may be written; None: nowhere."""
        self._service, self._channel, self._run = service, channel, run
        server = self._server = service.server
        self._tables = service.rows.tables
        self._batches = RankBatches(ALL, server.shard, service.config.shards, service.config.tables)
        self._turns = service.turns
        self._held = 0
        self._verbs: Verbs = {
            "begin_run": service.begin_run, "begin_leg": service.begin_leg, "go_on": service.go_on,
            "status": service.status, "counters": server.counters, "export": server.export,
            "wait_until_closed": server.wait_until_closed,
            "freeze": self._freeze, "thaw": self._thaw,
            "closed": lambda: {"closed": server.closed()},
            "trace": lambda after, most: {"events": service.recorder.after(after, most)},
            "freeze_rows": partial(freeze, self._tables.values()), "settle_rows": self._settle_rows,
            "see_folder": partial(see_folder, service.rows), "write_rows": self._write_rows,
            "load_rows": partial(load_rows, service.rows),
            "come_back": self._come_back, "rejoin": self._rejoin,
        }  # fmt: skip

    def work(self) -> Steps[None]:
        """Answer until the connection ends; what it holds is let go."""
        try:
            while True:
                message, segment = yield from self._channel.receiving(place=self._batches.place)
                if message.kind is MessageKind.GOODBYE:
                    return
                try:
                    yield from patiently(partial(self._answer, message, segment))
                except RunStopped as error:
                    tell(self._channel, error)
        finally:
            while self._held:
                self._thaw()

    def _answer(self, message: Message, segment: Segment | None) -> None:
        held = self._turns.passed(lambda: self._held > 0) if self._held else nullcontext()
        with held:
            if message.kind is MessageKind.SEGMENT:
                self._batches.attach(message, segment)
            elif message.kind is MessageKind.LOOK_AHEAD:
                self._peek(message)
            else:
                answer(self._channel, message, segment, self._verbs)

    def _peek(self, message: Message) -> None:
        handle = self._batches.unpushed(message)
        self._server.peek(handle)
        rows = Message(MessageKind.ROWS, number=handle.version[self._server.shard])
        self._channel.send(rows, self._batches.values(handle))

    def _freeze(self) -> None:
        with self._turns:
            self._turns.is_held = True
        self._held += 1

    def _thaw(self) -> None:
        self._held = max(0, self._held - 1)
        self._turns.is_held, self._turns.is_news = self._held > 0, True

    def _settle_rows(self, kept: bool) -> None:
        for table in self._tables.values():
            table.settle(kept)

    def _write_rows(self, folder: str, part: str) -> Said:
        """In the run's folder and nowhere else."""
        to = Path(os.path.normpath(Path(folder) / part))
        if self._run is None or not to.is_relative_to(self._run):
            raise OSError(f"it writes only below the folder of its run, not {folder}/{part}")
        return write_rows(self._service.rows, folder=str(to.parent), part=to.name)

    def _come_back(
        self,
        rules: Mapping[str, Any],
        first_steps: Sequence[int],
        counters: dict[str, Any],
        folder: str | None,
    ) -> None:
        """This server was started again: what a checkpoint has of it, and ranks are let in."""
        service = self._service
        service.filling.begin()
        if folder is not None:
            load_rows(service.rows, folder=folder)
        service.go_on(rules, counters)
        self._server.begin_leg(first_steps)
        service.filling.is_done = True

    def _rejoin(self, rank: int, begun: int, open: Sequence[int]) -> Said:
        with self._server.lock:
            return {"lost": self._server.rejoin(rank, begun, set(open))}
