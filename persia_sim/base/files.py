"""Files that are written whole or not at all, read only where they are plain; JSON and TOML read
with care; `schema` says what their values may be. And the three streams of every process."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import threading
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from io import BufferedReader, BufferedWriter, BytesIO, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from zipfile import ZipFile

from persia_sim.base.rules import require

TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
MORE_FILES = "let more files be open at once: ulimit -n 4096"
"""What to do about these."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the body ends, and only if it ends well.

    A reader never sees a part; after an error, and after a crash of the machine, the old content
    is still there. The folder must exist. The file gets the mode that any new file gets. What a
    killed process has left of it goes. Raises OSError, also where a device, a pipe, a socket or a
    folder stands, or a link to one.
    """
    if (odd := _odd(path, follow=True)) is not None:
        raise OSError(errno.EEXIST, f"it is {odd}, whose place no file takes", str(path))
    remove_abandoned(path.parent, path.name)
    fresh = path.parent / _fresh_name(path.name)
    try:
        with fresh.open("xb") as file, held(fresh):
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        # A full disk names no file; an error of a store has no number, and a text of its own.
        of_system = error if isinstance(error, OSError) and error.errno is not None else None
        if of_system is not None and of_system.filename in (None, str(fresh)):
            of_system.filename = str(path)
        raise


@contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """A new folder beside ``path``, which the body may rename to that; else it goes at the end, or,
    after a kill, when the next one is made."""
    remove_abandoned(path.parent, f".{path.name}")
    fresh = path.parent / _fresh_name(f".{path.name}")
    fresh.mkdir()
    try:
        with held(fresh):
            yield fresh
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk names no file
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _fresh_name(name: str) -> str:
    return f"{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


_HELD_WITHIN_S = 60.0
"""Seconds within which whoever has made a file or folder holds it."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """What is being written, so that `remove_abandoned` leaves it alone, in whatever process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # where the file system knows no locks, nothing is removed
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove what processes that were killed have left of a file or folder of this name (None: of
    any), half written."""
    of_it = r".*" if name is None else re.escape(name)
    pattern = re.compile(rf"{of_it}\.\d+\.[0-9a-f]{{8}}\.tmp", re.DOTALL)
    with suppress(OSError):
        for entry in [one for one in os.scandir(folder) if pattern.fullmatch(one.name)]:
            with suppress(OSError):  # it is held, or gone
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _HELD_WITHIN_S:
                    _remove_unless_held(Path(entry))


def _remove_unless_held(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        os.close(handle)


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """What a ``st_mode`` that is no regular file's stands for, in words."""
    return next((words for test, words in _KINDS if test(mode)), "no file of a known kind")


