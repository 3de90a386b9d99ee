"""The gap of hybrid, missed pushes and drift, by how often the ids of a sample occur."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.checks import COUNT, JOBS, ROWS, SEEDS, between, each_between, not_empty
from experiments.folders import sole_writer
from experiments.gaps import Run, Setting, finished
from experiments.points import Point
from experiments.staleness.datasets import SYNTHETIC, found
from experiments.statistics import Interval, t_interval
from experiments.studies.staleness_sweep import setting_points
from experiments.sweep import default_jobs, print_plan, run_points, settle_in, surroundings
from experiments.tables import aligned, write_csv
from persia_sim.words.documents import read_document
from runtime.config import DataConfig, EvaluationConfig, TrainConfig
from runtime.run.folder import write_json

EDGES = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 2**62)
"""Counts at which bins begin; 0: the id is in no training sample."""
LEAST_OF_EACH_LABEL = 100
"""Test samples of each label that a bin needs for an AUC."""
PROBED_SAMPLES = 4096
PREDICTORS = ("relative", "predictions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sync and hybrid with one rank under constant lag, paired seeds, on several data sets."""

    data: tuple[str, ...] = ()
    """Data sets; else all that are found and the synthetic ones. The relation of drift and gap is
    fitted on the synthetic ones and tested on the others."""
    taus: tuple[int, ...] = (16, 64)
    """Bounds of hybrid."""
    seeds: int = 5
    """Paired seeds, >= 2."""
    samples: int = 40_000
    """First samples of the training part that are trained on."""
    batch: int = 128
    """Samples per dense update."""
    test_rows: int = 20_000
    """First samples of the test part that are judged."""
    probes: int = 8
    """Steps of a run at which drift is measured."""
    out: Path = Path("runs/row-frequency")
    """Folder of the results; a second run does only what is missing."""
    jobs: int = default_jobs()
    """Points at a time."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        between(2, SEEDS[1], seeds=self.seeds)
        not_empty(taus=self.taus)
        each_between(*COUNT, taus=self.taus)
        between(*COUNT, samples=self.samples, batch=self.batch, probes=self.probes)
        between(ROWS[0], 10**9, test_rows=self.test_rows)
        between(*JOBS, jobs=self.jobs)
        if self.samples < self.batch:
            raise ValueError(
                f"samples must be >= batch, a step at least, got {self.samples} and {self.batch}"
            )


class Group(NamedTuple):
    """The points of one data set."""

    data: str
    points: list[Point]

    def late(self, tau: int) -> TrainConfig:
        """Seed 0 under this bound."""
        return next(p.config for p in self.points if p.config.sync.window == tau)


def run(options: Options) -> None:
    """Train, read the orders, probe the drift; three tables and a figure."""
    from paper_figs.row_frequency import row_frequency_figure  # late: pyplot
    from paper_figs.style import save

    names = list(dict.fromkeys(options.data or (*found(), *SYNTHETIC)))
    groups = [Group(name, _points(options, name)) for name in names]
    points = [p for group in groups for p in group.points]
    print_plan(points, options.out, options.jobs)
    print(f"and {len(groups) * len(options.taus)} runs that measure drift")
    if options.dry_run:
        return
    run_points(points, options.out, options.jobs, options.samples)
    with sole_writer(options.out):
        _probe_drifts(options, groups)
    gaps: list[dict[str, Any]] = []
    stale: list[dict[str, Any]] = []
    for group in groups:
        one, other = _gaps_and_staleness(options, group)
        gaps += one
        stale += other
    drifts = _predicted(options, [*_drifts(options, groups, gaps)])
    table = options.out / "row_frequency.csv"
    write_csv(table, gaps)
    rows = options.out / "row_frequency_staleness.csv"
    write_csv(rows, stale)
    relation = options.out / "row_frequency_drift.csv"
    write_csv(relation, drifts)
    figure = save(row_frequency_figure(table, rows, relation), options.out / "row_frequency.png")
    print(_gap_table(gaps))
    print(_drift_table(drifts))
    print(f"table:  {table}   {rows}   {relation}\nfigure: {figure}")


def _points(options: Options, name: str) -> list[Point]:
    base = TrainConfig(
        batch=options.batch,
        steps=options.samples // options.batch,
        data=DataConfig(name=name),
        evaluation=EvaluationConfig(test_rows=options.test_rows),
    )
    settings: list[Setting] = [("sync", 0), *(("hybrid", tau) for tau in options.taus)]
    points = setting_points(base, settings, options.seeds)
    return [
        Point(label=f"{_file(name)}-{p.label}", config=p.config, data_sha256=p.data_sha256)
        for p in points
    ]


def _file(name: str) -> str:
    return Path(name).name.replace(":", "-")


# The gap and the missed pushes, by frequency.


def _gaps_and_staleness(
    options: Options, group: Group
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from experiments.staleness.frequency import first_samples, frequencies, rarest_and_median
    from runtime.data.batch import Batch
    from runtime.data.open import open_source
    from runtime.rank.feed import training_stream

    runs = finished(group.points, options.out)
    config = group.points[0].config
    source = open_source(group.data, keep=True)
    batches = list(training_stream(config, source))
    known = frequencies(Batch.concat(batches))
    tested = first_samples(source, "test", options.test_rows)
    counts = rarest_and_median(known, tested)
    by = {"all": None, "rarest": counts[:, 0], "median": counts[:, 1]}
    gaps = [
        line for name, own in by.items() for line in _gaps(options, group.data, runs, name, own)
    ]
    return gaps, list(_staleness(options, group, runs, batches))


def _gaps(
    options: Options, data: str, runs: Sequence[Run], by: str, counts: np.ndarray | None
) -> Iterator[dict[str, Any]]:
    """A line per bound and bin that has enough samples of both labels."""
    from runtime.run.scores import auc, log_loss

    scored = {(*r.setting, r.summary["seed"]): _scores(options, r) for r in runs}
    labels = next(iter(scored.values()))[0]
    edges = EDGES if counts is not None else (0, 2**62)
    for low, high in pairwise(edges):
        here = slice(None) if counts is None else (counts >= low) & (counts < high)
        own = labels[here]
        if min(own.sum(), len(own) - own.sum()) < LEAST_OF_EACH_LABEL:
            continue
        for tau in options.taus:
            aucs, gaps, losses = [], [], []
            for seed in range(options.seeds):
                fresh, late = (scored[key][1][here] for key in _pair(tau, seed))
                aucs.append(auc(own, fresh))
                gaps.append(auc(own, late) - aucs[-1])
                losses.append(log_loss(own, late) - log_loss(own, fresh))
            gap, loss = t_interval(gaps), t_interval(losses)
            yield {
                "data": data,
                "tau": tau,
                "by": by,
                "count_from": low,
                "count_below": high if high < EDGES[-1] else math.inf,
                "test_samples": len(own),
                "positives": int(own.sum()),
                "seeds": options.seeds,
                "auc_sync": float(np.mean(aucs)),
                "gap_to_sync": gap.mean,
                "gap_to_sync_half_width_95": gap.half_width,
                "log_loss_gap": loss.mean,
                "log_loss_gap_half_width_95": loss.half_width,
            }


def _pair(tau: int, seed: int) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    return ("sync", 0, seed), ("hybrid", tau, seed)


def _scores(options: Options, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions of the first task."""
    with np.load(run.point.folder(options.out) / "predictions.npz") as arrays:
        return arrays["labels"][:, 0].astype(np.float32), arrays["predictions"][:, 0].astype(float)


