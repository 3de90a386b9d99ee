"""What is asked of a server now and then: figures, tables, traces, evaluation, a new run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from persia_sim.words.events import ALL
from runtime.engines.processes.batches import RankBatches
from runtime.engines.processes.channel import Channel, PeerGoneError
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    pack_version,
    unpack_json,
)
from runtime.engines.processes.segments import Segment, pack_arrays, unpack_arrays
from runtime.engines.processes.server_config import rules_from

if TYPE_CHECKING:
    from runtime.engines.processes.service import Service

Answer = dict[str, Any] | dict[str, np.ndarray]
COUNTERS = (
    "created", "evicted", "expired", "not_admitted",
    "gradients_not_admitted", "gradients_evicted",
)  # fmt: skip


class RareVerbs:
    """The control connection of one client; its requests are answered one after the other."""

    def __init__(
        self,
        service: Service,
        channel: Channel,
        tell: Callable[[Channel, BaseException | None], None],
    ) -> None:
        self._service, self._channel, self._tell = service, channel, tell
        server = service.server
        self._server, self._tables = server, service.rows.tables
        self._batches = RankBatches(ALL, server.shard, service.shards, service.tables)
        self._frozen = 0
        self._verbs: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], Any]] = {
            "status": self._status,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "export": self._export,
            "trace": self._trace,
            "begin_run": self._begin_run,
            "begin_leg": self._begin_leg,
            "counters": self._counters,
            "go_on": self._go_on,
            "wait_until_closed": self._wait_until_closed,
            "pushes": self._pushes,
            "freeze_rows": self._freeze_rows,
            "collect_rows": self._collect_rows,
            "settle_rows": self._settle_rows,
            "restore": self._restore,
            "forget": self._forget,
            "filling": self._filling,
            "reloaded": self._reloaded,
            "rejoin": self._rejoin,
            "end": self._end,
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
                elif message.kind is MessageKind.CALL:
                    self._call(unpack_json(message.body), segment)
                else:
                    raise BadMessageError(f"a {message.kind.name} is no rare request")
        finally:
            self._service.filling.end(self._channel)
            while self._frozen:
                self._thaw({}, {})

    def _peek(self, message: Message) -> None:
        handle = self._batches.unpushed(message)
        self._server.peek(handle)
        version = pack_version(handle.version[self._server.shard])
        self._channel.send(Message(MessageKind.ROWS, body=version), self._batches.values(handle))

    def _call(self, asked: dict[str, Any], segment: Segment | None) -> None:
        verb = self._verbs.get(str(asked.pop("verb", None)))
        if verb is None:
            raise BadMessageError(f"a rare request is one of {', '.join(self._verbs)}")
        given = unpack_arrays(asked.pop("arrays", {}), segment) if segment else {}
        try:
            found = verb(asked, given)
        except (PeerGoneError, BadMessageError):
            raise
        except Exception as error:  # of the request, not of the connection
            return self._tell(self._channel, error)
        if found and all(isinstance(array, np.ndarray) for array in found.values()):
            document, segment = pack_arrays(found)
            try:
                parcel = Message(MessageKind.PARCEL, body=pack_json(document))
                self._channel.send(parcel, segment=segment)
            finally:
                segment.close()
        else:
            self._channel.send(Message(MessageKind.RESULT, body=pack_json(found or {})))

    def _status(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        counters = [table.counters for table in self._tables.values()]
        return {
            "rows": sum(len(table) for table in self._tables.values()),
            "resident_bytes": sum(table.resident_bytes for table in self._tables.values()),
            "counters": {name: sum(getattr(c, name) for c in counters) for name in COUNTERS},
            "rows_replaced": self._server.rows_replaced,
            "row_staleness": self._server.row_staleness.tolist(),
            "version": self._server.version,
            "updates": self._server.updates,
            "lost": self._server.lost,
            "repeated_pushes": self._service.repeated_pushes,
        }

    def _freeze(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        self._server.lock.acquire()
        self._frozen += 1

    def _thaw(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        if self._frozen:
            self._frozen -= 1
            self._server.lock.release()

    def _export(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        table = self._table(asked)
        with self._server.lock:
            ids, values, state = table.rows()[:3]
        return {"ids": ids, "values": values, "state": state}

    def _trace(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        after, most = int(asked["after"]), int(asked["most"])
        return {"events": self._service.recorder.after(after, most)}

    def _begin_run(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        self._service.begin_run(asked["rules"])

    def _begin_leg(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        self._service.begin_leg([int(step) for step in asked["first_steps"]])

    def _counters(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        return self._server.counters()

    def _go_on(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        self._service.go_on(asked["rules"], asked["counters"])

    def _wait_until_closed(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        self._server.wait_until_closed(int(asked["steps"]))

    def _pushes(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        return self._server.pushes()

    def _freeze_rows(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        frozen = []
        try:
            for table in self._tables.values():
                table.freeze(bool(asked["only_changed"]), bool(asked["track"]))
                frozen.append(table)
        except BaseException:
            for table in frozen:
                table.settle(False)
            raise

    def _collect_rows(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        found = dict(self._table(asked).collect())
        return found | {"latest_step": np.array([found["latest_step"]], np.int64)}

    def _settle_rows(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        for table in self._tables.values():
            table.settle(bool(asked["kept"]))

    def _restore(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        table, step = self._table(asked), int(asked["latest_step"])
        with self._server.lock:
            table.restore(**given, latest_step=step, keep_present=bool(asked["keep_present"]))

    def _forget(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        ids, none = given["ids"], np.zeros(0, np.uint32)
        rows = np.zeros((0, 0), np.uint8)
        with self._server.lock:
            self._table(asked).restore(ids[:0], none, none, rows, ids, np.zeros(0, np.uint8), 0)

    def _filling(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        """This client will bring the rows of a server that was started again."""
        self._service.filling.begin(self._channel)

    def _reloaded(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        """The rows of a server that was started again are those of its last checkpoint."""
        self._server.go_on(rules_from(asked["rules"]), asked["counters"])
        self._server.begin_leg([int(step) for step in asked["first_steps"]])
        self._service.filling.done()

    def _rejoin(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> Answer:
        still_open = {int(step) for step in asked["open"]}
        lost = self._server.rejoin(int(asked["rank"]), int(asked["begun"]), still_open)
        return {"lost": lost}

    def _end(self, asked: dict[str, Any], given: dict[str, np.ndarray]) -> None:
        # The answer must be on its way before the process ends.
        threading.Timer(0.05, self._service.end).start()

    def _table(self, asked: dict[str, Any]) -> Any:
        name = str(asked.get("table"))
        if name not in self._tables:
            raise ValueError(f"table {name} is not held here; there are {', '.join(self._tables)}")
        return self._tables[name]
