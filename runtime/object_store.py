"""Folders in a store that fsspec knows (s3, gs, hdfs, memory, file and others), by their URL.

Whole files go up and come down through the disk, so memory stays bounded, and each call is tried
again after growing pauses. One that gets no answer is waited for within bounds, in a thread of its
own. What comes down is held against its digest. Nothing is locked, as most stores know no locks:
what counts there is decided by one document that is written last.

A run whose folder is a URL has a working folder on this host; `store_behind` is the one way from a
path below it to the store. Which store that is, only a working folder in this user's own cache may
say: anybody's run folder would else name what is asked, sent and removed. Paths that have no store
behind them are not touched here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from persia_sim.base.files import atomic_write, read_document
from runtime.files import BrokenFileError, check_file, digest_of
from runtime.stop import StoreError, pause_before

T = TypeVar("T")
CACHE = "XDG_CACHE_HOME"
URL_FILE = "store_url.json"
"""In a working folder: which folder of a store is behind it."""
TRIES = 6
"""Tries of each call, 31 s in all beside what the calls take."""
REQUEST_S = "PERSIA_TESTBED_STORE_TIMEOUT"
"""How long a request may go without an answer: in the environment, for all processes of a run."""
USUAL_REQUEST_S = 60.0
REQUESTS_IN_ALL = 5
"""A call is given up after so many times the bound of a request without a sign of the store."""
REPORTED_AFTER_S = 10.0
"""A store that has not answered for so long is named on the screen while it is waited for."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,3}(?=[^/])")
_NUMBER = re.compile(r"([0-9]+)")
_DEPTH = 5
"""From a file of rows up to the folder of its run."""


def request_limit_s() -> float:
    """Seconds that a request to a store may go without an answer (``train --store-timeout``)."""
    return float(os.environ.get(REQUEST_S, USUAL_REQUEST_S))


_given_up = ""
"""Why this process asks no store any more; empty while it does."""


def give_up_stores(why: str) -> None:
    """From now on nothing is asked of a store, nor waited for, in this process."""
    global _given_up
    _given_up = why


def user_cache() -> Path:
    """Where this user's downloads and working folders lie (the XDG rules for a cache)."""
    named = os.environ.get(CACHE)
    return (Path(named) if named else Path.home() / ".cache") / "persia-testbed"


def url_of(path: str | Path) -> str | None:
    """The URL that this is, also where a Path has made one slash of two; None of a local path.

    >>> url_of("s3://bucket/runs/a"), url_of(Path("s3://bucket/runs/a"))
    ('s3://bucket/runs/a', 's3://bucket/runs/a')
    >>> url_of(Path("file:///tmp/a")), url_of("runs/a"), url_of("C:/runs")
    ('file:///tmp/a', None, None)
    """
    match = _URL.match(str(path))
    if match is None:
        return None
    slashes = ":///" if match[1] == "file" else "://"
    return match[1] + slashes + str(path)[match.end() :].rstrip("/")


