"""Where processes listen: over IPv4 and IPv6, on any port or on those of a range."""

from __future__ import annotations

import errno
import socket
import threading

import pytest

from persia_sim.base.rules import Refused
from runtime.config.train import HOST_PORT
from runtime.hosts.launch.hosts import HostedProcesses, ProcessHost, Serve
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.torchrun import address_towards, interface_of
from runtime.hosts.wire.peers import listen
from tests.runtime.hosts.served import SGD

SECRET = "a secret of 16 characters and more"


def has_ipv6() -> bool:
    """Whether this machine has a loopback device of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def free_ports(count: int) -> list[int]:
    """So many ports in a row that nobody has."""
    for first in range(20_000, 60_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return list(range(first, first + count))
    raise AssertionError


def test_a_range_of_ports_is_taken_in_order_and_its_end_is_an_error():
    first, last = free_ports(2)
    sockets = []
    for expected in (first, last):
        sock, name = listen("127.0.0.1:0", range(first, last + 1))
        sockets.append(sock)
        assert name == f"127.0.0.1:{expected}"
    with pytest.raises(OSError, match=r"all ports of the range are taken at 127.0.0.1") as error:
        listen("127.0.0.1:0", range(first, last + 1))
    assert error.value.errno == errno.EADDRINUSE
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_a_server_of_another_host_listens_where_it_may(host):
    ports = free_ports(3)
    served = range(ports[1], ports[2] + 1)
    there = ProcessHost(f"{host}:0", SECRET, ports=served)
    threading.Thread(target=there.serve, daemon=True).start()
    processes = HostedProcesses(
        [ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))], [there.name], SECRET
    )
    try:
        (name,) = processes.address.names
        assert name.rpartition(":")[0] == host and int(name.rpartition(":")[2]) in served
        client = ServerClient(processes.address, [0])
        assert client.pids[0] > 0
        client.close()
    finally:
        processes.close()
        there.close()


@needs_ipv6
def test_the_interface_of_an_ipv6_address_is_found():
    assert address_towards("::1") == "::1"
    assert interface_of("::1") == "lo"
    with pytest.raises(OSError, match="no network interface of this host has the address fd00::77"):
        interface_of("fd00::77")


@pytest.mark.parametrize(
    "typed", ["10.0.0.1:7800", "host-1.a:0", "[fd78::2]:7800", "[fe80::1%eth0]:1"]
)
def test_addresses_that_are_read(typed):
    assert HOST_PORT.fullmatch(typed)


@pytest.mark.parametrize("typed", ["fd78::2:7800", "[fd78::2]", "[]:7800", "10.0.0.1", "[x]:1"])
def test_addresses_that_are_not(typed):
    assert not HOST_PORT.fullmatch(typed)


@pytest.mark.parametrize("typed", ["7800", "7800-", "-1", "9-8", "0-9", "7800-70000", "a-b"])
def test_a_range_that_is_none_is_refused_with_its_rule(typed, tmp_path):
    with pytest.raises(Refused, match="must be FIRST-LAST, ports from 1 to 65535"):
        Serve(secret=tmp_path, ports=typed)


def test_every_address_of_a_host_is_none_to_tell_a_run(tmp_path):
    with pytest.raises(Refused, match="is every address of this host"):
        Serve(secret=tmp_path, listen="[::]:7800")
