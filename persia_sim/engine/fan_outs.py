"""Requests of a worker to all servers, joined: one flow to each group of servers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import simpy

from persia_sim.engine.clock import Process
from persia_sim.engine.hardware import Platform
from persia_sim.engine.servers import Bank
from persia_sim.model.placement import ServerGroup

AtServers = Callable[[float, tuple[np.ndarray, np.ndarray] | None], None]


def fan_out(
    platform: Platform,
    worker: int,
    request_bytes: float,
    service_s: np.ndarray,
    memory_bytes: float,
    answer_bytes: float | None,
    at_servers: AtServers,
    join_s: float = 0.0,
) -> Process:
    """Ask every server and join; ``at_servers`` runs when the last one has done its work, with
    the instant at which the last request arrived and, where `tells_each`, those at which each
    server got its request and had done it. The request's latency is behind it (`travel`): what
    is lost or slow at the servers is known only when it has arrived. The busiest server of a
    batch is later than that of the mean batch by ``join_s``. ``answer_bytes`` None: nobody
    waits for an answer; 0 is an answer without rows."""
    env, nic, send = platform.env, platform.worker_link(worker), platform.network.send
    groups = list(zip(platform.server_nic, platform.servers.of_group, strict=True))
    arrived = np.zeros(len(service_s) if platform.tells_each else 0)
    done, last_s, left = arrived.copy(), 0.0, len(groups)

    def ask(server: int, group: ServerGroup, bank: Bank) -> Process:
        nonlocal last_s, left
        part, share = group.processes, group.share
        yield send(platform.path(nic, server), request_bytes * share, group.streams)
        last_s = now = env.now
        if platform.tells_each:
            delays = bank.visit(now, service_s[part], memory_bytes * share)
            arrived[part], done[part] = now, now + delays
            done[group.first + int(delays.argmax())] += join_s
            delay = float(delays.max()) + join_s
        else:
            delay = bank.longest(now, service_s[part], memory_bytes * share) + join_s
        if delay == inf:
            yield env.event()  # a server that never comes back
        yield env.timeout(delay)
        left -= 1
        if not left:
            at_servers(last_s, (arrived, done) if platform.tells_each else None)
        if answer_bytes is not None:
            if platform.latency_s:
                yield platform.travel()
            yield send(platform.path(server, nic), answer_bytes * share, group.streams)

    if len(groups) == 1:
        yield from ask(groups[0][0], *groups[0][1])
    else:
        yield simpy.AllOf(env, [env.process(ask(server, *group)) for server, group in groups])
