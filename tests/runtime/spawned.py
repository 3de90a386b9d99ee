"""Ranks and commands as processes for tests: forked from a server that has loaded torch, for that
takes long."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.sweeping import PRELOADED
from runtime.__main__ import run

FORK = get_context("forkserver")
FORK.set_forkserver_preload([*PRELOADED, "runtime.hosts.ranks"])

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SLOW = """
import time
from pathlib import Path
from runtime.models.networks import FeedForward

class Net(FeedForward):
    def forward(self, dense, embeddings):
        time.sleep(0.1 * (self.training and not Path("enough").exists()))
        return super().forward(dense, embeddings)
"""
"""A module of the user's: a step of its network takes a tenth of a second, until there is a file
``enough``."""

Body = Callable[[int, int, dist.Store, Path], None]
"""Given rank, ranks, the store of all ranks, and a folder for what it finds."""


class Processes:
    """W processes that run one function, and the store that they share."""

    def __init__(self, ranks: int, body: Body, folder: Path) -> None:
        # Held here: a rank that ends early does not take it along.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.members: list[BaseProcess] = [
            FORK.Process(target=_run, args=(body, rank, ranks, self.store.port, folder))
            for rank in range(ranks)
        ]
        self._folder = folder
        for member in self.members:
            member.start()

    def join(self, timeout_s: float = 240.0) -> list[int | None]:
        """Exit codes, once all have ended; those that have not are killed (None).

        The limit is for what hangs; a busy machine takes long.
        """
        codes, ends_s = [], time.monotonic() + timeout_s
        for member in self.members:
            member.join(max(0.0, ends_s - time.monotonic()))
            codes.append(member.exitcode)
        for member in self.members:
            member.kill()
        return codes

    def join_well(self) -> None:
        """All ended well; else what they died of."""
        codes = self.join()
        told = [file.read_text() for file in sorted(self._folder.glob("*.traceback"))]
        assert codes == [0] * len(codes), "\n".join([str(codes), *told])


def _run(body: Body, rank: int, ranks: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    try:
        body(rank, ranks, store, folder)
    except BaseException:
        (folder / f"{rank}.traceback").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # at once: what a check has left half done needs no tidying


class Command:
    """A process of `persia-runtime` with these words; what it says goes into files."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        main: Callable[[], object] = run,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """``main`` reads the words from sys.argv."""
        self._files = [folder / "command.out", folder / "command.err"]
        self._process = FORK.Process(
            target=_carry_out, args=(main, words, dict(environment), self._files)
        )
        self._process.start()
        self.pid: int = self._process.pid or 0

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def said(self) -> list[str]:
        """So far: on standard output, and on standard error."""
        return [file.read_text() if file.exists() else "" for file in self._files]

    def ended(self, timeout_s: float = 280.0) -> tuple[int | None, str, str]:
        """Exit code and words, once it has ended; None where it was killed for it had not."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        self._process.kill()
        out, err = self.said()
        return code, out, err


def _carry_out(
    main: Callable[[], object], words: list[str], environment: dict[str, str], files: list[Path]
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = ["persia-runtime", *words]
    # Where a shell runs the tests in the background they ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
