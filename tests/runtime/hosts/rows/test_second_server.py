"""What a store of server processes keeps of each server and each rank, told to servers that are
only written down: the second one's is not the first one's, and a second run knows none of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from persia_sim.base.trace import ALL
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.connections import Incarnation
from runtime.hosts.rows.failover import MOST_FAILOVERS, Failover
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.messages import Message, MessageKind
from runtime.stop import PeerError, Stop
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of, ones

Sent = tuple[str, MessageKind, int, int]
"""Over the connection of which role and rank, what of which rank and step."""


class WrittenDown:
    """A connection of one role and rank, which goes nowhere."""

    def __init__(self, of: str, sent: list[Sent]) -> None:
        self._of = of
        self._sent = sent

    def send(self, message: Message, *rest: Any, **more: Any) -> None:
        self._sent.append((self._of, message.kind, message.rank, message.step))


class Servers:
    """In place of a `ServerClient`: rows come at once, and nothing that was pushed is ever closed.

    ``lost``: what each server answers to `rejoin`.
    """

    def __init__(self, servers: int, ranks: int, lost: tuple[int, ...] = ()) -> None:
        self.servers = servers
        self.ranks = range(ranks)
        self.alone = threading.RLock()
        self.stop = Stop()
        self.sent: list[Sent] = []
        self.called: list[tuple[int, str]] = []
        self._lost = lost
        self._now = [self.incarnation(shard, 0) for shard in range(servers)]

    def incarnation(self, shard: int, number: int) -> Incarnation:
        names = [("control", ALL), *((role, r) for role in ("lookups", "pushes")
                                     for r in self.ranks)]  # fmt: skip
        channels: Any = {(role, r): WrittenDown(f"{role} {r}", self.sent) for role, r in names}
        return Incarnation(shard, number, channels)

    def at(self, shard: int) -> Incarnation:
        return self._now[shard]

    def comes_back(self, shard: int) -> Incarnation:
        self._now[shard] = self.incarnation(shard, self._now[shard].number + 1)
        return self._now[shard]

    def call_all(self, method: Any, arguments: dict[int, dict[str, Any]]) -> list[Any]:
        self.called.extend((shard, method.__name__) for shard in arguments)
        rejoins = method is ServerCalls.rejoin
        return [{"lost": self._lost[shard]} if rejoins else None for shard in arguments]

    def call_on(self, channel: Any, server: Incarnation, method: Any, **arguments: Any) -> Any:
        return {"lost": 0}

    def attach(self, *given: Any) -> None:
        pass

    def send(self, *given: Any, **more: Any) -> None:
        pass

    def pass_over_earlier_run(self) -> None:
        pass

    def push(self, *given: Any) -> None:
        pass

    def answer(self, *given: Any) -> tuple[Message, None]:
        return Message(MessageKind.ROWS), None

    def receive(self, channel: Any, server: Incarnation, **given: Any) -> tuple[Message, None]:
        return Message(MessageKind.ROWS), None

    def close(self) -> None:
        pass


@contextmanager
def store_of(client: Servers) -> Iterator[RemoteStore]:
    given: Any = client
    store = RemoteStore(LAYOUT, (SGD,), given, seed=0, segments=8)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.parametrize("lost", [(0, 3), (3, 0), (1, 2), (2, 1)])
@pytest.mark.law13
def test_a_worker_that_comes_back_has_lost_what_it_has_at_any_server(lost):
    """One server may have applied what another has not."""
    with store_of(Servers(2, 1, lost)) as store:
        assert store.rejoin(rank=0, begun=4, finished=None) == {"lost": max(lost)}


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.law13
def test_a_server_that_comes_back_is_told_of_each_rank_over_its_own_connections(shard):
    """Rank 0 has read step 0, rank 1 steps 0 and 1; rank 1 has pushed its first, and has no more
    than two."""
    client = Servers(2, 2)
    with store_of(client) as store:
        handles = {}
        for rank, step in ((0, 0), (1, 0), (1, 1)):
            handles[rank, step] = store.begin(rank, step, batch_of(*range(12)))
            store.look_up(handles[rank, step])
        store.give((handles[1, 0], ones(handles[1, 0])))
        store.finish(1, 2)
        store._rejoin(client.comes_back(shard))
    of_batches = [
        (f"lookups {rank}", kind, rank, step)
        for rank, step in sorted(handles)
        for kind in (MessageKind.REOPEN,)
    ]
    reopened = [one for one in client.sent if one[1] is MessageKind.REOPEN]
    assert reopened == of_batches
    segments = [one[0] for one in client.sent if one[1] is MessageKind.SEGMENT]
    assert segments == ["lookups 0", "lookups 1", "lookups 1"]
    others = [one for one in client.sent if one[1] in (MessageKind.PUSH, MessageKind.FINISH)]
    assert others == [
        ("pushes 1", MessageKind.PUSH, 1, 0),
        ("pushes 1", MessageKind.FINISH, 1, 2),
    ]


@pytest.mark.parametrize("begins", ["a run", "a leg"])
def test_ranks_that_were_through_before_are_not_through_in_what_begins(begins):
    """Else a server that comes back would let the others' windows run away from them."""
    client = Servers(2, 2)
    with store_of(client) as store:
        for rank in (0, 1):
            store.finish(rank, 3)
        if begins == "a run":
            store.begin_run(ServerRules(ranks=2), Stop())
        else:
            store.note_leg([3, 3])
        store.finish(1, 5)
        store._rejoin(client.comes_back(1))
    finished = [one for one in client.sent if one[1] is MessageKind.FINISH]
    assert finished == [("pushes 1", MessageKind.FINISH, 1, 5)]


@pytest.mark.parametrize("died", [0, 1])
def test_a_snapshot_is_dropped_at_the_servers_that_still_have_it(died):
    """The one that came back knows nothing of it."""
    client = Servers(2, 1)
    with store_of(client) as store:
        store.freeze_snapshots()
        client.comes_back(died)
        client.called.clear()
        store.drop_snapshots()
        assert client.called == [(1 - died, "drop_rows")]


@pytest.mark.parametrize("deaths", [0, 1, MOST_FAILOVERS - 1])
def test_deaths_of_a_server_count_over_all_of_its_incarnations(deaths):
    """One that has died so often is started again as often as is left, and no more."""
    tries: list[int] = []

    def dies_again(dead: Incarnation, failover: Failover) -> int:
        tries.append(dead.number)
        raise PeerGoneError("it has died again")

    client: Any = SimpleNamespace(
        death_of=lambda shard: "embedding server 1 has died",
        failover=Failover(restart=lambda shard: None),
        disconnect=lambda shard: None,
        closing=SimpleNamespace(wait=lambda seconds: None, is_set=lambda: False),
        stop=Stop(),
        _restart=dies_again,
    )
    dead = Servers(2, 1).incarnation(1, deaths)
    with pytest.raises(PeerError, match=f"for the {MOST_FAILOVERS + 1}th time in this run"):
        ServerClient._fail_over(client, dead)
    assert tries == [deaths] * (MOST_FAILOVERS - deaths)
