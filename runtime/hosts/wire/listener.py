"""An event loop for all connections of a process that listens, however many there are.

Each connection is a task with a coroutine, which a thread takes a step further when its next bytes
are here or the future that it awaits is done: so a lookup that waits for its window, and a client
that stops in the middle of a message, hold no thread. One thread accepts, greets, hears signs of
life and sees to time-outs; `WORKERS` others do what may take longer. The thread that receives a
message answers it, too: nothing is handed over.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from runtime.hosts.wire.calls import Payload, send_error
from runtime.hosts.wire.channel import RESUMED_WITHIN_S, Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine, Future, LoopCondition
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
)
from runtime.hosts.wire.peers import NEVER_ADMITTED, accept_handshake
from runtime.hosts.wire.tls import LOOK_EVERY_S, Certificate, TlsSocket, proof

MOST_STRANGERS = 64
"""Connections that have not said who they are: of more the oldest is closed, so that they take no
descriptors that others need."""
WORKERS = 4
"""Their kernels take turns at the rows; beside one there is time to receive and send for others."""


class Task:
    """One connection and its coroutine, as an event loop has them."""

    def __init__(self, channel: Channel, poller: select.epoll) -> None:
        self.channel = channel
        self.poller = poller
        self.coroutine: Coroutine[None]
        self.future: Future | None = None
        """What the coroutine awaits, if not its next bytes."""
        self.running = threading.Lock()
        """Held by the thread that takes a step."""
        self.polling = threading.Lock()
        """Held by the thread that has the kernel watch the socket."""


class Listener:
    """Admits whoever knows the secret. A client whose connection broke comes again under the name
    of that connection, and goes on where it was."""

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        serve: Callable[[Channel, Message, Payload], Coroutine[None]],
        who: str,
        *,
        tls: bool | Path = False,
        condition: LoopCondition | None = None,
    ) -> None:
        """``serve`` is given a connection, its first message and the payload of that: a coroutine
        that ends with the conversation; ``who`` listens, in words; ``tls``: encrypted, by a
        certificate that is made, or by that of a file; ``condition``: what its requests wait on.
        Raises ValueError where ``tls`` cannot be had."""
        self._socket = sock
        self._secret = secret
        self._serve = serve
        self._who = who
        file = tls if isinstance(tls, Path) else None
        self._certificate = Certificate(file) if tls else None
        self._condition = condition or LoopCondition()

        # All tasks; by the number of their socket, by the name of their connection; the latest
        # ones, strangers among them; and those that await a future.
        self._tasks: set[Task] = set()
        self._by_socket: dict[int, Task] = {}
        self._by_name: dict[str, Task] = {}
        self._newcomers: deque[Task] = deque()
        self._awaiting: dict[Task, Future] = {}

        self._closed = False
        self._ended = False
        sock.setblocking(False)
        self._greeter_poll = select.epoll()
        self._worker_poll = select.epoll()
        self._greeter_poll.register(sock, select.EPOLLIN)

    def serve_all(self) -> None:
        """Run the event loop until it is closed."""
        listening = self._socket.fileno()
        checked_s = time.monotonic()
        workers = [threading.Thread(target=self._run_worker, daemon=True) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()

        # This thread accepts, greets, and now and then looks at every time-out.
        while not self._closed or self._tasks:
            for number, _ in self._greeter_poll.poll(LOOK_EVERY_S):
                if number == listening:
                    self._accept()
                elif task := self._by_socket.get(number):
                    self._step(task)
            if time.monotonic() - checked_s > LOOK_EVERY_S:
                checked_s = time.monotonic()
                self._check_timeouts()

        self._ended = True
        for worker in workers:
            worker.join()

    def close(self) -> None:
        """Admit nobody else, and end every connection."""
        self._closed = True
        self._socket.close()

    # The event loop.

    def _run_worker(self) -> None:
        """Step tasks whose bytes have come, then those whose futures may be done."""
        while not self._ended:
            for number, _ in self._worker_poll.poll(LOOK_EVERY_S, 1):
                if task := self._by_socket.get(number):
                    self._step(task)
            while self._condition.is_notified:
                self._condition.is_notified = False
                self._step_ready()

    def _step_ready(self) -> None:
        """Go on with the tasks whose futures are done."""
        for task, future in list(self._awaiting.items()):
            if future.done() and self._claim(task):
                self._step(task, is_claimed=True)

    def _claim(self, task: Task) -> bool:
        """Take a task from those that await a future; whether no other thread has."""
        return self._awaiting.pop(task, None) is not None

    def _check_timeouts(self) -> None:
        """End those that are silent for too long, take nothing, or await what will not be."""
        for task in list(self._tasks):
            future = task.future
            try:
                (task.channel if future is None else future).check()
                takes_nothing = task.channel.outbox.stalled_s() > RESUMED_WITHIN_S
                if self._closed or (takes_nothing and not task.channel.is_alive()):
                    task.channel.shut_down()
                    raise PeerGoneError("closed")
            except BaseException as error:
                if future is None or self._claim(task):
                    self._step(task, error, is_claimed=future is not None)
            if task.channel.fileno() < 0:  # it could not be made again: no poller reports that
                self._step(task)
        self._condition.is_notified = True

    def _step(
        self, task: Task, error: BaseException | None = None, *, is_claimed: bool = False
    ) -> None:
        """Run a task until it waits; one that awaits a future must be claimed before."""
        if not task.running.acquire(blocking=is_claimed):
            return  # the thread that runs it looks afterwards what has come
        future = None
        try:
            # A client that does not take what was sent to it is not heard before it does.
            is_free = task.channel.flush() or error is not None
            if task in self._tasks and (is_claimed or (is_free and task.future is None)):
                task.future = None
                coroutine = task.coroutine
                future = next(coroutine) if error is None else coroutine.throw(error)
                task.future = future
        except BaseException as ended:
            if not isinstance(ended, StopIteration):
                sys.excepthook(type(ended), ended, ended.__traceback__)
            return self._end(task)
        finally:
            task.running.release()

        # It waits for a future, for its next bytes, or for room to send.
        if future is not None:
            self._awaiting[task] = future
            if future.done():  # since
                self._condition.is_notified = True
        self._poll(task)

    def _poll(self, task: Task) -> None:
        """Have the kernel say when a task's socket has bytes for it, or room for its own."""
        with task.polling:
            number = task.channel.fileno()
            events = select.EPOLLIN if task.future is None else 0
            events = select.EPOLLOUT if task.channel.outbox else events
            if number < 0 or not events or task not in self._tasks:
                return
            self._by_socket[number] = task
            try:
                try:
                    task.poller.modify(number, events | select.EPOLLONESHOT)
                except FileNotFoundError:
                    task.poller.register(number, events | select.EPOLLONESHOT)
            except OSError:
                pass  # closed, and perhaps made again: then it is polled again

    def _end(self, task: Task) -> None:
        with task.polling:
            if self._by_socket.get(number := task.channel.fileno()) is task:
                del self._by_socket[number]
            if task in self._tasks:  # else its socket is another one's
                self._tasks.remove(task)
                task.channel.close()

    # Newcomers.

    def _accept(self) -> None:
        """Accept one connection; another user of this host is not even heard."""
        # A connection of this user, encrypted where it leaves the host.
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL):
                time.sleep(0.1)  # no descriptor is free: who is connected is served all the same
            return
        try:
            made = TlsSocket(sock, self._certificate) if self._certificate else sock
            channel = Channel(made, timeout_s=0.0)
        except OSError:  # it has gone before a word
            return sock.close()
        if not channel.connection.is_same_user():
            return channel.close()

        # A task of its own; too many strangers push the oldest of them out.
        task = Task(channel, self._greeter_poll)
        task.coroutine = self._converse(task)
        channel.on_unsent = partial(self._poll, task)
        self._tasks.add(task)
        self._newcomers.append(task)
        if len(self._newcomers) > MOST_STRANGERS:
            oldest = self._newcomers.popleft()
            if oldest in self._tasks and not oldest.channel.is_authenticated:
                self._end(oldest)
        self._step(task)

    def _converse(self, task: Task) -> Coroutine[None]:
        """One connection from its handshake to its end.

        Whatever is wrong with a stranger ends its connection, and nothing else.
        """
        # Who is it? Without the secret the handshake ends here.
        channel = task.channel
        hello = Payload()
        name = ""
        try:
            # A connection that is made again goes to the conversation that waits for it.
            message, hello = yield from accept_handshake(channel, self._secret)
            connection_name = str(hello.get("connection", id(channel)))
            if not self._is_new(task, connection_name, hello):
                return
            name = connection_name
            if hello.get("role") != "heartbeat":
                task.poller = self._worker_poll
            yield from self._serve(channel, message, hello)
        except (BadMessageError, MemoryError) as error:
            # Say to both ends what was wrong.
            known = f"{hello['ranks']} (pid {hello['pid']})" if "ranks" in hello else ""
            peer = known or channel.connection.who()
            sentence = f"{self._who}: closed a connection of {peer}: {error}"
            print(sentence, file=sys.stderr, flush=True)
            send_error(channel, error)
        except OSError:
            pass  # it has gone
        finally:
            self._by_name.pop(name, None)

    def _is_new(self, task: Task, name: str, hello: Mapping[str, Any]) -> bool:
        """Whether it is a new channel; else the one of that name goes on over this connection."""
        # How many messages the other end had, where it says so.
        channel = task.channel
        known = self._by_name.get(name)
        received = hello.get("received", NEVER_ADMITTED)
        if not isinstance(received, int):
            raise BadMessageError(
                f"the first message says that {received!r} messages were received"
            )

        def accept(received: int) -> None:
            if not channel.connection.shares_memory:
                fingerprint = channel.connection.fingerprint()
                nonce = str(hello.get("nonce"))
                mine = proof(self._secret, "server", fingerprint, nonce)
                body = pack_json({"received": received, "proof": mine})
                channel.send(Message(MessageKind.ACCEPTED, body=body))

        # A new name is a new conversation, unless the other end remembers an old one.
        if known is None:
            if received != NEVER_ADMITTED:
                raise BadMessageError("this process has never had the connection that broke")
            accept(0)
            channel.authenticated()
            self._by_name[name] = task
            return True

        # The socket of this task is the other one's from now on.
        known.channel.resume(channel, max(received, 0), accept)
        self._tasks.discard(task)
        self._poll(known)
        self._condition.is_notified = True
        return False