class Store:
    """One folder in a store. Raises OSError in a sentence for what fails again and again."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a store of which nothing is installed here."""
        self.url = url.rstrip("/")
        self._system, self._root = _opened(self.url)

    def __truediv__(self, name: str) -> Store:
        return Store(f"{self.url}/{name}")

    def put(self, file: Path, name: str) -> None:
        """Send a local file; who reads there sees it whole or, in an object store, not at all."""
        at = self._at(name)
        failure = f"{self.url}/{name} cannot be written"
        try:
            self._again(failure, lambda seen: self._system.put_file(str(file), at, callback=seen))
        except FileNotFoundError as error:
            raise OSError(f"{failure}: there is no such place") from error

    def get(self, name: str, file: Path, digest: str | None = None) -> None:
        """Bring a file here, whole or not at all; ``digest`` is what it must be. Raises
        `BrokenFileError` naming the one in the store."""
        what = f"{self.url}/{name}"
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_write(file) as out:
                # It comes under another name, and has its own when it is what it must be.
                fetched = Path(out.name)
                at = self._at(name)
                read = f"{what} cannot be read"
                self._again(
                    read, lambda seen: self._system.get_file(at, str(fetched), callback=seen)
                )
                read_digest = digest_of(fetched)
                if digest not in (None, read_digest):
                    raise BrokenFileError(
                        f"{what} is damaged, or not the file that the checkpoint names: its digest"
                        f" begins with {read_digest[:12]}, that of the checkpoint with"
                        f" {str(digest)[:12]}"
                    )
        except FileNotFoundError:
            raise BrokenFileError(f"{what} is not there") from None

    def create(self, name: str, content: bytes) -> None:
        """Make a small file where there is none, in one step where the store can. It is tried once:
        what is raised where there is one, or where the store cannot, is of the store's own kind."""
        at = self._at(name)

        def make(_: Any) -> None:
            if self.url.startswith("file:"):  # other stores have no folders, or make them
                self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(at, content, mode="create")

        self._answered(make)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, in place of what is there: whole, also where two do so at once."""
        if self._is_of_this_host:  # a folder, where a copy is written piece by piece
            place = Path(self._at(name))

            def replace(_: Any) -> None:
                place.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(place) as file:
                    file.write(content)

            self._again(f"{self.url}/{name} cannot be written", replace)
            return
        with tempfile.NamedTemporaryFile(prefix="persia-testbed-") as file:
            file.write(content)
            file.flush()
            self.put(Path(file.name), name)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """The content of a small file, or its beginning; None where there is none."""
        at = self._at(name)
        what = f"{self.url}/{name} cannot be read"

        def read(_: Any) -> bytes:
            self._system.invalidate_cache()
            return bytes(self._system.cat_file(at, start=0, end=most_bytes))

        try:
            return self._again(what, read)
        except FileNotFoundError:
            return None

    def info(self, name: str) -> dict[str, Any] | None:
        """What the store says of a file, its ``size`` for one; None where there is none."""
        at = self._at(name)
        try:
            return dict(self._again(f"{self.url}/{name} is not shown", lambda _: self._info(at)))
        except FileNotFoundError:
            return None

    def _info(self, at: str) -> Any:
        self._system.invalidate_cache()  # another process may have written
        return self._system.info(at)

    def version(self, name: str) -> str:
        """A word that changes with the file's content. Raises OSError where there is none."""
        at = self._at(name)

        def ask(_: Any) -> str:
            self._system.invalidate_cache()
            return str(self._system.ukey(at))

        try:
            return self._again(f"{self.url}/{name} is not shown", ask)
        except FileNotFoundError:
            raise OSError(f"{self.url}/{name} is not there") from None

    def names(self, below: str = "", depth: int | None = None) -> list[str]:
        """The files below a folder, sorted, at most so many folders deep; none where there is no
        folder."""
        at = self._at(below)

        def find(_: Any) -> list[str]:
            self._system.invalidate_cache()
            return list(self._system.find(at, maxdepth=depth))

        try:
            paths = self._again(f"{self.url}/{below} is not listed", find)
        except FileNotFoundError:
            return []
        return sorted(path[len(self._root) + 1 :] for path in paths)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that it holds, if it is there."""
        at = self._at(name)
        with suppress(FileNotFoundError):
            self._again(
                f"{self.url}/{name} cannot be removed",
                lambda _: self._system.rm(at, recursive=True),
            )

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _again(self, failure: str, call: Callable[[Any], T]) -> T:
        """Call until it succeeds, after growing pauses. Raises FileNotFoundError at once, and
        `StoreError` for a store that does not answer in time or fails again and again."""
        began_s = time.monotonic()
        for tried in count(1):
            try:
                return self._answered(call)
            except FileNotFoundError:
                raise
            except PermissionError as error:
                raise OSError(f"{failure}: {error}") from error
            except StoreError as error:
                raise StoreError(f"{failure}: {error}") from error
            except Exception as error:  # each store has kinds of its own
                if self._is_of_this_host and getattr(error, "errno", None) is not None:
                    raise OSError(f"{failure}: {error}") from error  # the disk's own answer stays
                is_late = time.monotonic() - began_s > REQUESTS_IN_ALL * request_limit_s()
                if tried == TRIES or is_late or _given_up:
                    times = f"tried {tried} times" if tried > 1 else "tried once"
                    why = str(error) or type(error).__name__
                    raise StoreError(f"{failure}, {times}: {why}") from error
            time.sleep(pause_before(tried))
        raise AssertionError

    @property
    def _is_of_this_host(self) -> bool:
        """Whether the URL is a folder of this machine's file system."""
        return self.url.startswith(("file:", "local:"))

    def _answered(self, call: Callable[[Any], T]) -> T:
        """What the call returns or raises; it is left to itself, with a `StoreError`, when the
        store has given no sign for too long, or is given up meanwhile."""
        from fsspec.callbacks import Callback  # late: a run of this host needs none

        if _given_up:
            raise StoreError(_given_up)

        # The call in a thread; whatever part of a file has gone is a sign.
        answers: list[Callable[[], T]] = []
        is_over = threading.Event()
        signs: list[float] = [time.monotonic()]
        seen = Callback(hooks={"seen": lambda *_, **__: signs.append(time.monotonic())})

        def work() -> None:
            try:
                result = call(seen)
                answers.append(lambda: result)
            except BaseException as error:
                answers.append(partial(_raise, error))
            is_over.set()

        threading.Thread(target=work, name="store", daemon=True).start()

        # Wait for it, and say so.
        most_s = REQUESTS_IN_ALL * request_limit_s()
        is_reported = False
        while not is_over.wait(min(0.1, most_s)):
            silent_s = time.monotonic() - signs[-1]
            if _given_up:
                raise StoreError(_given_up)
            if silent_s > most_s:
                raise StoreError(
                    f"no answer within {most_s:g} s; look at the store and the network, or allow"
                    " more with --store-timeout"
                )
            if silent_s > REPORTED_AFTER_S and not is_reported:
                is_reported = True
                print(
                    f"warning: {self.url} has not answered for {silent_s:.0f} s; it is waited for,"
                    f" {request_limit_s():g} s a request and {most_s:g} s in all (--store-timeout)",
                    file=sys.stderr,
                    flush=True,
                )
        return answers[0]()


