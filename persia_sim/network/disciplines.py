"""NICs and the three ways in which messages share them.

A link is one direction of one NIC. All server NICs may be one link: when every fan-out spreads
over the servers in the same shares, the busiest NIC binds first and the others follow it, so a
single link of capacity (NIC rate / largest share) is exact under fair sharing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import simpy


class Network(Protocol):
    """A discipline."""

    link_bytes: list[float]

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """An event that fires when the last byte has arrived."""
        ...


class Unshared:
    """Every message alone: size over the slowest link of its path."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        self._env = env
        self._capacities = capacities
        self._stream = stream
        self.link_bytes = [0.0] * len(capacities)

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """Fires after the transfer alone."""
        for link in path:
            self.link_bytes[link] += size_bytes
        return self._env.timeout(
            transfer_s(size_bytes, [self._capacities[k] for k in path], self._stream * streams)
        )


def transfer_s(size_bytes: float, rates: Iterable[float], bound: float) -> float:
    """Duration of a message that shares with nobody."""
    return size_bytes / min(*rates, bound)


class Fifo:
    """Messages hold a NIC one after the other, in order of sending; the receiving NIC starts with
    the sending one, so an idle pair is passed in the time of the slower."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        self._env = env
        self._capacities = capacities
        self._stream = stream
        self._free = [0.0] * len(capacities)
        self.link_bytes = [0.0] * len(capacities)

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """Fires when the message has left every NIC of its path."""
        start = end = self._env.now
        slowest = size_bytes / (self._stream * streams)
        for link in path:
            start = max(start, self._free[link])
            done = start + max(size_bytes / self._capacities[link], slowest)
            self._free[link] = done
            end = max(end, done)
            self.link_bytes[link] += size_bytes
        return self._env.timeout(end - self._env.now)
