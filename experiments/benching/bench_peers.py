"""Whole training steps: ours in three modes against FBGEMM, TorchRec, torch, and no embedding.

Precisions take turns, too; each is compared with its own ceiling. With ``where_time_goes`` a
window of each system runs under torch's profiler instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, Literal

import numpy as np

from experiments.benching import roofline, wide
from experiments.benching.device_time import profiled
from experiments.benching.windows import (
    Bench,
    Window,
    drift,
    interleave,
    ratio_of,
    summarize,
    verdict,
)
from experiments.options import MOST, STUDIED, Count, OneOf, Some, hold
from experiments.tables import Column, drawn, table, write_csv
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import DEFAULT_TAU, Mode
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

_OURS = {f"ours {mode}": mode for mode in Mode if mode is STUDIED or not mode.reads_late_rows}
OURS = tuple(_OURS)
"""The exact modes, and hybrid."""
PEERS = ("fbgemm tbe", "torchrec fused", "torch sparse")
ONE_STEP_LATE = ("ours hybrid tau 1", "torchrec semi-sync")
"""Systems whose rows are equally late, see tests/experiments/test_semi_sync.py."""
MERGED = ("torch merged", "torch merged sparse adam")
"""All rows in one table on the device, beside the network."""
CEILING = "dense-only"
SYSTEMS = (CEILING, *OURS, ONE_STEP_LATE[0], *PEERS, ONE_STEP_LATE[1], *MERGED)
Precision = Literal["float32", "tf32", "bfloat16"]
WARM_UP_STEPS = 2  # of a window, not timed


@dataclass(frozen=True, slots=True)
class GpuGoal:
    """What hybrid is to reach beside a GPU, set before it ever ran on one."""

    workload: str
    precision: Precision
    batch: int
    share: float | None = None
    """Share of the speed of the dense network alone."""
    samples_per_s: float | None = None


GPU_GOALS = (
    GpuGoal("paper", "float32", 4096, share=0.9),
    GpuGoal("paper", "tf32", 16_384, samples_per_s=1e6),
    GpuGoal("paper", "bfloat16", 16_384, samples_per_s=1e6),
    GpuGoal("paper", "bfloat16", 16_384, share=0.8),
)
"""Goals beside a GPU; those of `SHAPES` are for two CPU cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload, and the ratios to reach, set before the engine was built."""

    dim: int = 16
    hidden: tuple[int, ...] = (1024, 512, 256)
    ids_per_field: int = 1
    rows: int = 10_000_000
    goals: tuple[tuple[str, float], ...] = ()
    """(base, ratio of our best mode to it)."""


WorkloadName = Literal["wide", "wide-dim128", "small", "small-8ids", "paper"]


SHAPES: dict[WorkloadName, Shape] = {
    "wide": Shape(goals=((CEILING, 0.95), ("fbgemm tbe", 1.05))),
    "wide-dim128": Shape(dim=128, rows=1_000_000, goals=((CEILING, 0.85), ("fbgemm tbe", 1.15))),
    "small": Shape(hidden=(256, 128, 64), goals=(("fbgemm tbe", 1.35),)),
    "small-8ids": Shape(
        hidden=(256, 128, 64),
        ids_per_field=8,
        goals=(("fbgemm tbe", 2.3), ("torchrec fused", 1.8)),
    ),
    "paper": Shape(hidden=(4096, 2048, 1024, 512, 256)),  # the benchmark page of the original
}
SYNC_GOAL = 0.70
"""Sync over the dense network alone on `wide`, set before the engine was built."""
KNOWN_SHARES = {"fbgemm tbe": 0.91, "torchrec fused": 0.82, "torch sparse": 0.74}
"""Shares of the speed of dense-only on `wide` (measured on 2 cores of an EPYC, 2026-11-21); a
peer far from its share was not set up as it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Samples/s of whole training steps, every system in turn, ratios with intervals."""

    workloads: Some[WorkloadName] = ("wide", "wide-dim128", "small", "small-8ids")
    """wide: 26 fields, 10 M rows, MLP 1024-512-256; small: 256-128-64; dim 128 has 1 M rows; paper:
    wide with the paper's MLP, which asks for a GPU."""
    device: str = "cpu"
    """Device of the dense network, the rows stay in host memory; with cuda the peers are left
    out."""
    precision: Some[Precision] = ("float32",)
    """Precisions of the dense network, in turn; the peers compute in float32 only, tf32 asks for
    a GPU."""
    systems: tuple[str, ...] = ()
    """Only these, such as hybrid; else all but the merged tables of torch, which lie on the
    device."""
    where_time_goes: bool = False
    """Instead of rounds: one window of each system under torch's profiler; how long the device is
    idle, how long the host waits for it, and a trace of hybrid for Perfetto."""
    roofline: bool = False
    """Instead of rounds of systems: what each stage must move and compute, the bound that the rates
    of this machine set, measured here, and each stage's share of it."""
    rows: Annotated[int, Within(wide.FIELDS, 10**9)] | None = None
    """Distinct ids instead of the workload's own number (for a quick look)."""
    batch: Count = 4096
    """Samples a step."""
    threads: Annotated[int, Within(1, 1024)] = 2
    """Threads of one dense operation, and of the embedding kernels of sync and lookahead; beside a
    GPU of the kernels in every mode."""
    shards: Annotated[int, Within(1, 1024)] = 1
    """Embedding servers inside the process: reads and updates of one exclude each other."""
    rounds: Count = 30
    """Interleaved rounds of windows."""
    window_steps: Annotated[int, Within(WARM_UP_STEPS + 1, MOST)] = 8
    """Steps in a window, >= 3; the first two are not timed."""

    def _check(self) -> None:
        if self.roofline and (self.device != "cpu" or self.where_time_goes):
            raise ValueError("--roofline is of a CPU alone: drop --device and --where-time-goes")
        for name in self.systems:
            hold("systems", name, OneOf(SYSTEMS))
        for precision in self.precision:
            EngineConfig(device=self.device, precision=precision)
            if not _names(self, precision):
                had = f"device {self.device} and precision {precision}"
                raise ValueError(f"systems {', '.join(self.systems)}: none has {had}")