def _raise(error: BaseException) -> NoReturn:
    raise error


@cache
def _opened(url: str) -> tuple[Any, str]:
    """fsspec's file system, and the path in it."""
    try:
        from fsspec.core import url_to_fs  # late: a run of this host needs none
    except ModuleNotFoundError:
        raise ValueError(f"{url} needs fsspec: pip install 'persia-testbed[stores]'") from None
    more: dict[str, Any] = {"auto_mkdir": True} if url.startswith("file:") else {}
    is_s3 = url.startswith(("s3:", "s3a:"))
    if is_s3:  # which has no bound in all, and tries of its own within each of ours
        limit_s = request_limit_s()
        more = {"connect_timeout": limit_s, "read_timeout": limit_s, "retries": {"max_attempts": 0}}
        more = {"config_kwargs": more}
    try:
        system, root = url_to_fs(url, **more)
        if is_s3:
            system.retries = 1
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{url}: this kind of store cannot be reached here ({error}); s3 comes with pip install"
            " 'persia-testbed[stores]'"
        ) from None
    return system, str(root).rstrip("/")


# A working folder, and the store behind it.


def store_behind(path: Path) -> Store | None:
    """The folder of a store whose working copy this folder is, or lies in; None: it is all here.

    Raises `BrokenFileError` where a file says so that `working_folder` has not written.
    """
    path = Path(os.path.abspath(path))
    for folder in (path, *path.parents)[:_DEPTH]:
        if os.path.lexists(folder / URL_FILE):
            url = _url_in(folder)
            below = path.relative_to(folder).as_posix()
            return Store(url if below == "." else f"{url}/{below}")
    return None


def _url_in(folder: Path) -> str:
    """The URL of a working folder of this user; raises `BrokenFileError` for any other folder."""
    # Neither by a link into the cache, nor by another URL than the one that the folder is of.
    cache = user_cache().absolute()
    is_in_cache = folder.parents[1] in (cache, cache.resolve()) and not folder.is_symlink()
    with suppress(OSError, ValueError):
        document = read_document(folder / URL_FILE) if is_in_cache else None
        url = document.get("url") if isinstance(document, dict) else None
        if isinstance(url, str) and folder.name == _name_of(url):
            return url
    raise BrokenFileError(
        f"{folder / URL_FILE} names a store, which only the working folders in {cache} may do:"
        " nothing is read, sent or removed there; give the URL itself, or remove this file"
    )


