"""Requests of a worker to all servers, joined: one flow, one for each rack, or each message."""

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
    nic = platform.worker_link(worker)
    if platform.resolve:
        yield from _resolved(
            platform, nic, request_bytes, service_s, memory_bytes, answer_bytes, at_servers, join_s
        )
        return
    if len(platform.groups) > 1:
        yield from _to_racks(
            platform, nic, request_bytes, service_s, memory_bytes, answer_bytes, at_servers, join_s
        )
        return
    env, server, streams = platform.env, platform.server_nic[0], platform.groups[0].streams
    yield platform.network.send(platform.path(nic, server), request_bytes, streams)
    arrived_s, each = env.now, None
    if platform.tells_each:
        delays = platform.bank.visit(arrived_s, service_s, memory_bytes)
        each = np.full(len(delays), arrived_s), arrived_s + delays
        each[1][each[1].argmax()] += join_s
        delay = float(delays.max()) + join_s
    else:
        delay = platform.bank.longest(arrived_s, service_s, memory_bytes) + join_s
    if delay == inf:
        yield env.event()  # a server that never comes back
    yield delay
    at_servers(arrived_s, each)
    if answer_bytes is not None:
        yield from _answer(platform, platform.path(server, nic), answer_bytes, streams)


def _to_racks(
    platform: Platform,
    nic: int,
    request_bytes: float,
    service_s: np.ndarray,
    memory_bytes: float,
    answer_bytes: float | None,
    at_servers: AtServers,
    join_s: float,
) -> Process:
    """One flow to the servers of each rack, each of which answers for itself."""
    env, served = platform.env, 0
    arrived, done = np.zeros(len(service_s)), np.zeros(len(service_s))

    def ask(server: int, group: ServerGroup, bank: Bank) -> Process:
        nonlocal served
        part, share = group.processes, group.share
        path = platform.path(nic, server)
        yield platform.network.send(path, request_bytes * share, group.streams)
        delays = bank.visit(env.now, service_s[part], memory_bytes * share)
        arrived[part] = env.now
        done[part] = env.now + delays
        done[group.first + int(delays.argmax())] += join_s
        delay = float(delays.max()) + join_s
        if delay == inf:
            yield env.event()
        yield delay
        served += 1
        if served == len(platform.groups):
            at_servers(float(arrived.max()), (arrived, done) if platform.tells_each else None)
        if answer_bytes is not None:
            back = platform.path(server, nic)
            yield from _answer(platform, back, answer_bytes * share, group.streams)

    yield simpy.AllOf(
        env,
        [
            env.process(ask(server, *of_group))
            for server, of_group in zip(platform.server_nic, platform.banks.of_group, strict=True)
        ],
    )


def _answer(
    platform: Platform, path: tuple[int, ...], size_bytes: float, streams: float = 1.0
) -> Process:
    if platform.latency_s:
        yield platform.travel()
    yield platform.network.send(path, size_bytes, streams)


def _resolved(
    platform: Platform,
    nic: int,
    request_bytes: float,
    service_s: np.ndarray,
    memory_bytes: float,
    answer_bytes: float | None,
    at_servers: AtServers,
    join_s: float,
) -> Process:
    env, shares = platform.env, platform.need.server_shares
    served = 0
    arrived, instants = np.zeros(len(shares)), np.zeros(len(shares))

    def ask(process: int) -> Process:
        nonlocal served
        server = platform.server_nic[platform.host_of_server[process]]
        share = float(shares[process])
        yield platform.network.send(platform.path(nic, server), request_bytes * share)
        arrived[process] = env.now
        service, memory = float(service_s[process]), memory_bytes * share
        delay = platform.bank.visit_one(env.now, process, service, memory)
        if delay == inf:
            yield env.event()
        yield delay
        served += 1
        if served == len(shares) and join_s:
            yield join_s  # whose answer is the last
        instants[process] = env.now
        if served == len(shares):
            at_servers(float(arrived.max()), (arrived, instants))
        if answer_bytes is not None:
            yield from _answer(platform, platform.path(server, nic), answer_bytes * share)

    yield simpy.AllOf(env, [env.process(ask(p)) for p in range(len(shares))])
