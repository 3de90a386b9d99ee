"""What is asked of a server now and then: figures, tables, traces, evaluation, a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from persia_sim.words.events import ALL
from runtime.engines.processes.batches import RankBatches
from runtime.engines.processes.calls import Said, Verbs, answer, tell
from runtime.engines.processes.channel import Channel
from runtime.engines.processes.messages import Message, MessageKind
from runtime.stop import RunStopped

if TYPE_CHECKING:
    from runtime.engines.processes.service import Service

COUNTERS = (
    "created", "evicted", "expired", "not_admitted",
    "gradients_not_admitted", "gradients_evicted",
)  # fmt: skip


class RareVerbs:
    """The control connection of one client; its requests are answered one after the other."""

    def __init__(self, service: Service, channel: Channel) -> None:
        self._service, self._channel = service, channel
        server = self._server = service.server
        self._tables = service.rows.tables
        self._batches = RankBatches(ALL, server.shard, service.shards, service.tables)
        self._frozen = 0
        self._verbs: Verbs = {
            "status": self._status,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "export": self._export,
            "trace": lambda after, most: {"events": service.recorder.after(after, most)},
            "begin_run": service.begin_run,
            "begin_leg": service.begin_leg,
            "counters": server.counters,
            "go_on": service.go_on,
            "wait_until_closed": server.wait_until_closed,
            "pushes": server.pushes,
            "freeze_rows": self._freeze_rows,
            "collect_rows": lambda table: dict(self._table(table).collect()),
            "settle_rows": self._settle_rows,
            "restore": self._restore,
            "filling": lambda: service.filling.begin(channel),
            "reloaded": self._reloaded,
            "rejoin": self._rejoin,
        }

    def work(self) -> None:
        """Answer until the connection ends; what it holds is let go."""
        try:
            while True:
                message, segment = self._channel.receive(place=self._batches.place)
                if message.kind is MessageKind.GOODBYE:
                    return
                if message.kind is MessageKind.SEGMENT:
                    self._batches.attach(message, segment)
                elif message.kind is MessageKind.LOOK_AHEAD:
                    self._peek(message)
                else:
                    try:
                        answer(self._channel, message, segment, self._verbs)
                    except RunStopped as error:
                        tell(self._channel, error)
        finally:
            self._service.filling.end(self._channel)
            while self._frozen:
                self._thaw()

    def _peek(self, message: Message) -> None:
        handle = self._batches.unpushed(message)
        self._server.peek(handle)
        rows = Message(MessageKind.ROWS, number=handle.version[self._server.shard])
        self._channel.send(rows, self._batches.values(handle))

    def _status(self) -> Said:
        counters = [table.counters for table in self._tables.values()]
        return {
            "rows": sum(len(table) for table in self._tables.values()),
            "resident_bytes": sum(table.resident_bytes for table in self._tables.values()),
            "counters": {name: sum(getattr(c, name) for c in counters) for name in COUNTERS},
            "rows_replaced": self._server.rows_replaced,
            "row_staleness": self._server.row_staleness,
            "version": self._server.version,
            "updates": self._server.updates,
            "lost": self._server.lost,
            "repeated_pushes": self._service.repeated_pushes,
        }

    def _freeze(self) -> None:
        self._server.lock.acquire()
        self._frozen += 1

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen -= 1
            self._server.lock.release()

    def _export(self, table: str) -> Said:
        with self._server.lock:
            ids, values, state = self._table(table).rows()[:3]
        return {"ids": ids, "values": values, "state": state}

    def _freeze_rows(self, only_changed: bool, track: bool) -> None:
        frozen = []
        try:
            for table in self._tables.values():
                table.freeze(only_changed, track)
                frozen.append(table)
        except BaseException:
            for table in frozen:
                table.settle(False)
            raise

    def _settle_rows(self, kept: bool) -> None:
        for table in self._tables.values():
            table.settle(kept)

    def _restore(self, table: str, **rows: Any) -> None:
        with self._server.lock:
            self._table(table).restore(**rows)

    def _reloaded(
        self, rules: Mapping[str, Any], counters: dict[str, Any], first_steps: Sequence[int]
    ) -> None:
        """The rows of a server that was started again are those of its last checkpoint."""
        self._service.go_on(rules, counters)
        self._server.begin_leg(first_steps)
        self._service.filling.done()

    def _rejoin(self, rank: int, begun: int, open: Sequence[int]) -> Said:
        return {"lost": self._server.rejoin(rank, begun, set(open))}

    def _table(self, name: str) -> Any:
        if name not in self._tables:
            raise ValueError(f"table {name} is not held here; there are {', '.join(self._tables)}")
        return self._tables[name]
