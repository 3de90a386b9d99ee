"""Engines beside each other and beside their bounds, in interleaved windows of all candidates:

- wire: every mode over a slow wire beside law 15, with one lookup in flight and with ten;
- transport: rows in server processes beside rows in the process of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from experiments.benching.questions import Transport
from experiments.benching.wide import FIELDS
from experiments.benching.windows import (
    Bench,
    interleave,
)
from experiments.benching.wire import WireBesideLaw
from experiments.options import MOST, Count, OneOf, Some, hold
from experiments.tables import write_csv
from persia_sim.base.schema import Within

DEFAULTS: dict[str, dict[str, Any]] = {
    "wire": {
        "rounds": 2,
        "window_steps": 60,
        "batch": 256,
        "dim": 8,
        "hidden": (256, 128),
        "round_trip_s": (0.03,),
        "lookups_in_flight": (1, 10),
    },
    "transport": {
        "rounds": 8,
        "window_steps": 15,
        "batch": 4096,
        "dim": 16,
        "threads": 2,
        "rows": 1_000_000,
        "ranks": 1,
        "servers": 1,
        "gbit_per_s": None,
    },
}
"""What each question reads, and takes where nothing was typed."""
TYPED = sorted({name for defaults in DEFAULTS.values() for name in defaults})
"""Options that questions read, without those that all benches have."""
LEAST_STEPS = {"transport": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Candidates in turn, round after round; what is not given is each question's own."""

    what: Some[Annotated[str, OneOf(DEFAULTS)]] = ("wire", "transport")
    """wire (5 minutes), transport."""
    rounds: Count | None = None
    """Interleaved rounds of all candidates."""
    window_steps: Annotated[int, Within(3, MOST)] | None = None
    """Steps of a measurement; the first are not timed."""
    batch: Count | None = None
    """Samples of one dense update."""
    rows: Annotated[int, Within(FIELDS, 10**9)] | None = None
    """Distinct ids of the workload."""
    dim: Annotated[int, Within(1, 4096)] | None = None
    """Floats in a row."""
    hidden: Some[Annotated[int, Within(1, 2**20)]] | None = None
    """Widths of the MLP's layers."""
    threads: Annotated[int, Within(1, 1024)] | None = None
    """Threads of one dense operation."""
    ranks: Annotated[int, Within(1, 64)] | None = None
    """Ranks."""
    servers: Annotated[int, Within(1, 64)] | None = None
    """Embedding servers (shards, where they are in the ranks' process)."""
    round_trip_s: Some[Annotated[float, Within(1e-3, 10.0)]] | None = None
    """Seconds that an answer comes later over the wire. Example: 0.01 0.03."""
    lookups_in_flight: Some[Annotated[int, Within(1, 1024)]] | None = None
    """Lookups of a rank that are on the wire at once."""
    gbit_per_s: Annotated[float, Within(0.01, 1000)] | None = None
    """Rate of the link to the server of transport, which is on a second host, a
    network namespace (needs root, iproute2 and util-linux)."""

    def _check(self) -> None:
        for name in self.what:
            hold("window_steps", self.window_steps or MOST, Within(LEAST_STEPS.get(name, 1), MOST))
            batch = self.batch or DEFAULTS[name]["batch"]
            ranks = self.ranks or 1
            if batch < ranks:
                raise ValueError(f"batch {batch} gives {ranks} ranks less than a sample each")
        for name in TYPED:
            readers = [what for what, defaults in DEFAULTS.items() if name in defaults]
            if getattr(self, name) is not None and not {*readers} & {*self.what}:
                raise ValueError(
                    f"{name} is only used by --what {', '.join(readers)}; remove it or name one"
                )

    def of(self, what: str) -> Options:
        """The options of a question: those that were typed, its defaults for the rest."""
        defaults = DEFAULTS[what]
        typed = {name: getattr(self, name) for name in TYPED}
        chosen = {}
        for name, value in typed.items():
            is_typed = name in defaults and value is not None
            chosen[name] = value if is_typed else defaults.get(name)
        return replace(self, what=(what,), **chosen)


def run(options: Options) -> None:
    """Measure all candidates of each question in turn, and print what came out."""
    for what in options.what:
        # Measure the candidates in turn, and say how many windows were disturbed.
        chosen = options.of(what)
        question = QUESTIONS[what](chosen)
        windows = interleave(question.candidates, chosen.rounds, chosen.most_foreign_cores, what)
        path = chosen.out / f"bench_{what}.csv"
        write_csv(path, [asdict(w) for w in windows])
        loaded = sum(not w.quiet for w in windows)
        print(question.report(windows))
        print(f"{loaded} of {len(windows)} windows on a loaded machine; {os.cpu_count()} cores")
        print(str(path))


QUESTIONS: dict[str, Callable[[Options], Any]] = {
    "wire": WireBesideLaw,
    "transport": Transport,
}
"""Each question has ``candidates``, name -> measure, and a ``report`` of their windows."""