def address_of(path: Path) -> str:
    """How any process reaches a folder: the URL of the store behind it, or its path."""
    behind = store_behind(path)
    return str(path) if behind is None else behind.url


def working_folder(url: str, use: str) -> Path:
    """Make the folder of this host that stands for the one at the URL; ``use``: what writes there
    and what only reads have one each."""
    folder = user_cache() / use / _name_of(url)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / URL_FILE) as file:
        file.write(json.dumps({"url": url}).encode())
    return folder


def _name_of(url: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", url)[-60:].strip("-")
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def brought(file: Path, digest: str) -> Path:
    """The file itself; where a store is behind its folder and it is not here yet, it comes from
    there. Raises `BrokenFileError` for one that is damaged there."""
    if ".." in file.parts:
        raise BrokenFileError(f"{file} leaves its folder: no checkpoint names such a file")
    behind = None if file.exists() else store_behind(file.parent)
    if behind is not None:
        behind.get(file.name, file, digest)
    return file


def ensure_file(file: Path, digest: str) -> None:
    """Check a file as `check_file` does; it comes from the store behind its folder, if need be."""
    check_file(brought(file, digest), digest)


@contextmanager
def named_as(name: str, copy: Path) -> Iterator[None]:
    """What is wrong with a copy is told by the name that the user knows."""
    try:
        yield
    except ValueError as error:
        texts = [str(one).replace(str(copy), name) for one in error.args]
        error.args = tuple(texts)
        raise


@contextmanager
def opened_file(folder: str, name: str, digest: str | None = None) -> Iterator[Path]:
    """A file of a folder, which may be a URL: then a copy that is there for a while."""
    url = url_of(folder)
    if url is None:
        yield Path(folder) / name
        return
    with tempfile.TemporaryDirectory(prefix="persia-testbed-") as here:
        file = Path(here) / name
        Store(url).get(name, file, digest)
        with named_as(url, Path(here)):
            yield file


@cache
def cached_file(url: str) -> Path:
    """The file at a URL as it was when this process first asked, in the cache of this user, who
    alone may read it. Raises OSError, or `BrokenFileError`."""
    place, _, name = url.rpartition("/")
    store = Store(place)
    kind = (store.info(name) or {"type": "file"}).get("type")
    if kind != "file":
        raise OSError(f"{url} is no file; name a file, or a pattern of files")
    version = hashlib.sha256(f"{url} {store.version(name)}".encode()).hexdigest()[:16]
    file = user_cache() / "files" / version / name
    if not file.is_file():
        store.get(name, file)
        file.chmod(0o600)
    _cached[str(file)] = url
    return file


_cached: dict[str, str] = {}


def by_url(text: str) -> str:
    """A sentence in which files that came by URL, and lie in the cache, are named by that."""
    for file, url in _cached.items():
        text = text.replace(file, url)
    return text


def by_number(name: str) -> tuple[list[str], list[int], str]:
    """A key that sorts files by their names, in which numbers count by their value.

    >>> sorted(["day-10.csv", "day-9.csv", "day-1.csv"], key=by_number)
    ['day-1.csv', 'day-9.csv', 'day-10.csv']
    """
    words = _NUMBER.split(name)
    return words[::2], [int(number) for number in words[1::2]], name


def cached_files(url: str) -> list[Path]:
    """The file at a URL, or those whose names match its pattern (``s3://bucket/day-*.parquet``), in
    the order of `by_number`, as `cached_file` has them. Raises ValueError where none is, or where
    it cannot be had."""
    try:
        if not any(sign in url for sign in "*?["):
            return [cached_file(url)]
        place, _, pattern = url.rpartition("/")
        names = fnmatch.filter(Store(place).names(depth=1), pattern)
        if not names:
            raise OSError(f"no file matches {url}; correct the pattern")
        return [cached_file(f"{place}/{name}") for name in sorted(names, key=by_number)]
    except OSError as error:
        raise ValueError(str(error)) from error
