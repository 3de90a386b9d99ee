"""Who listens: one loop for all connections of a process, however many there are.

Each connection is a coroutine (`Steps`), which a thread takes a step further when its next bytes
are here or what it waits for holds: so a lookup that waits for its window, and a client that stops
in the middle of a message, hold no thread. One thread accepts, greets, hears signs of life and sees
to time-outs; `WORKERS` others do what may take longer. The thread that hears of a message answers
it, too: nothing is handed over.
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
from typing import Any

from runtime.engines.wire.calls import tell
from runtime.engines.wire.channel import RESUMED_WITHIN_S, Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.coroutines import LoopTurns, Steps, Wait
from runtime.engines.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
)
from runtime.engines.wire.peers import NOT_YET, greeted
from runtime.engines.wire.tls import LOOK_EVERY_S, Certificate, TlsSocket, proof

MOST_STRANGERS = 64
"""Connections that have not said who they are: of more the oldest is closed, so that they take no
descriptors that others need."""
WORKERS = 4
"""Their kernels take turns at the rows; beside one there is time to receive and send for others."""


class Task:
    """One connection and its coroutine."""

    def __init__(self, channel: Channel, poller: select.epoll) -> None:
        self.channel, self.poller = channel, poller
        self.steps: Steps[None]
        self.wait: Wait | None = None
        self.turn, self.watching = threading.Lock(), threading.Lock()
        """Of who takes a step, and of who has the kernel watch its socket."""


class Listener:
    """Lets in whoever knows the secret. One whose connection broke comes again under the name of
    that connection, and goes on where it was."""

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        serve: Callable[[Channel, Message, dict[str, Any]], Steps[None]],
        who: str,
        *,
        tls: bool = False,
        turns: LoopTurns | None = None,
    ) -> None:
        """``serve`` is given a connection, its first message and what that says: a coroutine that
        ends when all is said; ``who`` listens, in words; ``turns``: of its requests. Raises
        ValueError where ``tls`` cannot be had."""
        self._socket, self._secret, self._serve, self._who = sock, secret, serve, who
        self._certificate = Certificate() if tls else None
        self._turns = turns or LoopTurns()
        self._tasks: set[Task] = set()
        self._watched: dict[int, Task] = {}  # by the number of its socket
        self._known: dict[str, Task] = {}
        self._came: deque[Task] = deque()  # the latest, strangers among them
        self._waiting: dict[Task, Wait] = {}
        self._closed = self._ended = False
        sock.setblocking(False)
        self._light, self._work = select.epoll(), select.epoll()
        self._light.register(sock, select.EPOLLIN)

    def serve_all(self) -> None:
        """Until it is closed."""
        door, looked_s = self._socket.fileno(), time.monotonic()
        workers = [threading.Thread(target=self._work_on, daemon=True) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        while not self._closed or self._tasks:
            for number, _ in self._light.poll(LOOK_EVERY_S):
                if number == door:
                    self._accept()
                elif task := self._watched.get(number):
                    self._step(task)
            if time.monotonic() - looked_s > LOOK_EVERY_S:
                looked_s = time.monotonic()
                self._look()
        self._ended = True
        for worker in workers:
            worker.join()

    def close(self) -> None:
        """Nobody else comes in, and every connection ends."""
        self._closed = True
        self._socket.close()

    # The threads.

    def _work_on(self) -> None:
        while not self._ended:
            for number, _ in self._work.poll(LOOK_EVERY_S, 1):
                if task := self._watched.get(number):
                    self._step(task)
            while self._turns.is_news:
                self._turns.is_news = False
                self._go_on()

    def _go_on(self) -> None:
        """With those whose wait has ended."""
        for task, wait in list(self._waiting.items()):
            if wait.holds() and self._claims(task):
                self._step(task, is_claimed=True)

    def _claims(self, task: Task) -> bool:
        return self._waiting.pop(task, None) is not None

    def _look(self) -> None:
        """Who is silent for too long, takes nothing, or waits for what will not be."""
        for task in list(self._tasks):
            wait = task.wait
            try:
                (task.channel if wait is None else wait).goes_on()
                takes_nothing = task.channel.outbox.waits_s() > RESUMED_WITHIN_S
                if self._closed or (takes_nothing and not task.channel.is_heard()):
                    task.channel.hang_up()
                    raise PeerGoneError("closed")
            except BaseException as error:
                if wait is None or self._claims(task):
                    self._step(task, error, is_claimed=wait is not None)
            if task.channel.fileno() < 0:  # it could not be made again: of that no poller tells
                self._step(task)
        self._turns.is_news = True

    def _step(
        self, task: Task, error: BaseException | None = None, *, is_claimed: bool = False
    ) -> None:
        """Go on with a task until it waits; whoever waits for more than bytes must be claimed."""
        if not task.turn.acquire(blocking=is_claimed):
            return  # who has the turn looks afterwards what has come
        wait = None
        try:
            is_free = task.channel.flush() or error is not None
            if task in self._tasks and (is_claimed or (is_free and task.wait is None)):
                task.wait = None
                wait = next(task.steps) if error is None else task.steps.throw(error)
                task.wait = wait
        except BaseException as ended:
            if not isinstance(ended, StopIteration):
                sys.excepthook(type(ended), ended, ended.__traceback__)
            return self._end(task)
        finally:
            task.turn.release()
        if wait is not None:
            self._waiting[task] = wait
            if wait.holds():  # since
                self._turns.is_news = True
        self._watch(task)

    def _watch(self, task: Task) -> None:
        """Who does not take what was sent is not heard before he does."""
        with task.watching:
            number = task.channel.fileno()
            events = select.EPOLLIN if task.wait is None else 0
            events = select.EPOLLOUT if task.channel.outbox else events
            if number < 0 or not events or task not in self._tasks:
                return
            self._watched[number] = task
            try:
                try:
                    task.poller.modify(number, events | select.EPOLLONESHOT)
                except FileNotFoundError:
                    task.poller.register(number, events | select.EPOLLONESHOT)
            except OSError:
                pass  # closed, and perhaps made again: then it is watched again

    def _end(self, task: Task) -> None:
        with task.watching:
            if self._watched.get(number := task.channel.fileno()) is task:
                del self._watched[number]
            if task in self._tasks:  # else its socket is another one's
                self._tasks.remove(task)
                task.channel.close()

    # Who comes in.

    def _accept(self) -> None:
        """Another user of this host is not even heard."""
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
            channel = Channel(made, waits_s=0.0)
        except OSError:  # it has gone before a word
            return sock.close()
        if not channel.wire.is_own_user():
            return channel.close()
        task = Task(channel, self._light)
        task.steps = self._hear(task)
        channel.on_unsent = partial(self._watch, task)
        self._tasks.add(task)
        self._came.append(task)
        if len(self._came) > MOST_STRANGERS:
            oldest = self._came.popleft()
            if oldest in self._tasks and not oldest.channel.is_known:
                self._end(oldest)
        self._step(task)

    def _hear(self, task: Task) -> Steps[None]:
        """Whatever is wrong with a stranger ends its connection, and nothing else."""
        channel, said, name = task.channel, dict[str, Any](), ""
        try:
            message, said = yield from greeted(channel, self._secret)
            given = str(said.get("connection", id(channel)))
            if not self._is_new(task, given, said):
                return
            name = given
            if said.get("role") != "heartbeat":
                task.poller = self._work
            yield from self._serve(channel, message, said)
        except (BadMessageError, MemoryError) as error:
            who = f"{said['ranks']} (pid {said['pid']})" if "ranks" in said else channel.wire.who()
            sentence = f"{self._who}: closed a connection of {who}: {error}"
            print(sentence, file=sys.stderr, flush=True)
            tell(channel, error)
        except OSError:
            pass  # it has gone
        finally:
            self._known.pop(name, None)

    def _is_new(self, task: Task, name: str, said: Mapping[str, Any]) -> bool:
        """If not, the channel of that name goes on over this connection."""
        channel, known = task.channel, self._known.get(name)
        received = said.get("received", NOT_YET)
        if not isinstance(received, int):
            raise BadMessageError(
                f"the first message says that {received!r} messages were received"
            )

        def accept(received: int) -> None:
            if not channel.wire.shares_memory:
                seen = channel.wire.fingerprint()
                shown = proof(self._secret, "server", seen, str(said.get("drawn")))
                body = pack_json({"received": received, "proof": shown})
                channel.send(Message(MessageKind.ACCEPTED, body=body))

        if known is None:
            if received != NOT_YET:
                raise BadMessageError("this process has never had the connection that broke")
            accept(0)
            channel.know()
            self._known[name] = task
            return True
        known.channel.resume(channel, max(received, 0), accept)
        self._tasks.discard(task)  # its socket is the other one's
        self._watch(known)
        self._turns.is_news = True
        return False
