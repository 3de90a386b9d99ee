"""Sent = applied + counted as lost, per server (law 13), read from what a run left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.drilling.counting import samples_applied
from persia_sim.words.vocabulary import Mode
from runtime.embedding.reference.plan import shard_of
from runtime.run.folder import read_summary


@dataclass(frozen=True, slots=True)
class Account:
    """Pushes of a finished run, over all its servers."""

    sent: int
    applied: int
    lost: int
    """Counted as lost by the run itself."""
    silent: int
    """Sum over the servers of what is neither applied nor counted, or applied twice."""


def settle(run_folder: Path, *, mode: str, ranks: int, servers: int) -> Account:
    """The account of a finished run of the counting world.

    Raises ValueError where a push was applied in part, or at one row of a server and not at another.
    """
    from runtime.inference import rows_of

    from runtime.checkpoint.whole import newest  # late: loads the compiled kernels

    summary = read_summary(run_folder)
    if summary is None:
        raise ValueError(f"{run_folder} holds no finished run")
    ids, values = rows_of(newest(run_folder))["rows"]
    samples = samples_applied(values)
    barrier = Mode(mode).has_barrier
    sent = summary["updates"] * (ranks if barrier else 1)
    lost = summary["pushes_lost_at"]
    applied = []
    owners = shard_of(ids, servers)
    for server in range(servers):
        found = np.unique(samples[owners == server])
        if len(found) != 1:
            raise ValueError(
                f"rows of server {server} had {found.tolist()} samples: a push was applied in part"
            )
        applied.append(int(found[0]) // (1 if barrier else ranks))
    silent = sum(abs(sent - a - n) for a, n in zip(applied, lost, strict=True))
    return Account(sent * servers, sum(applied), sum(lost), silent)
