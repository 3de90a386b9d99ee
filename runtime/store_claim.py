"""One run at a URL at a time: a claim that lies there, is renewed, and expires with its run.

A folder has a lock for that; a store has none. The claim is an object with a word that no other run
has. It is made where none is (in one step where the store can, as S3 and Google's do), and renewed
while the run is under way. One that is not renewed for a while is of a run that was killed or cut
off, and is taken over. So before a run sends what makes a checkpoint count, it looks whether the
claim is its own still. Clocks of hosts are not compared: a claim lives while it changes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from persia_sim.base.files import parsed
from persia_sim.base.rules import printable
from persia_sim.base.schema import Count, parse
from runtime.object_store import Store, give_up_stores
from runtime.stop import StoreError

CLAIM = "claim"
RENEWED_EVERY_S = 10.0
EXPIRES_AFTER_S = 90.0
"""Longer than a request to a store may take (60 s), which could arrive late."""
SETTLES_WITHIN_S = 2.0
"""Who has taken a claim over looks so much later whether somebody else has, too."""
_WHOLE_WITHIN_S = 2.0
_LOOKS_AGAIN_AFTER_S = 0.05
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What lies in the store."""

    token: str
    """16 hex digits, of one process alone."""
    host: str
    boot: str
    """Which start of the host."""
    process: Count
    renewed: Count = 0
    """Times."""

    @property
    def is_dead(self) -> bool:
        """Whether it is of a process of this very host that has ended."""
        if (self.host, self.boot) != (socket.gethostname(), _boot()):
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass
        return False

    def __str__(self) -> str:
        return f"process {self.process} on {printable(self.host)}"


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


_held: dict[str, _Holder] = {}
"""The claims of this process, by their URLs."""


@contextmanager
def claimed_at(store: Store, on_lost: Callable[[str], None]) -> Iterator[bool]:
    """Hold the claim of a run at its URL; gives whether that took a while, in which a run before
    may have written. ``on_lost`` is told who has taken it over, when the run must write no more.

    Raises ValueError where another run holds it.
    """
    holder = _Holder(store, on_lost)
    has_waited = holder.take()
    _held[store.url] = holder
    try:
        yield has_waited
    finally:
        del _held[store.url]
        holder.release()


def check_claim(url: str) -> None:
    """Raise `StoreError` where this process has claimed the URL, and another run has it now."""
    if url in _held:
        _held[url].check()


class _Holder:
    """A claim of this process at one URL, and the thread that renews it."""

    def __init__(self, store: Store, on_lost: Callable[[str], None]) -> None:
        self._store = store
        self._on_lost = on_lost
        self._claim = Claim(
            token=secrets.token_hex(8), host=socket.gethostname(), boot=_boot(), process=os.getpid()
        )
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)

    def take(self) -> bool:
        """Make the claim, or take over one that has expired; whether that took a while."""
        there = self._made()
        has_waited = there is not None and not there.is_dead
        if there is not None:
            if has_waited:
                self._wait_until_expired(there)
            self._write()
            time.sleep(SETTLES_WITHIN_S)
        self.check()
        self._thread.start()
        return has_waited

    def _made(self) -> Claim | None:
        """The claim of somebody else that is there; None: it is ours now."""
        there = self._read()
        if there is None:
            with suppress(Exception):  # each store says in its own way that there is one, or that
                self._store.create(CLAIM, self._content())  # it cannot do that
            there = self._read()
        if there is None:
            self._write()
            time.sleep(SETTLES_WITHIN_S)
            there = self._read()
        return None if there is not None and there.token == self._claim.token else there

    def _wait_until_expired(self, seen: Claim) -> None:
        """Raise ValueError as soon as the claim changes: its run is alive."""
        print(
            f"{self._store.url} is claimed by {seen}; it is taken over if that gives no sign of"
            f" life within {EXPIRES_AFTER_S:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        ends_s = time.monotonic() + EXPIRES_AFTER_S
        while time.monotonic() < ends_s:
            time.sleep(min(1.0, RENEWED_EVERY_S / 4))
            there = self._read()
            if there is None:  # it has just ended
                return
            if there != seen:
                raise ValueError(_refusal(self._store.url, there))

    def check(self) -> None:
        """Raise `StoreError`, and end all that this process writes to stores, where another run
        has the claim."""
        there = self._read()
        if there is not None and there.token == self._claim.token:
            return
        if not self._thread.is_alive():
            raise ValueError(_refusal(self._store.url, there))
        who = "somebody has removed its claim" if there is None else f"{there} has taken it over"
        why = f"{self._store.url} is no longer this run's: {who}"
        give_up_stores(why)
        self._on_lost(why)
        raise StoreError(why)

    def release(self) -> None:
        """Remove the claim, if it is this run's still."""
        self._is_closing.set()
        self._thread.join()
        with suppress(OSError, ValueError):
            there = self._read()
            if there is not None and there.token == self._claim.token:
                self._store.remove(CLAIM)

    def _renew(self) -> None:
        while not self._is_closing.wait(RENEWED_EVERY_S):
            try:
                self.check()
                self._claim = replace(self._claim, renewed=self._claim.renewed + 1)
                self._write()
            except StoreError:
                continue  # it does not answer now; or the claim is lost, and the run is told
            except OSError as error:
                print(f"warning: the claim is not renewed: {error}", file=sys.stderr, flush=True)

    def _read(self) -> Claim | None:
        """Raises ValueError for what is no claim, and stays so: in a store of files it can be seen
        while somebody writes it."""
        where = f"{self._store.url}/{CLAIM}"
        ends_s = time.monotonic() + _WHOLE_WITHIN_S
        while True:
            content = self._store.read(CLAIM, _MOST_BYTES)
            if content is None:
                return None
            try:
                return parse(Claim, parsed(content, where), where)
            except ValueError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(_LOOKS_AGAIN_AFTER_S)

    def _write(self) -> None:
        self._store.write(CLAIM, self._content())

    def _content(self) -> bytes:
        return json.dumps(asdict(self._claim)).encode()


def _refusal(url: str, by: Claim | None) -> str:
    who = f" ({by})" if by is not None else ""
    return f"another run{who} is filling {url}; wait for it or name another place with --out"
