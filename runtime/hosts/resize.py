"""Another number of embedding servers for a run that is under way: `resize`, and who hears of it.

The wish lies in the run's folder as a file. Who supervises the run takes it: the run ends its step,
writes a checkpoint, and goes on from that with so many servers, as a resume does.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from persia_sim.base.command_line import POSITIONAL, read_options
from persia_sim.base.files import atomic_write, read_document
from persia_sim.base.schema import Checked, Within, parse
from runtime.object_store import url_of, working_folder
from runtime.stop import Ending

WISH = "servers_wanted.json"
MOST_SERVERS = 512
TAKEN_WITHIN_S = 30.0
LOOK_EVERY_S = 0.5
_Servers = Annotated[int, Within(1, MOST_SERVERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Checked):
    """Have a run that is under way go on with another number of embedding servers, without a
    restart by hand: it ends its step, writes a checkpoint, and goes on from there."""

    run: Annotated[Path, POSITIONAL]
    """Folder of the run, as runs/mine; of a URL, on the host where the run was started, of torchrun
    where its first rank is."""
    servers: _Servers
    """Embedding servers from then on, 1 to 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What lies in the run's folder."""

    servers: _Servers
    refused: str = ""
    """Why who supervises the run does not do it; empty where nobody has looked yet."""


def resize(arguments: Sequence[str]) -> None:
    """Write the wish down, and wait until it is taken. Raises ValueError where it is not."""
    options = read_options(Resize, arguments, "persia-runtime resize")
    url = url_of(options.run)
    folder = options.run if url is None else working_folder(url, "runs")
    if url is None and not (folder / "config.json").is_file():
        raise ValueError(f"{options.run} is no run that is under way: it holds no config.json")
    if _keeps_its_rows(folder):
        raise ValueError(
            f"{options.run} does not change its servers: its rows are in the process of its ranks;"
            " begin it with --servers"
        )
    wish = folder / WISH
    _write(wish, Wish(servers=options.servers))

    # Whoever takes it removes it, or writes down why not.
    ends_s = time.monotonic() + TAKEN_WITHIN_S
    while wish.exists():
        refused = _read(wish).refused
        late = (
            f"nobody has taken it within {TAKEN_WITHIN_S:.0f} s: the run has ended; go on with"
            " --resume and --servers"
        )
        if refused or time.monotonic() > ends_s:
            wish.unlink(missing_ok=True)
            raise ValueError(f"{options.run} does not change its servers: {refused or late}")
        time.sleep(LOOK_EVERY_S / 5)
    print(f"{options.run} ends its step, and goes on with {options.servers} embedding servers")


def _keeps_its_rows(folder: Path) -> bool:
    """Whether the run has no servers, and nobody in it listens for another number of them."""
    try:
        document = read_document(folder / "config.json")
    except (OSError, ValueError):
        return False
    engine = document.get("engine") if isinstance(document, dict) else None
    return isinstance(engine, dict) and not engine.get("servers", 1)


def _write(file: Path, wish: Wish) -> None:
    with atomic_write(file) as out:
        out.write(json.dumps({"servers": wish.servers, "refused": wish.refused}).encode())


def _read(file: Path) -> Wish:
    """The wish; one that has gone meanwhile is none that was refused."""
    try:
        return parse(Wish, read_document(file), str(file))
    except FileNotFoundError:
        return Wish(servers=1)


def taken(folder: Path, why_not: Callable[[int], str]) -> int | None:
    """The servers that somebody wants a run to have, if anybody does and nothing is against it;
    nobody else takes the wish then. ``why_not`` says what is against a number of them, or ""."""
    file = folder / WISH
    if not file.exists():
        return None
    wish = _read(file)
    if wish.refused:
        return None
    refused = why_not(wish.servers)
    if refused:
        _write(file, Wish(servers=wish.servers, refused=refused))
        return None
    file.unlink(missing_ok=True)
    return wish.servers


_WHY = re.compile(r"resize to (\d+) servers")


def servers_wanted_by(why: str | None) -> int | None:
    """The servers with which a run goes on that has ended by this; None: it ended by another thing.

    >>> servers_wanted_by("resize to 4 servers"), servers_wanted_by("SIGTERM")
    (4, None)
    """
    match = _WHY.fullmatch(why or "")
    return None if match is None else int(match[1])


@dataclass(slots=True)
class WishListener:
    """Hears of another number of servers while a run trains in this process."""

    folder: Path
    servers: int
    """Servers of the run now."""
    ending: Ending
    wanted: int | None = None
    """What was taken, if anything was; the run was asked to end then."""
    asked_s: float = 0.0

    @property
    def why(self) -> str:
        """What the run is told to end by."""
        return f"resize to {self.wanted} servers"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Look for a wish again and again while the body runs; an old one counts no more."""
        (self.folder / WISH).unlink(missing_ok=True)
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over,), daemon=True, name="resize")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, over: threading.Event) -> None:
        while not over.wait(LOOK_EVERY_S):
            with suppress(OSError, ValueError):
                self.wanted = taken(self.folder, self._why_not)
            if self.wanted is not None:
                self.asked_s = time.monotonic()
                return self.ending.ask(self.why)

    def _why_not(self, servers: int) -> str:
        if servers == self.servers:
            return f"it has {servers} already"
        if self.ending:
            return "it is asked to end"
        if self.ending.at_once or self.ending.is_trained:
            return "it is not training at this moment; try again"
        return ""


@dataclass(slots=True)
class Pause:
    """From the instant at which a wish is taken to the first step behind it."""

    asked_s: float | None = None
    """By the clock that all processes of a host have in common; None: there was no wish."""
    before: int = 0
    now: int = 0
    _notes: int = 0

    @classmethod
    def begun_by(cls, text: str) -> Pause:
        """A pause in the words of the process before: since when, from how many servers to how
        many; nothing without any."""
        if not text:
            return cls()
        asked_s, before, now = text.split()
        return cls(float(asked_s), int(before), int(now))

    def note(self) -> None:
        """Samples are told: first those of the checkpoint, then those of the first step."""
        self._notes += 1
        if self._notes > 1:
            self.over()

    def over(self) -> None:
        """The first step is trained: say how long it was, once."""
        if self.asked_s is not None:
            pause_s = time.monotonic() - self.asked_s
            text = f"servers: {self.before} -> {self.now}; the pause was {pause_s:.1f} s"
            print(text, file=sys.stderr, flush=True)
            self.asked_s = None