def _odd(path: Path, *, follow: bool) -> str | None:
    """What stands there, in words, if that is no regular file."""
    try:
        mode = path.stat(follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISREG(mode) else kind_of(mode)


def refuse_loss(name: str, out: Path, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Raise ValueError where an output would take the place of anything but an earlier one of its
    kind: of an input, of what is no regular file.

    ``name``: of the option; ``kind``: in words, of which ``is_kind`` finds out whether a regular
    file is. Nothing is lost with an empty file. Every command calls this before its work.
    """
    odd = _odd(out, follow=False)
    remedy = "name a file in it" if odd == "a folder" else "name another"
    require(odd is None, name, out, f"it is {odd}", remedy)
    if out.exists() and out.stat().st_size:
        require(is_kind(out), name, out, f"it is a file, and no {kind}: it would be lost", remedy)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; a pipe is not waited for, nor a device read for ever.

    Raises OSError, also where it is no regular file; then `strerror` says what it is.
    """
    handle = _opened(path, os.O_RDONLY)
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file; raises as `open_regular`, and ValueError, before it is read,
    for a file that has more bytes than what it is to be."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"{path} has {size:,} bytes: it has at most {most_bytes:,}")
        return file.read()


def lock_file(path: Path) -> int:
    """A descriptor of the file, made where there is none, to hold a lock on; nothing in it changes.

    Raises OSError, also where a link or anything else but a regular file stands there.
    """
    return _opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def _opened(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EISDIR, errno.ELOOP):
            raise
        mode = os.lstat(path).st_mode
    else:
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode):
            return handle
        os.close(handle)
    raise OSError(errno.EINVAL, f"it is not a regular file but {kind_of(mode)}", str(path))


MOST_UNPACKED_BYTES = 1 << 28
"""Reading takes several times as much. An honest file is less than 100 times smaller packed."""
_MOST_PACKED = 100
"""Times that numbers which a run has written are larger unpacked; zeros are a thousand times."""


def refuse_bomb(path: Path, archive: ZipFile, size_bytes: int) -> None:
    """Raise ValueError for a zip archive that unpacks to gigabytes though it is small; ``path`` is
    its name, ``size_bytes`` are its own."""
    unpacked = sum(entry.file_size for entry in archive.infolist())
    times = unpacked / size_bytes
    if unpacked > MOST_UNPACKED_BYTES and times > _MOST_PACKED:
        raise ValueError(
            f"{path} unpacks to {unpacked:,} bytes, {times:.0f} times its own: no run writes such a"
            " file, so it is not unpacked; name another"
        )


MOST_DOCUMENT_BYTES = 64 * 2**20


def read_document(path: Path) -> Any:
    """The content of a file: TOML when it is called so, else JSON, packed by gzip or not.

    Raises ValueError naming the file when it is no plain file of at most 64 MiB, packed and
    unpacked, no UTF-8, not well-formed, or when it gives a key twice or a number that is not
    finite; OSError when it cannot be read.
    """
    try:
        content = read_regular(path, MOST_DOCUMENT_BYTES)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is not a plain file; name a .json or .toml file") from None
    if content.startswith(GZIP):
        content = _unpacked(content, path)
    return parsed(content, path, toml=path.suffix == ".toml")


GZIP = b"\x1f\x8b"
"""What gzip begins with; no text does."""


def _unpacked(content: bytes, path: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=BytesIO(content)) as packed:
            text = packed.read(MOST_DOCUMENT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if len(text) > MOST_DOCUMENT_BYTES:
        raise ValueError(f"{path} unpacks to more than {MOST_DOCUMENT_BYTES:,} bytes")
    return text


def parsed(content: bytes, where: object, *, toml: bool = False) -> Any:
    """What the bytes of a document say; raises ValueError naming ``where``, as `read_document`."""
    try:
        text = content.decode("utf-8-sig")
        if toml:
            return tomllib.loads(text)
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not text in UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a document of ours") from None
    except ValueError as error:
        kind = "TOML" if toml else "JSON"
        raise ValueError(f"{where} is not well-formed {kind}: {error}") from None


def toml_value(value: object) -> str:
    """A value as TOML writes it, tables in one line; a date without quotes.

    >>> print(toml_value({"test_fraction": 0.1, "by": ["user"], "from": date(2026, 3, 9)}))
    { test_fraction = 0.1, by = ["user"], from = 2026-03-09 }
    """
    if isinstance(value, Mapping):
        items = (f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, date):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML refuses it bare


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_document(document: Mapping[str, Any]) -> str:
    """A document as TOML; a list of tables stands as such, behind the values.

    >>> print(toml_document({"name": "a", "tables": [{"rows": 3.0}], "mlp": [8, 1]}))
    name = "a"
    mlp = [8, 1]
    <BLANKLINE>
    [[tables]]
    rows = 3.0
    """
    lists = {
        key: value
        for key, value in document.items()
        if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping)
    }
    lines = [f"{key} = {toml_value(value)}" for key, value in document.items() if key not in lists]
    for key, tables in lists.items():
        for table in tables:
            lines += ["", f"[[{key}]]"]
            lines += [f"{name} = {toml_value(value)}" for name, value in table.items()]
    return "\n".join(lines)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{key!r} stands there twice")
        table[key] = value
    return table


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")


NO_FOLDER = "the current folder has been removed: change to one that is there"
"""What is wrong where no relative path leads anywhere."""
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""The standard streams by number of descriptor."""


def usual_streams() -> None:
    """Have a process begin as programs expect it, however it was started: a stream that is closed
    is one of the null device, whose number no other file gets then, also in its children; what an
    encoding has no letter for is shown as a question mark; and a reader that goes away before the
    end, as `| head` does, takes nothing with it but the rest of the output."""
    while (number := os.open(os.devnull, os.O_RDWR)) < len(_STREAMS):
        os.set_inheritable(number, True)
    os.close(number)
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper) and not _is_regular(stream):
            setattr(sys, name, _for_any_reader(stream))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while modules are imported, and raise it behind them.

    Compiled modules of numpy, and the locks of Python's imports, swallow what is raised at some
    instants: an interrupt was lost, and a run of hours went on.
    """
    # Whoever hears signals in another way, or is no main thread, is left alone.
    by_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not by_default or threading.current_thread() is not threading.main_thread():
        yield
        return

    # Note an interrupt, and raise it when the modules are there.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt


def _is_regular(stream: TextIOWrapper) -> bool:
    """Whether a stream ends in a regular file, or in memory: nobody reads it meanwhile."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:  # no descriptor, as where a test captures it
        return True


class _ForAnyReader(FileIO):
    """Output of which each byte is taken, also when nobody reads any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return memoryview(data).nbytes


def _for_any_reader(stream: TextIOWrapper) -> TextIOWrapper:
    """A stream that says nothing of a reader that has gone."""
    stream.flush()
    raw = _ForAnyReader(stream.fileno(), "wb", closefd=False)
    return TextIOWrapper(
        BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def flush_output() -> None:
    """What was printed leaves; what its reader or its disk does not take is for nobody."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
