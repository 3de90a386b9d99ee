"""How a server that has died comes back while the run goes on: empty, then with the rows of its
last checkpoint; what was applied after that is lost, and counted.

Only for modes that read late rows: in exact modes the run goes back to its last checkpoint instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from runtime.embedding.server_rules import ServerRules
from runtime.embedding.shard import STALENESS_BINS

MOST_REVIVALS = 16
"""Of one server in one run: one that dies again and again will not be helped by one more start."""

NOTHING_COUNTED: dict[str, Any] = {
    "version": 0, "updates": 0, "rows_replaced": 0, "lost": 0,
    "row_staleness": [0] * STALENESS_BINS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SavedServer:
    """One server as the last checkpoint has it; without one, as it was when the run began."""

    rules: ServerRules
    first_steps: Sequence[int]
    """Per rank, the steps whose pushes are in these rows."""
    counters: Mapping[str, Any] = field(default_factory=lambda: NOTHING_COUNTED)
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Per table, part by part, what `restore` of the kernels takes."""


@dataclass(frozen=True, slots=True)
class Revival:
    """What a process can do for a server that has died; the launcher of the servers can do all."""

    restart: Callable[[int], None] | None = None
    """Starts the process of a server again, empty; None where somebody else does."""
    saved: Callable[[int], SavedServer] | None = None
    """Its rows and counters; needed by who restarts it."""
    told: Callable[[str], None] = lambda text: None
    """Called with a sentence when a server is back."""


Call = Callable[..., dict[str, Any]]


def fill(saved: SavedServer, call: Call) -> None:
    """Give a server that was started again its rows and its counters; then ranks are let in."""
    for table, parts in saved.tables.items():
        for arrays in parts:
            given = {name: np.asarray(a) for name, a in arrays.items() if name != "latest_step"}
            step = int(arrays["latest_step"])
            call("restore", given, table=table, latest_step=step, keep_present=False)
    call(
        "reloaded",
        rules=asdict(saved.rules),
        counters=dict(saved.counters),
        first_steps=[int(step) for step in saved.first_steps],
    )
