"""What torchrun tells each process that it starts, and what it is told of an error."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.process import COUNTS_OF_PROCESSES

if TYPE_CHECKING:  # every command comes by here, and most have no config
    from runtime.config import TrainConfig

_NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_REMEDY = "start with torchrun --nproc-per-node N, or unset it to train in one process"
_LOOK_UP_WITHIN_S = 3.0
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's place among those that one torchrun has started."""

    rank: int
    local_rank: int
    """Among the ranks of this host."""
    ranks: int
    ranks_here: int
    """On this host."""
    host: str
    port: int
    agent_has_store: bool
    """Whether torchrun itself holds the store of all ranks; else rank 0 does."""

    @property
    def spans_hosts(self) -> bool:
        """Whether other ranks are on other hosts, so that no memory is shared with them."""
        return self.ranks_here < self.ranks

    @property
    def started_s(self) -> float:
        """When torchrun itself was started, in seconds since 1970, the same for all ranks."""
        return started_s()

    @property
    def is_of_torchrun(self) -> bool:
        """Whether it was torchrun itself that started this rank, and not who supervises a cluster;
        this one process may then become another one, unnoticed."""
        return "TORCHELASTIC_RESTART_COUNT" in os.environ

    def applied_to(self, config: TrainConfig, source: str, *, anew: bool = False) -> TrainConfig:
        """The config with what torchrun decides, as `as_launched` has it."""
        return as_launched(config, self, source, anew=anew)

    def refuse_other(self, config: TrainConfig, folder: Path | None) -> None:
        """Raise ValueError for what ranks that are processes cannot do."""
        refuse_other(config, self, folder)


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or the supervisor of a cluster, has started this process as a rank."""
    return all(name in environment for name in _NAMES)


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The place that torchrun gave this process; None when it did not start it.

    Raises ValueError for variables that torchrun would not give, and where something else has
    started several processes, each of which would train alone.
    """
    if not is_rank(environment):
        _refuse_other_launchers(environment)
        return None
    ranks, here = (_number(environment, name, 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    launch = Launch(
        rank=_number(environment, "RANK", 0, ranks - 1),
        local_rank=_number(environment, "LOCAL_RANK", 0, here - 1),
        ranks=ranks,
        ranks_here=here,
        host=environment.get("MASTER_ADDR", ""),
        port=_number(environment, "MASTER_PORT", 1, 65535),
        agent_has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    _refuse_unknown(launch.host)
    return launch


def _number(environment: Mapping[str, str], name: str, least: int, most: int = 2**31) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
        given = f"is {text!r}" if name in environment else "is not set"
        limits = f"from {least}" + (f" to {most}" if most < 2**31 else " on")
        raise ValueError(
            f"{name} {given} in the environment; torchrun gives each process that it starts a whole"
            f" number {limits}: {_REMEDY}"
        )
    return int(text)


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    for name in COUNTS_OF_PROCESSES:
        if environment.get(name, "1") != "1":
            missing = ", ".join(key for key in _NAMES if key not in environment)
            raise ValueError(
                f"{name} is {environment[name]!r}, but {missing} of torchrun are not set, so each"
                f" of several processes would train alone: {_REMEDY}"
            )


def _refuse_unknown(host: str) -> None:
    """Raise ValueError for an address that nobody knows; torch would go on asking."""
    addresses: list[object] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            addresses.extend(socket.getaddrinfo(host, 0))

    if host:
        asking = threading.Thread(target=look_up, daemon=True)
        asking.start()
        asking.join(_LOOK_UP_WITHIN_S)
    if not addresses:
        raise ValueError(
            f"MASTER_ADDR is {host!r} in the environment, and no host of that name was found;"
            f" torchrun gives the one on which it runs: {_REMEDY}"
        )


def as_launched(
    config: TrainConfig, launch: Launch, source: str, *, anew: bool = False
) -> TrainConfig:
    """The config with what torchrun decides: a rank is a process, rows are in servers.

    ``source`` says where the number of ranks stands. Raises ValueError when that is another one,
    unless it is given ``anew``, or a run goes on, which it may with any number.
    """
    if not anew and config.sync.ranks not in (1, launch.ranks):
        raise _other_ranks(source, config, launch)
    engine = replace(
        config.engine, executor="concurrent", servers=max(1, config.engine.servers), shards=1
    )
    return replace(config, sync=replace(config.sync, ranks=launch.ranks), engine=engine)


def refuse_other(config: TrainConfig, launch: Launch, folder: Path | None) -> None:
    """Raise ValueError for what was typed and cannot be done by ranks that are processes.

    ``folder``: of the run, where it was named.
    """
    # As many ranks as torchrun has started, on servers that outlive each of them.
    if config.sync.ranks != launch.ranks:
        raise _other_ranks("--ranks", config, launch)
    if not config.engine.servers:
        raise ValueError(
            "--servers 0 keeps the rows inside one process, and torchrun started"
            f" {launch.ranks}; use --servers 1 or more"
        )

    # Over several hosts nothing can be shared by memory, and no clock names the folder.
    if not launch.spans_hosts:
        return
    hosts = f"torchrun started {launch.ranks} ranks, {launch.ranks_here} of them on this host"
    if not config.engine.servers_at:
        raise ValueError(
            f"{hosts}, and servers that rank 0 starts share its memory; start `persia-runtime"
            " serve` on the hosts of the rows and add --servers-at HOST:PORT --servers-secret FILE"
        )
    if folder is None:
        raise ValueError(f"{hosts}, which name their run folder by their own clock; add --out")


def _other_ranks(source: str, config: TrainConfig, launch: Launch) -> ValueError:
    return ValueError(
        f"{source} is {config.sync.ranks}, but torchrun started {launch.ranks} processes, and each"
        f" is a rank; leave it out, or start torchrun with --nproc-per-node {config.sync.ranks}"
    )


def device_of(name: str, local_rank: int, devices: int) -> str:
    """The device of a rank's dense network: ``cuda`` is the GPU of its number on this host.

    >>> device_of("cuda", 1, 4), device_of("cuda:0", 1, 4), device_of("cpu", 1, 0)
    ('cuda:1', 'cuda:0', 'cpu')
    """
    if name != "cuda" or not devices:
        return name
    if local_rank >= devices:
        raise ValueError(
            f"rank {local_rank} of this host has no GPU of its own: there are {devices}; start"
            f" torchrun with --nproc-per-node {devices}, or share one with --device cuda:0"
        )
    return f"cuda:{local_rank}"


def address_towards(host: str) -> str:
    """This host's own address, IPv4 or IPv6, on its route to another host; nothing is sent."""
    family, _, _, _, at = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(at)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has an address of this host. Raises OSError."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            if number == packed:
                return name
        raise OSError(f"no network interface of this host has the address {address}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                asked = struct.pack("256s", name.encode())
                its_address = fcntl.ioctl(asking, _SIOCGIFADDR, asked)[20:24]
                if socket.inet_ntoa(its_address) == address:
                    return name
    raise OSError(f"no network interface of this host has the address {address}")


def started_s() -> float:
    """When torchrun itself was started, in seconds since 1970: the same for all ranks, and after
    it has started them anew."""
    ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime")
    )
    return boot + ticks / os.sysconf("SC_CLK_TCK")