def _staleness(
    options: Options, group: Group, runs: Sequence[Run], batches: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Missed pushes of a row, from the recorded order, and by the simulator's model."""
    from experiments.staleness.missed import row_reads
    from persia_sim.theory.alpha import of_batch
    from persia_sim.words.trace import Trace
    from runtime.embedding.server import STALENESS_BINS

    samples = sum(b.size for b in batches)
    for tau in options.taus:
        one = next(r for r in runs if r.setting == ("hybrid", tau) and r.summary["seed"] == 0)
        order = Trace.load(one.point.folder(options.out) / "trace.npz")
        read = row_reads(order, batches, STALENESS_BINS)
        if read.histogram.tolist() != one.summary["row_staleness_histogram"]:
            raise RuntimeError(f"{one.point.label}: its order and its store count other pushes")
        # Of the other samples: the one that reads a row is no push that it could have missed.
        others = (read.occurrences - 1) / (samples - 1)
        expected = one.summary["staleness"]["mean_steps"] * of_batch(others, options.batch)
        for low, high in pairwise(EDGES[1:]):
            here = (read.occurrences >= low) & (read.occurrences < high)
            if not here.any():
                continue
            reads = read.reads[here]
            yield {
                "data": group.data,
                "tau": tau,
                "count_from": low,
                "count_below": high if high < EDGES[-1] else math.inf,
                "rows": int(here.sum()),
                "reads": int(reads.sum()),
                "missed_pushes": float(read.missed[here].sum() / reads.sum()),
                "missed_pushes_model": float((expected[here] * reads).sum() / reads.sum()),
                "missed_steps": one.summary["staleness"]["mean_steps"],
            }


# Drift as a predictor of the gap.


def _drift_path(options: Options, group: Group, tau: int) -> Path:
    return options.out / "drift" / f"{_file(group.data)}-tau{tau}.json"


def _asked(options: Options, group: Group, tau: int) -> dict[str, Any]:
    point = next(p for p in group.points if p.config.sync.window == tau and p.config.seed == 0)
    return {"point": point.folder(Path()).name, "probes": options.probes, "of": PROBED_SAMPLES}


def _kept(options: Options, group: Group, tau: int) -> list[dict[str, float]] | None:
    try:
        kept = read_document(_drift_path(options, group, tau))
    except (OSError, ValueError):
        return None
    wanted = _asked(options, group, tau)
    return kept["drift"] if isinstance(kept, dict) and kept.get("asked") == wanted else None


def _probe_drifts(options: Options, groups: Sequence[Group]) -> None:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    from tqdm import tqdm

    todo = [(g, t) for g in groups for t in options.taus if _kept(options, g, t) is None]
    if not todo:
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["runtime.run.record"])
    with ProcessPoolExecutor(
        min(options.jobs, len(todo)), context, initializer=settle_in, initargs=(surroundings(),)
    ) as pool:
        jobs = {pool.submit(_drift_of, g.late(t), options.probes): (g, t) for g, t in todo}
        for job in tqdm(as_completed(jobs), total=len(jobs), desc="drift", disable=None):
            group, tau = jobs[job]
            content = {"asked": _asked(options, group, tau), "drift": job.result()}
            path = _drift_path(options, group, tau)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)


