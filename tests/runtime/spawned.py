"""Ranks as processes for tests: forked from a server that has loaded torch, for that takes long."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

FORK = get_context("forkserver")
FORK.set_forkserver_preload(["runtime.run.record", "runtime.run.ranks"])

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
