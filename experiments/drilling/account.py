"""What a run has done with its pushes: sent = applied + counted as lost (law 13)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """Pushes of a finished run, over all its servers."""

    sent: int
    applied: int
    lost: int
    """Counted as lost by the run itself."""
    silent: int
    """Sum over the servers of what is neither applied nor counted, or applied twice."""
