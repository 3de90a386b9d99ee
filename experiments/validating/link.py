"""A second host for embedding servers: a network namespace of this machine, at a shaped link.

It needs root, iproute2 and util-linux. `persia-runtime serve` runs there; the ranks stay
where they are. A token bucket holds each direction at its rate; before and after a run a plain
transfer shows whether it does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from experiments.result_cache import cpu_s_of, die_with_the_parent
from persia_sim.base.rules import Refused

_NETWORK = "198.18"
"""The range that RFC 2544 sets aside for measurements of networks."""
_HEADERS_BYTES = 66
"""Headers of a packet: Ethernet, IPv4, TCP with time stamps. An acknowledgement is no more."""
HEADER_EFFICIENCY = 1448 / (1448 + _HEADERS_BYTES)
"""Payload over what the bucket counts, with an MTU of 1,500."""
_QUICK_GBIT_PER_S = 1.0
"""From this rate on bucket and pieces are larger: each piece has a timer, and at 1 Gbit/s pieces of
16 kB took 0.16 cores of the two that ranks ran on (of 64 kB 0.05). A NIC takes none."""
_LONG_S = 0.25
_WITHIN_S = 60.0
_SERVE = 7800
_ECHO = 7801


class Apart:
    """The other host and its link; gone when closed, with what runs there."""

    def __init__(self, option: str) -> None:
        """Make the host. Raises `Refused`, naming the ``option`` that needs it, where this process
        may not make it, OSError where it fails."""
        # It needs tools, and root.
        tools = ("ip", "tc", "unshare", "nsenter", "openssl")
        missing = [f"the command {name}" for name in tools if shutil.which(name) is None]
        if os.geteuid():
            missing.append("root, to make a network namespace")
        if missing:
            rule = f"asks for a second host, which needs {' and '.join(missing)}; or leave it out"
            raise Refused(option, rule)

        # Names and addresses of this process; whatever was made is undone if a step fails.
        self._device = f"persia{os.getpid() % 10**8}"
        self._rate = 0.0
        self._here_at, self._there_at = (f"{_NETWORK}.{os.getpid() % 256}.{end}" for end in (1, 2))
        with ExitStack() as undo:
            self._start(undo)
            self._undo = undo.pop_all()

    def _start(self, undo: ExitStack) -> None:
        """Start the other host, a process; its namespace, and the link with it, end when it
        does."""
        # The secret that its servers take from ranks.
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="persia-")))
        self.servers_at = f"{self._there_at}:{_SERVE}"
        self.secret = folder / "secret"
        self.secret.touch(0o600)
        self.secret.write_text(secrets.token_hex(16))

        # A process in a network namespace of its own, which waits for its address.
        line = "from experiments.validating.link import other_host; other_host()"
        process = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        undo.enter_context(process)
        undo.callback(process.terminate)
        process.stdout.readline()  # it is in its namespace
        self._pid = process.pid
        self._there = ("nsenter", "-t", str(process.pid), "-n")

        # A pair of devices, one end in each namespace, with an address each.
        peer = ("type", "veth", "peer", "name", self._device, "netns", str(process.pid))
        _run("ip", "link", "add", self._device, *peer)
        undo.callback(_run, "ip", "link", "delete", self._device)
        for where, address in (((), self._here_at), (self._there, self._there_at)):
            _run(*where, "ip", "address", "add", f"{address}/30", "dev", self._device)
            for device in ("lo", self._device):
                _run(*where, "ip", "link", "set", device, "up")

        # Now its servers can start.
        process.stdin.write(f"{self._there_at} {self.secret}\n")
        process.stdin.flush()
        if "ready" not in process.stdout.readline():
            raise OSError("the other host ended before it was ready; what it said is above")

    def close(self) -> None:
        """End it all."""
        self._undo.close()

    def shape(self, gbit_per_s: float) -> None:
        """Hold both directions at this rate from now on; 0: as fast as the machine can."""
        if gbit_per_s == self._rate:
            return
        device = ("dev", self._device, "root")
        # What is larger than the bucket it cuts into packets of 1,500 bytes.
        bucket = bucket_bytes(gbit_per_s)
        piece = bucket // 2
        tbf = ("tbf", "rate", f"{gbit_per_s:g}gbit", "burst", f"{bucket}b", "latency", "100ms")
        shaping = ("replace", *device, *tbf) if gbit_per_s else ("del", *device)
        for where in ((), self._there):
            _run(*where, "tc", "qdisc", *shaping)
            _run(*where, "ip", "link", "set", self._device, "gso_max_size", str(piece))
        self._rate = gbit_per_s

    def control(self) -> float:
        """What plain transfers reach of the rate, the one that is further off: 1 is all of it."""
        if not self._rate:
            return 1.0
        rate = HEADER_EFFICIENCY * self._rate / 8 * 1e9
        with socket.create_connection((self._there_at, _ECHO), _WITHIN_S) as sock:
            size = int(_LONG_S * rate)
            began = time.perf_counter()
            sock.sendall(size.to_bytes(8, "little"))
            _send(sock, size)
            _take(sock, 1)
            there = time.perf_counter()
            _take(sock, size)
            seconds = there - began, time.perf_counter() - there
        return max((size / s / rate for s in seconds), key=lambda share: abs(share - 1))

    def cpu_s(self) -> float:
        """CPU seconds of the other host's processes until now."""
        return cpu_s_of(self._pid)

    def moved(self) -> tuple[int, int]:
        """Bytes that have left for the other host, and that have come from it, without headers: of
        packets as the interface counts them, which may be segments of up to 64 kB."""
        counters = Path("/sys/class/net") / self._device / "statistics"
        sent, come = (
            int((counters / f"{way}_bytes").read_text())
            - _HEADERS_BYTES * int((counters / f"{way}_packets").read_text())
            for way in ("tx", "rx")
        )
        return sent, come


def bucket_bytes(gbit_per_s: float) -> int:
    """What the link lets through at once after a pause, headers counted."""
    return 1 << (15 if 0 < gbit_per_s < _QUICK_GBIT_PER_S else 17)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _send(sock: socket.socket, size: int) -> None:
    block = memoryview(bytes(1 << 20))
    for start in range(0, size, len(block)):
        sock.sendall(block[: size - start])


def _take(sock: socket.socket, size: int) -> None:
    block = bytearray(1 << 20)
    while size:
        got = sock.recv_into(block, min(size, len(block)))
        if not got:
            raise ConnectionError("the other end of a control transfer has gone")
        size -= got


def other_host() -> None:
    """Serve runs, and control transfers: the body of the process of the other host."""
    from runtime.hosts.launch.hosts import run

    die_with_the_parent()
    print("here", flush=True)
    address, secret = sys.stdin.readline().split()
    listener = socket.create_server((address, _ECHO))
    threading.Thread(target=_echo, args=(listener,), daemon=True).start()
    run(["--secret", secret, "--listen", f"{address}:{_SERVE}"])


def _echo(listener: socket.socket) -> None:
    """Take as many bytes as each connection announces, and send as many back."""
    while True:
        sock, _ = listener.accept()
        with sock, suppress(ConnectionError):
            size = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "little")
            _take(sock, size)
            sock.sendall(b"k")
            _send(sock, size)
