"""Which process of a run plays which role, read from /proc: whom a drill may kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROLES = {
    "server": "runtime.engines.processes.server_process",
    "loader": "runtime.engines.processes.loader_process",
}
"""Role -> the module that its process runs; the rest are the launcher and its ranks."""


def processes_of(launcher: int) -> dict[str, list[int]]:
    """Role -> process ids, of a run whose first process is ``launcher``.

    A rank is a child of torchrun that trains; without torchrun the launcher trains itself.
    """
    found: dict[str, list[int]] = {"launcher": [launcher]}
    for pid in _descendants(launcher):
        words = _words(pid)
        for role, module in ROLES.items():
            if module in words:
                found.setdefault(role, []).append(pid)
                break
        else:
            if "train" in words and "RANK" in _environment(pid):
                found.setdefault("rank", []).append(pid)
    return {role: sorted(pids) for role, pids in found.items()}


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue  # it has gone meanwhile
            parent = int(text.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    waiting = list(children.get(root, []))
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _environment(pid: int) -> set[str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return set()
    return {line.partition("=")[0] for line in text.split("\0")}
