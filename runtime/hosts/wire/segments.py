"""Memory in which arrays lie: shared by the processes of one host, or a side's own.

Shared segments are files without a name, so that nothing is left behind. Each is a memfd whose
pages are there before anybody writes (a write to a page that cannot be had would kill the process
with SIGBUS) and whose size is sealed (so that nobody can take the pages away under the other side's
hands). Its descriptor is handed over a socket; /dev/shm is not used. Of a peer on another host each
side has a segment of its own, of the same number and size.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.files import TOO_MANY_OPEN
from runtime.embedding.native.memory import allowed_bytes
from runtime.hosts.wire.messages import BadMessageError, pack_json, unpack_json
from runtime.stop import Stop, Turns

ALIGNED_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in Python's fcntl before 3.13
_LEAST_BYTES = 1 << 16
MOST_ARRAYS = 4096
MOST_INDEX_BYTES = 1 << 22
_KINDS = "buif"

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """A piece of memory that two processes see, or (descriptor -1) this one alone."""

    def __init__(self, descriptor: int, size: int, *, written: bool = True) -> None:
        try:
            self._bytes = _mapped(descriptor, size, written=written)
        except OSError as error:
            raise _refused(size, error) from None
        self.size = size
        self.descriptor = descriptor

    @classmethod
    def make(cls, size: int, *, shown: bool = False) -> Segment:
        """A fresh one; if it is only ``shown``, nobody else can write into it (from Linux 5.1 on).

        Raises MemoryError, in a sentence, where there is no room.
        """
        # Reserve the memory now: a page that is missing later would kill the process.
        _check_room(size)
        descriptor = os.memfd_create("embedding-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            made = cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise _refused(size, error) from None
        except BaseException:
            os.close(descriptor)
            raise

        # Sealed: its size stays, and one that is only shown can be written by us alone.
        if shown:
            with suppress(OSError):  # an older kernel
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return made

    @classmethod
    def attach(cls, descriptor: int) -> Segment:
        """One that the other side has made; takes the descriptor, and closes it if it is wrong.

        Raises BadMessageError when somebody could make it smaller.
        """
        try:
            try:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError:
                raise BadMessageError("a segment's descriptor is no memory file") from None
            if seals & _SEALS != _SEALS:
                raise BadMessageError("a segment is not sealed: its pages could be taken away")
            size = os.fstat(descriptor).st_size
            return cls(descriptor, size, written=not seals & _SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def private(cls, size: int) -> Segment:
        """This side's own, as large as one of a peer on another host. Raises MemoryError."""
        _check_room(size)
        return cls(-1, size)

    def view(self) -> memoryview:
        """Its bytes."""
        return self._bytes

    def array(self, at: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The memory from byte ``at`` on as an array; it keeps the mapping alive."""
        return np.frombuffer(self._bytes, dtype, math.prod(shape), at).reshape(shape)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last array of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()


def _mapped(descriptor: int, size: int, *, written: bool) -> memoryview:
    """The memory of a descriptor, or a process' own; it goes with the last view of it.

    Python's mmap keeps a copy of the descriptor for as long (up to 3.12): a server of 64 ranks with
    ten lookups in flight each would reach the usual limit of 1,024 open files by that alone.
    """
    if descriptor < 0:
        return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE))
    access = mmap.PROT_READ | (mmap.PROT_WRITE if written else 0)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _LIBC.mmap(None, size, access, flags, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False  # views may outlive it
    view = memoryview(memory).cast("B")
    return view if written else view.toreadonly()


class Places:
    """Lays arrays out one after the other."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> int:
        """Where the next array of ``size`` bytes starts."""
        at = self.size
        self.size += -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        return at


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], Segment]:
    """The arrays in a fresh segment, which others can only read, and where they lie in it: for what
    is asked for rarely."""
    places = Places()
    index: dict[str, tuple[int, list[int], str]] = {}
    for name, array in arrays.items():
        index[name] = places.take(array.nbytes), list(array.shape), array.dtype.str
    # With hundreds of tables the index is longer than a message: it lies behind the arrays.
    text = np.frombuffer(pack_json(index), np.uint8)
    index_at = places.take(len(text))
    segment = Segment.make(places.size, shown=True)
    segment.array(index_at, text.shape, np.uint8)[:] = text
    for name, array in arrays.items():
        at, shape, dtype = index[name]
        segment.array(at, tuple(shape), dtype)[...] = array
    return {"index": [index_at, len(text)]}, segment


