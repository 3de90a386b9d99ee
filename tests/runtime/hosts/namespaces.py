"""Hosts for tests: network namespaces of this machine, which share its files and nothing else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments.drilling.cable import ADDRESSES, MISSING, Cable
from tests.runtime.worlds import host_of_servers

_CLONE_NEWNET = 0x40000000
needed = pytest.mark.skipif(bool(MISSING), reason=f"network namespaces need {MISSING}")


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that one cable joins; gone afterwards, with what runs there."""
    with closing(Cable()) as cable:
        yield cable.names


def enter(name: str) -> None:
    """From now on this process, which must have one thread, is on that host."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def start(host: str, *words: str, before: Sequence[str] = (), **more: Any) -> subprocess.Popen[str]:
    """Python on a host."""
    line = ["ip", "netns", "exec", host, *before, sys.executable, *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


@contextmanager
def serving(
    hosts: tuple[str, str], *more: str, before: tuple[str, str] = ("", "")
) -> Iterator[tuple[tuple[str, ...], Path]]:
    """`serve` on every host: its addresses, and the file with its secret."""
    secret, at = host_of_servers()[1], [f"{address}:7800" for address in ADDRESSES]
    words = ["-m", "runtime", "serve", "--secret", str(secret), *more, "--listen"]
    servers = [start(hosts[k], *words, at[k], before=before[k].split()) for k in (0, 1)]
    try:
        for server in servers:
            assert server.stdout is not None
            assert "ready" in server.stdout.readline()
        yield tuple(at), secret
    finally:
        for server in servers:
            server.terminate()
            server.wait(20)
