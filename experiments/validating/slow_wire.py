"""A slow wire: a proxy in a process of its own, through which TCP connections are late.

What comes in at one end goes out at the other ``delay_s`` later, in order. So a round trip takes
twice the delay, and nothing of it is in the process under test.

    python -m experiments.validating.slow_wire DELAY_S

For each HOST:PORT on a line of its standard input it prints the port at which that is reached late.
It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.hosts.launch.processes import Address
from runtime.hosts.wire.peers import at_port, host_and_port
from runtime.hosts.wire.tls import TLS

if TYPE_CHECKING:
    from runtime.config import TrainConfig
    from runtime.rank.components import OpenRows

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 1 << 23
"""Of a connection that are on their way: of more its sender is not heard."""


class Wire:
    """The end of it that others use."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def to(self, address: Address) -> Address:
        """The address as it is reached over the wire."""
        return replace(address, names=tuple(self._late(name) for name in address.names))

    def _late(self, name: str) -> str:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{name.removeprefix(TLS)}\n")
        process.stdin.flush()
        tls = TLS if name.startswith(TLS) else ""
        return f"{tls}{at_port('127.0.0.1', int(process.stdout.readline()))}"


def rows_behind(wire: Wire) -> OpenRows:
    """How `assemble` opens rows that the ranks of this process reach over the wire: their servers,
    or a worker that is near to these."""

    def open_rows(config: TrainConfig, layout: Any, tables: Any, _: Any, stop: Any) -> Any:
        from runtime.hosts.row_processes import RowProcesses, worker_of

        processes = RowProcesses(config, layout, tables)
        *near, far = processes.addresses
        ranks = range(config.sync.ranks)
        return worker_of(config, layout, tables, stop, [*near, wire.to(far)], ranks, processes)

    return open_rows


@contextmanager
def slow_wire(delay_s: float) -> Iterator[Wire]:
    """A wire that lasts as long as the context."""
    words = [sys.executable, "-m", __name__, str(delay_s)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Wire(process)
        finally:
            process.terminate()


# The process.


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """All that comes, until the end of it."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_BYTES // _CHUNK_BYTES)
    delivery = asyncio.create_task(_deliver(queue, writer))
    data = b" "
    while data:
        try:
            data = await reader.read(_CHUNK_BYTES)
        except OSError:
            data = b""
        await queue.put((time.monotonic() + delay_s, data))
    await delivery


async def _deliver(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    data = b" "
    while data:
        due_s, data = await queue.get()
        await asyncio.sleep(due_s - time.monotonic())
        with suppress(OSError):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    while name := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        host, port = host_and_port(name)

        async def join(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            host: str = host,
            port: int = port,
        ) -> None:
            there, far = await asyncio.open_connection(host, port)
            await asyncio.gather(_carry(reader, far, delay_s), _carry(there, writer, delay_s))

        server = await asyncio.start_server(join, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)


def _precise_loop() -> asyncio.AbstractEventLoop:
    """One whose sleeps are not rounded up to a millisecond, as with epoll."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        runner.run(_serve(float(sys.argv[1])))