def unpack_arrays(document: Mapping[str, Any], segment: Segment) -> dict[str, np.ndarray]:
    """Copies of the arrays in a segment, which is let go. Raises BadMessageError."""
    try:
        index_at, length = map(int, document["index"])
    except (KeyError, TypeError, ValueError):
        raise BadMessageError("arrays come without a word about them") from None
    try:
        if not 0 <= length <= MOST_INDEX_BYTES:
            raise BadMessageError(f"arrays with an index of {length} bytes")
        index = unpack_json(_array(segment, index_at, [length], "|u1").tobytes())
        if len(index) > MOST_ARRAYS:
            raise BadMessageError(f"{len(index)} arrays, more than the {MOST_ARRAYS} allowed")
        return {str(name): _array(segment, *entry).copy() for name, entry in index.items()}
    finally:
        segment.close()


def _array(segment: Segment, at: int, shape: list[int], dtype: str) -> np.ndarray:
    element = np.dtype(dtype)
    sizes = [int(n) for n in shape]
    ends = at + math.prod(sizes) * element.itemsize
    if element.kind not in _KINDS or min([at, *sizes]) < 0 or ends > segment.size:
        raise BadMessageError(f"an array {shape} of {dtype} at {at} is not inside its segment")
    return segment.array(at, tuple(sizes), element)


class SegmentPool:
    """The segments of one rank: a batch has one from its lookup to the end of its push."""

    def __init__(self, most: int, stop: Stop, who: str) -> None:
        self._most = most
        self._stop = stop
        self._who = who
        self._free: list[tuple[int, Segment]] = []
        self._made = 0
        self._changed = Turns()
        stop.on_stop(self._changed.wake)

    def take(self, size: int) -> tuple[int, Segment]:
        """A segment of at least ``size`` bytes, and its number; waits while all are in use."""
        with self._changed:
            # At most so many: batches that are not pushed hold theirs, which bounds memory.
            self._changed.wait_until(
                lambda: bool(self._free) or self._made < self._most,
                self._stop,
                lambda: (
                    f"{self._who} waits for one of its {self._most} segments of shared memory,"
                    " all of them in batches that are not pushed everywhere"
                ),
            )

            # One that is large enough, or a larger one in the place of a small one.
            fitting = [k for k, (_, segment) in enumerate(self._free) if segment.size >= size]
            if fitting:
                return self._free.pop(fitting[-1])  # the last one back is still in the cache
            if self._free:  # its number is used again, so that servers let go of it, too
                number, small = self._free.pop(0)
                small.close()
            else:
                number = self._made
                self._made += 1

        # Whole pages.
        spare = size + size // 8  # so that the next batches fit, too
        return number, Segment.make(max(_LEAST_BYTES, -(-spare // 4096) * 4096))

    def give_back(self, number: int, segment: Segment) -> None:
        """No server reads or writes it any more."""
        with self._changed:
            self._free.append((number, segment))
            self._changed.notify_all()

    def begin_run(self, stop: Stop) -> None:
        """Waits end with this run from now on."""
        self._stop = stop
        stop.on_stop(self._changed.wake)

    def close(self) -> None:
        """Let go of the free ones."""
        with self._changed:
            for _, segment in self._free:
                segment.close()
            self._free.clear()


def room_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: what is free, within its limits."""
    pages = int((root / "proc/self/statm").read_text().split()[1])
    free = allowed_bytes() - pages * os.sysconf("SC_PAGE_SIZE")
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = min(free, int(value.split()[0]) * 1024)
    return max(0, free)


def _check_room(size: int) -> None:
    if size > (room := room_bytes()):
        raise MemoryError(_no_room(size, f"{room / 1e6:,.0f} MB are free"))


def _refused(size: int, error: OSError) -> OSError | MemoryError:
    """Why the system gave no segment: room is not the only thing that may lack."""
    if error.errno in TOO_MANY_OPEN:
        return error
    return MemoryError(_no_room(size, error.strerror or str(error)))


def _no_room(size: int, why: str) -> str:
    return (
        f"no room for a segment of {size / 1e6:,.1f} MB of shared memory ({why}); lower --batch,"
        " --tau or --queue-batches, or run with --servers 0"
    )
