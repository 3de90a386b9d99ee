"""The gap of hybrid, missed pushes and drift, by how often the ids of a sample occur."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.gaps import Run, Setting
from experiments.options import Count, PairedSeeds, Parallel, Some
from experiments.points import SYNTHETIC_SETS, Point, one_draw, present, setting_points
from experiments.staleness import frequency
from experiments.sweep import trained
from experiments.tables import Column, leave, table
from persia_sim.words.schema import Within
from runtime.config import DataConfig, EvaluationConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Sync and hybrid with one rank under constant lag, paired seeds, on several data sets.

    Bins are by how often the ids of one stream occur, so that here a seed draws weights alone.
    """

    data: tuple[str, ...] = ()
    """Data sets; else all that are found and the synthetic ones."""
    taus: Some[Count] = (16, 64)
    """Bounds of hybrid."""
    seeds: PairedSeeds = 5
    """Paired seeds, >= 2."""
    samples: Count = 40_000
    """First samples of the training part that are trained on."""
    batch: Count = 128
    """Samples per dense update."""
    test_rows: Annotated[int, Within(2, 10**9)] = 20_000
    """First samples of the test part that are judged."""
    probes: Count = 8
    """Steps of a run at which drift is measured."""

    def _check(self) -> None:
        if self.samples < self.batch:
            raise ValueError(
                f"samples must be >= batch, a step at least, got {self.samples} and {self.batch}"
            )


def run(options: Options) -> None:
    """Train, read the orders, probe the drift; three tables and a figure."""
    names = list(dict.fromkeys(options.data or (*present(), *SYNTHETIC_SETS)))
    points = {name: _points(options, name) for name in names}
    print(f"beside runs that train {len(points) * len(options.taus)} that measure drift")
    runs = trained(points, options)
    if runs is None:
        return
    found = [_gaps_and_staleness(options, name, own) for name, own in runs.items()]
    gaps, stale = ([line for lines in own for line in lines] for own in zip(*found, strict=True))
    drifts = _drift_lines(options, runs, gaps)
    if not drifts:
        raise ValueError(
            f"test_rows {options.test_rows} hold fewer than {frequency.LEAST_OF_EACH_LABEL} samples"
            f" of a label, or samples {options.samples} no step at which drift is measured; name"
            " more"
        )
    print(f"\n{table(gaps, GAP_COLUMNS)}")
    print(f"\nwhat lookups miss\n{table(drifts, DRIFT_COLUMNS)}")
    ranks = (f"{name} {rank:.2f}" for name, rank in frequency.order_of_losses(drifts).items())
    print(f"rank correlation with the loss, {len(drifts)} points: {', '.join(ranks)}")
    leave(options, {"": gaps, "_staleness": stale, "_drift": drifts}, drawn_first=3)


def _points(options: Options, name: str) -> list[Point]:
    base = TrainConfig(
        batch=options.batch,
        steps=options.samples // options.batch,
        data=DataConfig(name=one_draw(name)),
        evaluation=EvaluationConfig(test_rows=options.test_rows),
    )
    settings: list[Setting] = [("sync", 0), *(("hybrid", tau) for tau in options.taus)]
    prefix = f"{Path(name).name.replace(':', '-')}-"
    return setting_points(base, settings, options.seeds, prefix)


def _gaps_and_staleness(
    options: Options, name: str, runs: Sequence[Run]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from runtime.data.batch import Batch
    from runtime.data.open import open_source
    from runtime.rank.feed import training_stream

    source = open_source(name, keep=True)
    batches = list(training_stream(runs[0].point.config, source))
    known = frequency.frequencies(Batch.concat(batches))
    tested = frequency.first_samples(source, "test", options.test_rows)
    counts = frequency.rarest(known, tested)
    read = {(r.setting, r.summary["seed"]): r.predictions(options.out) for r in runs}
    gaps = [
        {"data": name, **line}
        for by, own in (("all", None), ("rarest", counts))
        for line in frequency.gap_lines(read, options.taus, options.seeds, by, own)
    ]
    stale = [
        {"data": name, **line}
        for tau in options.taus
        for line in _staleness(options, runs, tau, batches)
    ]
    return gaps, stale


def _staleness(
    options: Options, runs: Sequence[Run], tau: int, batches: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Missed pushes of a row under one bound; what is read off the order, the store had counted."""
    from persia_sim.words.trace import Trace
    from runtime.embedding.store import STALENESS_BINS

    one = _first(runs, tau)
    order = Trace.load(one.point.folder(options.out) / "trace.npz")
    read, histogram = frequency.row_reads(order, batches, STALENESS_BINS)
    if histogram.tolist() != one.summary["row_staleness_histogram"]:
        raise RuntimeError(f"{one.point.label}: its order and its store count other pushes")
    return frequency.missed_lines(
        read,
        tau=tau,
        samples=sum(b.size for b in batches),
        batch=options.batch,
        missed_steps=one.summary["staleness"]["mean_steps"],
    )


def _first(runs: Sequence[Run], tau: int) -> Run:
    """Of hybrid under this bound: seed 0."""
    return next(r for r in runs if r.setting == ("hybrid", tau) and r.summary["seed"] == 0)


def _drift_lines(
    options: Options, runs: Mapping[str, Sequence[Run]], gaps: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A line per data set and bound that has both a drift, of what its lookups miss, and a gap."""
    from experiments.staleness.drift import drifts  # late: torch

    labels, wanted = {}, {}
    for name, own in runs.items():
        for tau in options.taus:
            late = _first(own, tau).point
            label = f"{late.folder(Path()).name}/{options.probes} probes of 4096"
            labels[name, tau], wanted[label] = label, (late.config, late.config.steps)
    kept = drifts(wanted, options.probes, options.out, options.jobs)
    return [
        {
            "data": gap["data"],
            "tau": gap["tau"],
            "probes": len(own),
            **{name: float(np.mean([d[name] for d in own])) for name in frequency.MEASURES},
            "gap_to_sync": gap["gap_to_sync"],
            "gap_to_sync_half_width_95": gap["gap_to_sync_half_width_95"],
        }
        for gap in gaps
        if gap["by"] == "all" and (own := kept[labels[gap["data"], gap["tau"]]])
    ]


def _thousandths(name: str) -> Column:
    return lambda line: f"{1e3 * line[name]:+.2f} ± {1e3 * line[f'{name}_half_width_95']:.2f}"


GAP_COLUMNS: dict[str, Column] = {
    "data": "{data}",
    "tau": "{tau}",
    "by": "{by}",
    "occurs": lambda line: "any" if line["by"] == "all" else f"{line['count_from']:,}+",
    "samples": "{test_samples:,}",
    "AUC sync": "{auc_sync:.4f}",
    "gap [1e-3]": _thousandths("gap_to_sync"),
    "log-loss gap [1e-3]": _thousandths("log_loss_gap"),
}
DRIFT_COLUMNS: dict[str, Column] = {
    "data": "{data}",
    "tau": "{tau}",
    "absolute drift": "{drift:.2e}",
    "relative": "{relative:.2e}",
    "of predictions": "{predictions:.2e}",
    "gap [1e-3]": _thousandths("gap_to_sync"),
}
