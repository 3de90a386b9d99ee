"""Options of bench-engines: what each of its questions reads, and takes where nothing is typed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from experiments.benching.wide import FIELDS
from experiments.benching.windows import Bench
from experiments.options import MOST, Count, OneOf, Some, hold
from persia_sim.words.schema import Within
from persia_sim.words.vocabulary import Mode

ENGINES = {
    "threads": "ranks and servers in one process",
    "servers": "ranks in one process, each server in its own",
    "processes": "each rank and each server in its own",
}
DEFAULTS: dict[str, dict[str, Any]] = {
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
    "snapshot": {
        "rounds": 10, "batch": 16_384, "dim": 16, "rows": 1_000_000, "around_s": 0.3,
    },
    "memory": {
        "window_steps": 1_000_000, "batch": 16, "ranks": (8,), "servers": (4,), "windows": (4,),
        "executor": "lag",
    },
}  # fmt: skip
"""What each question reads, and takes where nothing was typed."""
OWN = sorted({name for own in DEFAULTS.values() for name in own})
LEAST_STEPS = {"latency": 9, "transport": 4, "scaling": 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Candidates in turn, round after round; what is not given is each question's own."""

    what: Some[Annotated[str, OneOf(DEFAULTS)]] = ("latency", "transport")
    """latency, transport, scaling (half an hour), snapshot (a minute), memory (an hour)."""
    rounds: Count | None = None
    """Interleaved rounds of all candidates."""
    window_steps: Annotated[int, Within(3, MOST)] | None = None
    """Steps of a measurement; the first are not timed. Of memory: those of all ranks."""
    batch: Count | None = None
    """Samples of one dense update; of snapshot: ids of a step, drawn uniformly."""
    rows: Annotated[int, Within(FIELDS, 10**9)] | None = None
    """Distinct ids of the workload; of snapshot: rows of the table."""
    dim: Annotated[int, Within(1, 4096)] | None = None
    """Floats in a row."""
    hidden: Some[Annotated[int, Within(1, 2**20)]] | None = None
    """Widths of the MLP's layers."""
    threads: Annotated[int, Within(1, 1024)] | None = None
    """Threads of one dense operation."""
    ranks: Some[Annotated[int, Within(1, 64)]] | None = None
    """NN workers; several for scaling."""
    servers: Some[Annotated[int, Within(1, 64)]] | None = None
    """Embedding servers (shards, where they are in the ranks' process); several for scaling."""
    latency_s: Some[Annotated[float, Within(0.0, 10.0)]] | None = None
    """Seconds that each lookup and each push takes longer, as in a network."""
    windows: Some[Annotated[int, Within(1, 1024)]] | None = None
    """Of latency: bounds tau of hybrid and raw_hybrid, and steps ahead of lookahead. Of memory: the
    bound of hybrid."""
    modes: Some[Annotated[str, OneOf(map(str, Mode))]] | None = None
    """Modes of scaling."""
    engines: Some[Annotated[str, OneOf(ENGINES)]] | None = None
    """threads, servers, processes: of scaling."""
    data: str | None = None
    """Data set of scaling."""
    clock: Literal["wall", "cpu"] | None = None
    """Of transport. wall: a step's seconds. cpu: the CPU seconds of ranks and servers together, for
    a busy machine; what a message waits is not in them."""
    around_s: Annotated[float, Within(0.001, 3600)] | None = None
    """Of snapshot: seconds of training before each."""
    executor: Literal["lag", "concurrent"] | None = None
    """Of memory: who carries the steps out: one thread, or a thread a rank."""

    def check(self) -> None:
        """What a question reads, and how it reads it."""
        for name in self.what:
            hold("window_steps", self.window_steps or MOST, Within(LEAST_STEPS.get(name, 1), MOST))
            if name != "scaling":
                self._check_single(name)
        if "latency" in self.what:
            for latency_s in self.latency_s or ():
                hold("latency_s", latency_s, Within(1e-4, 10.0))
        for name in OWN:
            readers = [what for what, own in DEFAULTS.items() if name in own]
            if getattr(self, name) is not None and not {*readers} & {*self.what}:
                raise ValueError(
                    f"{name} is only used by --what {', '.join(readers)}; remove it or name one"
                )

    def of(self, what: str) -> Options:
        """What a question takes: what was typed of its own, its defaults for the rest."""
        own = DEFAULTS[what]
        typed = {name: getattr(self, name) for name in OWN}
        given = {n: own.get(n) if v is None or n not in own else v for n, v in typed.items()}
        return replace(self, what=(what,), **given)

    def _check_single(self, what: str) -> None:
        """Raise ValueError for a list where a question is asked at one number."""
        for name in ("ranks", "servers", *(("windows",) if what == "memory" else ())):
            values = getattr(self, name) or ()
            if name in DEFAULTS[what] and len(values) > 1:
                raise ValueError(f"{name} must be one number for {what}, got {list(values)}")
        batch, ranks = self.batch or DEFAULTS[what]["batch"], max(self.ranks or (1,))
        if batch < ranks:
            raise ValueError(f"batch {batch} gives {ranks} ranks less than a sample each")
