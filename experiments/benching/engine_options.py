"""Options of bench-engines: what each of its questions reads, and takes where nothing is typed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from experiments.benching.wide import FIELDS
from experiments.checks import COUNT, between, each_between, each_known, not_empty
from persia_sim.words.vocabulary import Mode

ENGINES = {
    "threads": "ranks and servers in one process",
    "servers": "ranks in one process, each server in its own",
    "processes": "each rank and each server in its own",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sync": {
        "rounds": 12, "window_steps": 12, "batch": 4096, "dim": 16, "hidden": (1024, 512, 256),
        "threads": 2, "rows": 1_000_000,
    },
    "latency": {
        "rounds": 5, "window_steps": 60, "batch": 256, "dim": 8, "hidden": (256, 128),
        "ranks": (1,), "latency_s": (0.01, 0.02), "windows": (1, 4, 16),
    },
    "transport": {
        "rounds": 8, "window_steps": 15, "batch": 4096, "dim": 16, "threads": 2,
        "rows": 1_000_000, "ranks": (1,), "servers": (1,), "clock": "wall",
    },
    "scaling": {
        "rounds": 5, "window_steps": 150, "batch": 512, "dim": 16, "hidden": (256, 128),
        "ranks": (1, 2, 4), "servers": (1, 2), "latency_s": (0.0,), "modes": tuple(map(str, Mode)),
        "engines": tuple(ENGINES), "data": "synthetic",
    },
}  # fmt: skip
"""What each question reads, and takes where nothing was typed."""
OWN = sorted({name for own in DEFAULTS.values() for name in own})
LEAST_STEPS = {"sync": 3, "latency": 9, "transport": 4, "scaling": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Candidates in turn, round after round; what is not given is each question's own."""

    what: tuple[str, ...] = ("sync", "latency", "transport")
    """sync, latency, transport, scaling (half an hour)."""
    rounds: int | None = None
    """Interleaved rounds of all candidates."""
    window_steps: int | None = None
    """Steps of a measurement; the first are not timed."""
    batch: int | None = None
    """Samples of one dense update."""
    rows: int | None = None
    """Distinct ids of the workload."""
    dim: int | None = None
    """Floats in a row."""
    hidden: tuple[int, ...] | None = None
    """Widths of the MLP's layers."""
    threads: int | None = None
    """Threads of one dense operation."""
    ranks: tuple[int, ...] | None = None
    """NN workers; several for scaling."""
    servers: tuple[int, ...] | None = None
    """Embedding servers (shards, where they are in the ranks' process); several for scaling."""
    latency_s: tuple[float, ...] | None = None
    """Seconds that each lookup and each push takes longer, as in a network."""
    windows: tuple[int, ...] | None = None
    """Of latency: bounds tau of hybrid and raw_hybrid, and steps ahead of lookahead."""
    modes: tuple[str, ...] | None = None
    """Modes of scaling."""
    engines: tuple[str, ...] | None = None
    """threads, servers, processes: of scaling."""
    data: str | None = None
    """Data set of scaling."""
    clock: Literal["wall", "cpu"] | None = None
    """Of transport. wall: a step's seconds. cpu: the CPU seconds of ranks and servers together, for
    a busy machine; what a message waits is not in them."""
    most_foreign_cores: float = 0.15
    """A window in which other processes used more cores than this is measured once more."""
    out: Path = Path("runs/bench-engines")
    """Folder of a CSV for each question."""

    def __post_init__(self) -> None:
        lists = {"ranks": self.ranks, "servers": self.servers, "latency_s": self.latency_s,
                 "windows": self.windows, "hidden": self.hidden, "modes": self.modes,
                 "engines": self.engines}  # fmt: skip
        not_empty(what=self.what, **{n: v for n, v in lists.items() if v is not None})
        each_known(DEFAULTS, what=self.what)
        each_known(ENGINES, engines=self.engines or ())
        each_known(dict.fromkeys(map(str, Mode)), modes=self.modes or ())
        each_between(1, 64, ranks=self.ranks or (), servers=self.servers or ())
        each_between(0.0, 10.0, latency_s=self.latency_s or ())
        each_between(1, 1024, windows=self.windows or ())
        each_between(1, 2**20, hidden=self.hidden or ())
        between(*COUNT, rounds=self.rounds, batch=self.batch)
        between(FIELDS, 10**9, rows=self.rows)
        between(1, 4096, dim=self.dim)
        between(1, 1024, threads=self.threads)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)
        for name in self.what:
            between(LEAST_STEPS[name], COUNT[1], window_steps=self.window_steps)
            if name != "scaling":
                self._check_single(name)
        if "latency" in self.what:
            each_between(1e-4, 10.0, latency_s=self.latency_s or ())
        self._check_read()

    def of(self, what: str) -> Options:
        """What a question takes: what was typed of its own, its defaults for the rest."""
        own = DEFAULTS[what]
        typed = {name: getattr(self, name) for name in OWN}
        given = {n: own.get(n) if v is None or n not in own else v for n, v in typed.items()}
        return replace(self, what=(what,), **given)

    def _check_single(self, what: str) -> None:
        """Raise ValueError for a list where a question is asked at one number."""
        for name in ("ranks", "servers"):
            values = getattr(self, name) or ()
            if name in DEFAULTS[what] and len(values) > 1:
                raise ValueError(f"{name} must be one number for {what}, got {list(values)}")
        batch, ranks = self.batch or DEFAULTS[what]["batch"], max(self.ranks or (1,))
        if batch < ranks:
            raise ValueError(f"batch {batch} gives {ranks} ranks less than a sample each")

    def _check_read(self) -> None:
        """Raise ValueError for an option that none of the questions reads."""
        for name in OWN:
            readers = [what for what, own in DEFAULTS.items() if name in own]
            if getattr(self, name) is not None and not {*readers} & {*self.what}:
                raise ValueError(
                    f"{name} is only used by --what {', '.join(readers)}; remove it or name one"
                )
