"""One embedding server in its process, and the run that it serves: what each request about a batch
does, for the ranks' batches that lie here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from persia_sim.base.schema import parse
from persia_sim.base.trace import TraceRecorder
from runtime.embedding.native.store import NativeShard
from runtime.embedding.push_gate import PushGate
from runtime.embedding.server import EmbeddingServer
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.rows.failover import Restore
from runtime.hosts.rows.rank_batches import PUSHES, RankBatches
from runtime.hosts.wire.calls import Payload, send_payload
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import LoopCondition
from runtime.hosts.wire.messages import BadMessageError, Message, MessageKind
from runtime.hosts.wire.peers import Peers, ServerStop
from runtime.stop import RunStopped


class ServedShard:
    """One embedding server with its rows, the run's stop, and each rank's batches."""

    def __init__(self, config: ServerConfig) -> None:
        # Who calls, and for how long they may be silent.
        self.config = config
        self.rules = config.rules
        self.peers = Peers(config.patience_s, config.processes)
        self.stop = ServerStop(self.peers)

        # The server of one shard, the very one of a single process, woken by the listener's loop.
        self.recorder = TraceRecorder(keep=config.records)
        self.rows = NativeShard(config.shard, config.tables, config.seed, config.shards)
        self.gate = PushGate([config.shard])
        self.condition = LoopCondition()
        self.server = EmbeddingServer(
            config.shard,
            self.rows,
            config.rules,
            self.recorder,
            self.gate,
            self.stop,
            self.condition,
        )

        # What only a process has: acknowledgements, a restore, batches of each rank, traffic.
        self.server.on_closed = self._closed
        self.repeated_pushes = 0
        self.restore = Restore(awaited=config.awaits_rows, patience_s=self.peers.patience_s)
        self.batches: dict[int, RankBatches] = {}
        self.traffic: dict[Channel, Counter[str]] = {}  # one thread at a time counts of each

    def answer(
        self, channel: Channel, batches: RankBatches, message: Message, stop: ServerStop
    ) -> None:
        """Do what a message asks for, of the run whose ``stop`` that is. Raises NotReady where it
        comes too early, RunStopped, BadMessageError."""
        if stop is not self.stop or batches is not self.batches[batches.rank]:
            raise RunStopped  # the run that requested it has been stopped, or the rank released

        # By kind. All but a push and a lease are answered by rows.
        kind = message.kind
        step = message.step
        server = self.server
        if kind is MessageKind.LOOK_UP:
            server.look_up(handle := batches.batch(message))
        elif kind is MessageKind.LOOK_AHEAD:
            server.look_up_ahead(handle := batches.batch(message))
        elif kind is MessageKind.REOPEN:
            is_up_to_date = bool(message.number)
            server.reopen(handle := batches.reopen(message), is_up_to_date=is_up_to_date)
        elif kind is MessageKind.BRING_UP_TO_DATE:
            known = batches.known(step)
            if known is None:
                raise BadMessageError(f"step {step} of rank {batches.rank} was never prefetched")
            server.bring_up_to_date(handle := known.handle)
            batches.show_fresh(known)
        elif kind is MessageKind.LEASE:
            return self._lease(channel, batches, message)
        elif kind in PUSHES:
            return self._push(channel, batches, message)
        elif kind is MessageKind.FINISH:
            return server.finish(batches.rank, step)
        else:
            raise BadMessageError(f"a {kind.name} is no request about a batch")

        # The rows lie in the batch's segment; between hosts they follow the answer.
        version = handle.version[self.config.shard]
        rows = () if kind is MessageKind.REOPEN else batches.values(handle, kind)
        sent = self._counted(channel, rows)
        channel.send(Message(MessageKind.ROWS, batches.rank, step, number=version), sent)

    def _lease(self, channel: Channel, batches: RankBatches, message: Message) -> None:
        """Rows with their state, per table and column an array."""
        leased = self.server.lease(batches.batch(message), message.number)
        arrays = {
            f"{table}/{column}": np.asarray(array)
            for table, columns in leased.items()
            for column, array in columns.items()
        }
        self._counted(channel, arrays.values())
        send_payload(channel.send, Message(MessageKind.RESULT, batches.rank, message.step), arrays)

    def _counted(self, channel: Channel, rows: Iterable[np.ndarray]) -> list[np.ndarray]:
        """The arrays that travel, counted as sent."""
        travel = [] if channel.connection.shares_memory else list(rows)
        self.traffic[channel]["sent_bytes"] += sum(array.nbytes for array in travel)
        return travel

    def status(self) -> Payload:
        """What this server has counted; ids, rows and gradients in bytes where they travel."""
        of_channels = list(self.traffic.values())
        names = ("received_bytes", "sent_bytes")
        traffic = {name: sum(counts[name] for counts in of_channels) for name in names}
        more = {"repeated_pushes": self.repeated_pushes, "incarnation": self.config.incarnation}
        return self.server.status() | traffic | more

    def _push(self, channel: Channel, batches: RankBatches, message: Message) -> None:
        """At most once: what is closed is acknowledged again, what waits is not taken twice."""
        # A client that lost its connection sends a push again: law 13 wants it applied once.
        step = message.step
        kind = message.kind
        is_lost = bool(message.number)
        group = self.server.fresh if kind is MessageKind.FRESH_PUSH else self.server
        if group is None:
            raise BadMessageError(f"no table is fresh, and a {kind.name} of step {step} came")
        with self.server.lock:  # a push is closed under it
            batch = batches.known(step)
            repeated = self.server.has_closed(batches.rank, step)
            waiting = batch is not None and kind in batch.pushed
            if batch is not None and not waiting:
                if kind is MessageKind.WRITE_BACK and not repeated:
                    self.server.look_up(batch.handle)  # NotReady: nothing is done yet
                batch.pushed.add(kind)
                batch.closed_to = channel
            self.repeated_pushes += repeated or waiting
            if not waiting and not repeated:
                if batch is None:
                    raise BadMessageError(
                        f"the push of rank {batches.rank}, step {step} has had no lookup here"
                    )
                return group.give((batch.handle, None) if is_lost else batch.push())

        # It is closed already: say so again, the first answer was lost.
        if repeated:
            channel.send(Message(MessageKind.CLOSED, batches.rank, step))

    def _closed(self, rank: int, step: int) -> None:
        """Under the server's lock: a push is applied or lost."""
        channel = self.batches[rank].close(step)
        if channel is not None:
            with suppress(PeerGoneError):  # who receives there notices, too
                channel.send(Message(MessageKind.CLOSED, rank, step))

    def begin_run(self, rules: Mapping[str, Any]) -> None:
        """A run starts at step 0 on the rows as they are."""
        for batches in list(self.batches.values()):
            batches.of_earlier_run = set(batches.users)
        self.stop.set(None)
        self.stop = ServerStop(self.peers)
        self.rules = parse(ServerRules, rules, "rules")
        self._forget_batches()
        self.server.begin_run(self.rules, self.stop)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps; nothing is in flight."""
        self._forget_batches()
        self.server.begin_leg(first_steps)

    def resume_run(self, rules: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Count on under these rules."""
        self.rules = parse(ServerRules, rules, "rules")
        self.server.resume_run(self.rules, counters)

    def _forget_batches(self) -> None:
        for batches in list(self.batches.values()):
            batches.forget_all()
