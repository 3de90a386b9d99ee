"""Racks: hosts behind one switch, and the uplink that they share on the way to all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from persia_sim.words.rules import COUNT, RATE, counted, require, require_within

_ROLES = {"gpu_hosts": "GPU host", "worker_hosts": "worker host", "server_hosts": "server host"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rack:
    """Hosts behind one switch. What they send each other meets their NICs only; what they send to
    or get from hosts of other racks shares the uplink, too. Behind the uplinks nothing binds."""

    name: str
    """Any name."""
    gpu_hosts: int = 0
    """GPU hosts in it, >= 0. Hosts of a role are dealt to the racks in order: the first rack has
    the first ones (and so the first ranks)."""
    worker_hosts: int = 0
    """Hosts of embedding workers in it, >= 0."""
    server_hosts: int = 0
    """Hosts of embedding servers in it, >= 0. A dense server of its own (`dense_home = "one"`)
    stands beside the first of all."""
    uplink_bytes_per_s: float
    """Nominal rate of the uplink, each way, > 0; inf never binds. A rack whose NICs together have
    four times this rate is oversubscribed 4:1."""
    source: str
    """Where these figures come from."""

    def __post_init__(self) -> None:
        hosts = (0, COUNT[1])
        require_within(
            self, f" of rack {self.name}", gpu_hosts=hosts, worker_hosts=hosts, server_hosts=hosts,
            uplink_bytes_per_s=RATE,
        )  # fmt: skip


def check_racks(racks: Sequence[Rack], gpu: int, worker: int, server: int) -> None:
    """Every host of a cluster has its rack; raises ValueError naming the role that has not."""
    for field, count in zip(_ROLES, (gpu, worker, server), strict=True):
        placed = sum(getattr(rack, field) for rack in racks)
        require(
            placed == count,
            f"{field} of all racks together",
            placed,
            f"the cluster has {counted(count, _ROLES[field])}",
            f"say the {field} of every rack anew, or give no racks",
        )