def _drift_of(config: TrainConfig, probes: int) -> list[dict[str, float]]:
    """In a process of its own."""
    from experiments.staleness.drift import measured
    from experiments.staleness.frequency import first_samples
    from runtime.data.open import open_source

    source = open_source(config.data.name, keep=config.data.keep)
    held_out = first_samples(source, "test", PROBED_SAMPLES)
    assert config.steps is not None and config.sync.window is not None
    last = max(1, config.steps - 1)
    steps = np.linspace(min(config.sync.window, last), last, probes).round().astype(int)
    return [asdict(d) for d in measured(config, sorted(set(steps.tolist())), held_out)]


def _drifts(
    options: Options, groups: Sequence[Group], gaps: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    whole = {(g["data"], g["tau"]): g for g in gaps if g["by"] == "all"}
    for group in groups:
        for tau in options.taus:
            found_, gap = _kept(options, group, tau), whole.get((group.data, tau))
            if not found_ or gap is None:
                continue
            yield {
                "data": group.data,
                "tau": tau,
                "part": "fit" if group.data.startswith("synthetic") else "test",
                "probes": len(found_),
                **{n: float(np.mean([d[n] for d in found_])) for n in ("drift", *PREDICTORS)},
                "gap_to_sync": gap["gap_to_sync"],
                "gap_to_sync_half_width_95": gap["gap_to_sync_half_width_95"],
            }


def _predicted(options: Options, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each line with the gap that its drift tells, by one factor fitted on the synthetic sets.

    gap = -c * drift, least squares through the origin: no drift, no gap. The naive predictors know
    no drift: the mean gap of the synthetic sets at this bound, and no gap at all.
    """
    fit = [line for line in lines if line["part"] == "fit"]
    done = []
    for line in lines:
        told = dict(line)
        for name in PREDICTORS:
            drift = np.array([f[name] for f in fit])
            gap = np.array([f["gap_to_sync"] for f in fit])
            factor = float(drift @ gap / (drift @ drift)) if drift.any() else math.nan
            told[f"factor_{name}"] = factor
            told[f"predicted_{name}"] = factor * line[name]
        same = [f["gap_to_sync"] for f in fit if f["tau"] == line["tau"]]
        told["predicted_mean"] = float(np.mean(same)) if same else math.nan
        done.append(told)
    return done


def errors(lines: Sequence[dict[str, Any]]) -> dict[str, Interval]:
    """Mean absolute error of each predictor over the data sets that were not fitted."""
    test = [line for line in lines if line["part"] == "test"]
    predictors = {**{n: f"predicted_{n}" for n in PREDICTORS}, "mean gap": "predicted_mean"}
    found_ = {
        name: t_interval([abs(line[key] - line["gap_to_sync"]) for line in test])
        for name, key in predictors.items()
    }
    return found_ | {"no gap": t_interval([abs(line["gap_to_sync"]) for line in test])}


def _thousandths(mean: float, half: float) -> str:
    return f"{1e3 * mean:+.2f} ± {1e3 * half:.2f}"


def _gap_table(gaps: Sequence[dict[str, Any]]) -> str:
    header = ["data", "tau", "by", "occurs", "samples", "AUC sync", "gap [1e-3]",
              "log-loss gap [1e-3]"]  # fmt: skip
    cells = [
        [
            g["data"], str(g["tau"]), g["by"],
            "any" if g["by"] == "all" else f"{g['count_from']:,}+",
            f"{g['test_samples']:,}", f"{g['auc_sync']:.4f}",
            _thousandths(g["gap_to_sync"], g["gap_to_sync_half_width_95"]),
            _thousandths(g["log_loss_gap"], g["log_loss_gap_half_width_95"]),
        ]
        for g in gaps
        if g["by"] != "median"
    ]  # fmt: skip
    return "\n" + aligned(header, cells)


def _drift_table(lines: Sequence[dict[str, Any]]) -> str:
    header = ["data", "tau", "part", "relative drift", "gap [1e-3]", "by drift", "by predictions",
              "by mean gap"]  # fmt: skip
    cells = [
        [
            d["data"], str(d["tau"]), d["part"], f"{d['relative']:.2e}",
            _thousandths(d["gap_to_sync"], d["gap_to_sync_half_width_95"]),
            *(f"{1e3 * d[f'predicted_{n}']:+.2f}" for n in (*PREDICTORS, "mean")),
        ]
        for d in lines
    ]  # fmt: skip
    said = "\ngap predicted from drift, one factor fitted on the synthetic sets\n"
    said += aligned(header, cells)
    if any(d["part"] == "test" for d in lines):
        told = (f"{n} {1e3 * e.mean:.2f}" for n, e in errors(lines).items())
        said += f"\nmean absolute error on the other sets [1e-3]: {', '.join(told)}"
    return said
