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
from persia_sim.base.schema import Within
from runtime.config import DataConfig, EvaluationConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Sync and hybrid with one rank under constant lag, paired seeds, on several data sets.

    Bins are by how often the ids of one stream occur, so that here a seed draws weights alone.
    """

    data: tuple[str, ...] = ()
    """Data sets, such as adult; else all that are found and the synthetic ones."""
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

    # Of each data set the gaps by frequency, and the pushes that reads missed.
    gaps: list[dict[str, Any]] = []
    stale: list[dict[str, Any]] = []
    for name, runs_of_set in runs.items():
        gap_lines, stale_lines = _gaps_and_staleness(options, name, runs_of_set)
        gaps += gap_lines
        stale += stale_lines

    # Drift is measured in further runs, and stands beside the gaps.
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

    # How often the rarest id of each test sample occurs in training.
    source = open_source(name, keep=True)
    batches = list(training_stream(runs[0].point.config, source))
    occurrences = frequency.frequencies(Batch.concat(batches))
    test_samples = frequency.first_samples(source, "test", options.test_rows)
    counts = frequency.rarest(occurrences, test_samples)

    # Gaps over all test samples, and in bins of that count.
    predictions = {(r.setting, r.summary["seed"]): r.predictions(options.out) for r in runs}
    gaps = [
        {"data": name, **line}
        for by, bins in (("all", None), ("rarest", counts))
        for line in frequency.gap_lines(predictions, options.taus, options.seeds, by, bins)
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
    from persia_sim.base.trace import Trace
    from runtime.embedding.batch_rows import STALENESS_BINS

    # Count from the order of reads and writes, which says it by row.
    first = _first(runs, tau)
    order = Trace.load(first.point.folder(options.out) / "trace.npz")
    reads, histogram = frequency.row_reads(order, batches, STALENESS_BINS)

    # The store counted the same while the run was trained.
    if histogram.tolist() != first.summary["row_staleness_histogram"]:
        raise RuntimeError(f"{first.point.label}: its order and its store count other pushes")
    return frequency.missed_lines(
        reads,
        tau=tau,
        samples=sum(b.size for b in batches),
        batch=options.batch,
        missed_steps=first.summary["staleness"]["mean_steps"],
    )


def _first(runs: Sequence[Run], tau: int) -> Run:
    """The run of hybrid under this bound with seed 0."""
    return next(r for r in runs if r.setting == ("hybrid", tau) and r.summary["seed"] == 0)


def _drift_lines(
    options: Options, runs: Mapping[str, Sequence[Run]], gaps: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A line per data set and bound that has both a drift, of what its lookups miss, and a gap."""
    from experiments.staleness.drift import drifts  # late: torch

    # Probe the run of seed 0 of each data set and bound.
    labels = {}
    wanted = {}
    for name, runs_of_set in runs.items():
        for tau in options.taus:
            late = _first(runs_of_set, tau).point
            label = f"{late.folder(Path()).name}/{options.probes} probes of 4096"
            labels[name, tau] = label
            wanted[label] = (late.config, late.config.steps)
    probed = drifts(wanted, options.probes, options.out, options.jobs)

    # Means over the probes, beside the gap over all test samples.
    lines = []
    for gap in gaps:
        if gap["by"] != "all":
            continue
        probes = probed[labels[gap["data"], gap["tau"]]]
        if not probes:
            continue
        means = {
            name: float(np.mean([probe[name] for probe in probes])) for name in frequency.MEASURES
        }
        lines.append(
            {
                "data": gap["data"],
                "tau": gap["tau"],
                "probes": len(probes),
                **means,
                "gap_to_sync": gap["gap_to_sync"],
                "gap_to_sync_half_width_95": gap["gap_to_sync_half_width_95"],
            }
        )
    return lines


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