def run(options: Options) -> None:
    """Measure, print table and goals, write CSV and figure."""
    if options.roofline:
        _roofline(options)
        return
    all_windows: list[dict[str, object]] = []
    path = options.out / "bench_peers.csv"
    for name in options.workloads:
        # All systems of a workload in turn; with a profile one window of each.
        shape = shape_of(options, name)
        systems = systems_of(options, shape)
        if options.where_time_goes:
            _where_time_goes(options, name, systems)
            continue
        candidates = {", ".join(one): measure for one, measure in systems.items()}

        # A window is written as soon as it is there: what outlasts a limit leaves the others.
        def keep(window: Window, name: WorkloadName = name) -> None:
            system, _, precision = window.name.rpartition(", ")
            where = {"workload": name, "unit": "samples/s", "precision": precision}
            all_windows.append(where | asdict(window) | {"name": system})
            write_csv(path, all_windows)

        measured = interleave(
            candidates,
            options.rounds,
            options.most_foreign_cores,
            name,
            warm_up=True,
            on_window=keep,
        )

        # Each precision is compared with its own ceiling.
        for precision in options.precision:
            computed_in = [system for system, of in systems if of == precision]
            names = {f"{system}, {precision}": system for system in computed_in}
            windows = [replace(w, name=names[w.name]) for w in measured if w.name in names]
            print(_report(name, windows, computed_in, options, precision))
    if options.where_time_goes:
        return
    written = [str(path)]
    if len(options.precision) == 1 and CEILING in {row["name"] for row in all_windows}:
        written.append(str(drawn(path, CEILING)))
    print("  ".join(written))


