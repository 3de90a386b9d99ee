"""How every process of a run begins: torch's idle threads, and numbers too small to matter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

SPINS = "10000"
"""Long enough for the pauses inside a step, short enough to leave the core to the embedding kernels
between steps: looking up a batch of 106,496 ids among 2 M rows took two threads 1.0 ms instead of
1.9. Source: measured, libgomp of torch 2.13, two cores, November 2026; whole steps differed by less
than their noise. libgomp's own default is 300,000."""


COUNTS_OF_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""In the environment: how many processes somebody has started. Without any of them this process is
no rank among others."""
_PR_SET_PDEATHSIG = 1


def enter_process() -> None:
    """Begin as every process of a run does: commands, servers, workers, loaders, points of a sweep.

    Denormals count as zero in this thread and in all that it starts from now on, so call this
    first of all: before torch is imported, and before any parallel call. (Adam's first moment of a
    weight without gradient is a denormal from step 742 on and stays one, and a step of Adam then
    takes up to twice as long.) Idle threads of torch sleep, and the C++ stacks of its warnings, of
    which a rank prints one when its launcher dies, stay out of our sentences; what the user has set
    in the environment stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    # A command that needs the kernels says itself that they were not built.
    with contextlib.suppress(ImportError):
        from runtime.embedding.native.extension import native  # late: it may not be there

        native.flush_denormals(True)


class _Fork(ForkServerProcess):
    """A process that does not run the main module again, as Python's own does: that may be a
    script which asks for a sweep without `if __name__ == "__main__"`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a module without a file
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _Forks(ForkServerContext):
    Process = _Fork


def fork_server(modules: Sequence[str] | None = None) -> ForkServerContext:
    """Start a process that imports these modules once, and of which others are cheap forks; gives
    what starts them. What they do must lie in a module, not in the script that was started.

    A Ctrl-C at the whole group is not for it, also while it imports: SIGINT is blocked in it and,
    until `unblock_interrupts`, in what it forks. It ends with the last process that knows it.
    """
    context = _Forks()
    if modules is not None:
        context.set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # first: it would unblock what is blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def unblock_interrupts() -> None:
    """Hear Ctrl-C in a fork of such a server."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def die_with_parent(number: int) -> None:
    """Have this process sent a signal when the thread that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def flushing_denormals() -> Iterator[None]:
    """What `enter_process` does about denormals, for a while: in a process of somebody else's."""
    from runtime.embedding.native.extension import native  # late, as above

    before = native.flushes_denormals()
    native.flush_denormals(True)
    try:
        yield
    finally:
        native.flush_denormals(before)
