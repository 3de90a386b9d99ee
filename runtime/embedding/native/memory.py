"""How much memory this process may use: the machine's, or less where a container says so."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


@functools.cache  # a store opens thousands of tables, and a dozen files are read here
def allowed_bytes(root: Path = Path("/")) -> int:
    """The least of the machine's memory, `ulimit -v` and the limits of all control groups.

    ``root`` is where /proc and /sys stand.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)


def _group_limits(root: Path) -> Iterator[int]:
    """Version 1 calls the file memory.limit_in_bytes, version 2 memory.max; a group's parents count
    too. Inside a container the group's own path may not be visible, then its mount point is."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root, "sys/fs/cgroup", path, "memory.max")
            yield from _limits(root, "sys/fs/cgroup/unified", path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits(root, "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _limits(root: Path, mount: str, path: str, name: str) -> Iterator[int]:
    group = PurePosixPath(path.lstrip("/"))
    for part in (group, *group.parents):
        try:
            text = (root / mount / part / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # version 2 says "max" where there is no limit
            yield int(text)