def _report(
    name: WorkloadName,
    windows: list[Window],
    systems: list[str],
    options: Options,
    precision: str = "float32",
) -> str:
    columns: dict[str, Column] = {
        f"{name}, {precision}: k samples/s": "{name}",
        "median": lambda s: f"{s.median / 1e3:.1f}",
        "min": lambda s: f"{s.low / 1e3:.1f}",
        "max": lambda s: f"{s.high / 1e3:.1f}",
        "of dense-only": lambda s: (
            str(ratio_of(windows, s.name, CEILING)) if CEILING in systems else ""
        ),
        "quiet": "{quiet}/{windows}",
        "foreign": "{foreign_cores:.2f}",
    }
    lines = [table([summarize(windows, system) for system in systems], columns)]

    # Goals of the workload, for the best of our modes; beside a GPU of hybrid.
    goals: list[tuple[str, str, float]] = []
    on_gpu = options.device != "cpu"
    if on_gpu:
        goals, rates = _gpu_goals(name, windows, systems, options, precision)
        lines += rates
    elif ours := [one for one in OURS if one in systems]:
        best = max(ours, key=lambda one: summarize(windows, one).median)
        goals = [(best, base, goal) for base, goal in SHAPES[name].goals if base in systems]
    if name == "wide" and not on_gpu and {OURS[0], CEILING} <= set(systems):
        goals.append((OURS[0], CEILING, SYNC_GOAL))
    for ours, base, goal in goals:
        ratio = ratio_of(windows, ours, base)
        lines.append(
            f"goal: {ours} >= {goal:.2f} x {base}: {ratio}, {ratio.pairs} pairs:"
            f" {verdict(ratio, goal)}"
        )

    # Notes beside the goals.
    lines += [f"note: {one} {told}" for one in systems if (told := drift(windows, one))]
    if set(ONE_STEP_LATE) <= set(systems):
        ratio = ratio_of(windows, *ONE_STEP_LATE)
        lines.append(
            f"rows one step late: {ONE_STEP_LATE[0]} is {ratio} x {ONE_STEP_LATE[1]},"
            f" {ratio.pairs} pairs"
        )
    if name == "wide" and not on_gpu and CEILING in systems:
        for peer, usual in ((p, share) for p, share in KNOWN_SHARES.items() if p in systems):
            share = ratio_of(windows, peer, CEILING).mean
            if abs(share / usual - 1) > 0.1:
                lines.append(f"note: {peer} is at {share:.2f} of dense-only, known is {usual:.2f}")
    return "\n".join(lines) + "\n"


def _gpu_goals(
    name: str, windows: list[Window], systems: list[str], options: Options, precision: str
) -> tuple[list[tuple[str, str, float]], list[str]]:
    """Goals as shares of another system, and lines about those that are rates."""
    hybrid = OURS[2]
    shares: list[tuple[str, str, float]] = []
    lines: list[str] = []
    for goal in GPU_GOALS if hybrid in systems else ():
        if (goal.workload, goal.precision, goal.batch) != (name, precision, options.batch):
            continue
        # A share is judged by pairs of windows, a rate by the median.
        if goal.share is not None and CEILING in systems:
            shares.append((hybrid, CEILING, goal.share))
        if goal.samples_per_s is not None:
            reached = summarize(windows, hybrid)
            word = "met" if reached.median >= goal.samples_per_s else "MISSED"
            if not reached.clean:
                word = f"not decided, the machine was loaded (would be {word})"
            lines.append(
                f"goal: {hybrid} >= {goal.samples_per_s / 1e3:,.0f} k samples/s:"
                f" {reached.median / 1e3:,.0f}: {word}"
            )
    return shares, lines


def shape_of(options: Options, workload: WorkloadName) -> Shape:
    """A workload with as many rows as the options say."""
    return replace(SHAPES[workload], rows=options.rows or SHAPES[workload].rows)


System = tuple[str, Precision]
"""A system's name and what the network computes in."""


def systems_of(options: Options, shape: Shape) -> dict[System, Callable[[], float]]:
    """What trains one window of each system; returns samples/s."""
    import torch

    from runtime.rank.learner import open_device, round_products

    open_device(options.device)
    torch.set_num_threads(options.threads)
    bench = _Candidates(options, shape)
    systems: dict[System, Callable[[], float]] = {}

    def rounded(precision: Precision, measure: Callable[[], float]) -> float:
        round_products(precision)
        return measure()

    for precision in options.precision:
        for name in _names(options, precision):
            systems[name, precision] = partial(rounded, precision, bench.make(name, precision))
    return systems


def _names(options: Options, precision: Precision) -> list[str]:
    """The systems that this device and precision have, as far as they are asked for."""
    with_peers = options.device == "cpu" and precision == "float32"
    late = ONE_STEP_LATE[0]
    have = [CEILING, *OURS]
    have += [*PEERS, *ONE_STEP_LATE] if with_peers else [late] if options.device != "cpu" else []
    if options.systems:
        have += [late, *MERGED]
    return [name for name in dict.fromkeys(have) if name in (options.systems or have)]


class _Candidates:
    """Makes the systems of one workload; ours share one full store."""

    def __init__(self, options: Options, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._source = wide.wide_workload(
            options.batch, shape.rows, batches=16, ids_per_field=shape.ids_per_field
        )

    def make(self, name: str, precision: Precision) -> Callable[[], float]:
        """One of `SYSTEMS`, ready for its windows."""
        import torch

        from experiments.benching import peers

        # Ours, in each of its modes.
        options = self._options
        shape = self._shape
        if name in _OURS:
            return self._ours(_OURS[name], precision)
        late, semi_sync = ONE_STEP_LATE
        if name == late:
            return self._ours(STUDIED, precision, tau=1)
        if name == semi_sync:
            return self._semi_sync()

        # Everybody else: one plain loop around their embedding layer, so that nothing else differs.
        loop = self._loop(precision)
        if name == CEILING:
            blank = torch.zeros(options.batch, wide.FIELDS * shape.dim, device=options.device)
            return loop(lambda _: blank.detach())
        merged = partial(peers.torch_merged, device=options.device)
        makers = (
            peers.fbgemm_tbe,
            peers.torchrec_fused,
            peers.torch_sparse,
            partial(merged, sparse_adam=False),
            partial(merged, sparse_adam=True),
        )
        make = dict(zip((*PEERS, *MERGED), makers, strict=True))[name]
        look, step_rows = make(self._numbers(), shape.rows, shape.dim)
        return loop(look, step_rows=step_rows)

    def _loop(self, precision: Precision) -> Callable[..., Callable[[], float]]:
        """`wide.plain_loop` around the network that all have, but for its rows."""
        components = self._components(precision=precision)
        return partial(wide.plain_loop, components, self._source, skip=WARM_UP_STEPS)

    @cache  # noqa: B019 (as many as workloads)
    def _numbers(self) -> list[np.ndarray]:
        from experiments.benching.peers import row_numbers

        return row_numbers(self._source.batches, self._shape.rows)

    @cache  # noqa: B019
    def _store(self) -> Any:
        optimizer = RowOptimizer(kind="adagrad", lr=0.05)
        config = TableConfig(dim=self._shape.dim, optimizer=optimizer)
        ids = wide.wide_ids(self._shape.rows)
        return wide.full_store(self._source.layout, config, ids, self._options.shards)

    def _components(self, sync: SyncConfig | None = None, **engine: Any) -> Any:
        """A run with the MLP as all have it."""
        from runtime.rank.components import assemble

        config = TrainConfig(
            sync=sync or SyncConfig(),
            batch=self._options.batch,
            steps=self._options.window_steps,
            engine=EngineConfig(device=self._options.device, **engine),
            rows=TableConfig(dim=self._shape.dim),
            model=ModelConfig(hidden=self._shape.hidden),
        )
        return assemble(config, self._source)

    def _ours(
        self, mode: Mode, precision: Precision, tau: int = DEFAULT_TAU
    ) -> Callable[[], float]:
        from runtime.embedding.worker import EmbeddingWorker

        components = self._components(
            SyncConfig(mode=mode, tau=tau),
            executor="concurrent",
            threads=self._options.threads,
            precision=precision,
            queue_batches=2 if mode.reads_late_rows else None,
        )
        filled = replace(components, worker=EmbeddingWorker(self._store()))
        return partial(wide.concurrent_samples_per_s, filled, self._source, WARM_UP_STEPS)

    def roofline(self, name: WorkloadName) -> tuple[list[dict[str, Any]], str]:
        """Each stage's records, and the text about them."""
        options = self._options
        shape = self._shape
        return roofline.measure(
            name,
            self._source,
            self._store(),
            shape.dim,
            shape.hidden,
            shape.rows,
            options.threads,
            self._loop("float32"),
            WARM_UP_STEPS,
            options.rounds,
            options.most_foreign_cores,
        )

    def _semi_sync(self) -> Callable[[], float]:
        """TorchRec's pipeline around the same MLP, loss and optimiser."""
        import torch

        from experiments.benching.peers import PipelineBatch, SemiSync, batches_of

        # The same batches, network and rates as everybody's.
        options = self._options
        shape = self._shape
        dense, labels = (
            [torch.from_numpy(getattr(b, name)) for b in self._source.batches]
            for name in ("dense", "labels")
        )
        ready = batches_of(self._numbers(), dense, labels)

        def labelled_anew() -> Iterator[PipelineBatch]:
            while True:
                number, drawn = self._source.step()
                yield replace(ready[number], labels=torch.from_numpy(drawn))

        endless = labelled_anew()
        network = self._components().learner.model
        optimizer = torch.optim.Adam(network.parameters(), lr=ModelConfig().lr)  # it asks torch's
        tables = [shape.rows // wide.FIELDS] * wide.FIELDS
        pipeline = SemiSync(network, optimizer, tables, shape.dim)

        # The pipeline fills in the steps that are not timed.
        def measure() -> float:
            pipeline.steps(endless, WARM_UP_STEPS)
            timed = options.window_steps - WARM_UP_STEPS
            began = time.perf_counter()
            pipeline.steps(endless, timed)
            return timed * options.batch / (time.perf_counter() - began)

        return measure


def _roofline(options: Options) -> None:
    """The stages of each workload beside their bounds: a table and a CSV."""
    records: list[dict[str, Any]] = []
    for name in options.workloads:
        shape = shape_of(options, name)
        of_workload, text = _Candidates(options, shape).roofline(name)
        records += of_workload
        print(text + "\n")
        write_csv(options.out / "bench_peers_roofline.csv", records)
    print(f"{options.out / 'bench_peers_roofline.csv'}")


def _where_time_goes(
    options: Options, workload: str, systems: dict[System, Callable[[], float]]
) -> None:
    """One window of each system under the profiler: a table of all, and a trace of hybrid."""
    rows = []
    for (name, precision), measure in systems.items():
        measure()  # what is done once is not of interest
        trace = options.out / f"trace_{workload}_{precision}.json.gz" if name == OURS[2] else None
        shares = profiled(measure, options.window_steps, options.device, trace)
        rows.append({"workload": workload, "system": name, "precision": precision} | shares)

    # Idle is what the training thread can do something about; others' waits stall nobody.
    columns: dict[str, Column] = {
        f"{workload}, profiled": "{system}, {precision}",
        "busy share": "{busy_share:.2f}",
        "idle ms/step": "{idle_ms_per_step:.2f}",
        "training waits ms/step": "{wait_ms_per_step:.2f}",
        "waits/step": "{waits_per_step:.1f}",
        "other threads' ms/step": "{others_wait_ms_per_step:.2f}",
    }
    print(table(rows, columns) + "\n")
    print(write_csv(options.out / f"profile_{workload}.csv", rows))
