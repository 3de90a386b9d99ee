"""From finished runs to the study's tables: gaps with intervals, delays, hypotheses.

A delay is the updates by which a late run lies behind a synchronous one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.gaps import Run, columns_beside, contrast_over_seeds, gap_columns, mean_auc
from experiments.lateness.streams import RANKS, SYNC, Cell, Rates, Stream, stream_of
from experiments.statistics import Interval
from runtime.run.folder import read_metrics

RESAMPLES = 1000
Ends = tuple[float, float]
"""Of a 95 % interval; infinite where that is open."""


def delays(
    updates: Sequence[int], sync: np.ndarray, late: np.ndarray, seed: int = 0
) -> tuple[list[dict[str, float]], tuple[float, Ends]]:
    """The delay at each snapshot as the CSV has it, in updates, and its growth, NaN where it is not
    known; both with intervals over seeds (bootstrap of pairs).

    ``sync`` and ``late`` [seeds, snapshots] are AUCs, paired. Curves are means over seeds. A delay
    is infinite where the late run is beyond sync's curve: at most, or at least, what the curve's
    end says. No draw is left out for it, and an end of an interval among such draws is open. The
    growth leaves the first snapshot out.
    """
    draw = np.random.default_rng(seed)
    picked = [np.arange(len(sync)), *draw.integers(0, len(sync), (RESAMPLES, len(sync)))]
    drawn = np.array([behind(updates, sync[k].mean(0), late[k].mean(0)) for k in picked])
    counts = np.asarray(updates, float)
    least = np.where(drawn == math.inf, counts, drawn)
    most = np.where(drawn == -math.inf, counts - counts[-1], drawn)
    gaps = (late - sync).mean(0)
    found = []
    for number, count in enumerate(updates):
        low, high = _ends(least[1:, number], most[1:, number], len(sync))
        found.append({"updates": count, "gap": float(gaps[number]),
                      "behind": float(drawn[0, number]),
                      "behind_low_95": low, "behind_high_95": high})  # fmt: skip
    from_, to = growth(updates[1:], least[:, 1:], most[:, 1:])
    whole = float(from_[0]) if from_[0] == to[0] else math.nan
    return found, (whole, _ends(from_[1:], to[1:], len(sync)))


def _ends(least: np.ndarray, most: np.ndarray, seeds: int) -> Ends:
    """The middle 95 % of what was drawn and is known to lie between these two, widened for few
    seeds (the expanded percentiles of Hesterberg, Am. Stat. 69, 2015)."""
    from scipy.special import ndtr, stdtrit  # late, as in `statistics`

    tail = ndtr(stdtrit(seeds - 1, 0.025) * math.sqrt(seeds / (seeds - 1)))
    low = np.quantile(least, tail, method="lower")
    return float(low), float(np.quantile(most, 1 - tail, method="higher"))


def behind(updates: Sequence[int], sync: np.ndarray, late: np.ndarray) -> np.ndarray:
    """[snapshots] updates that ``late`` lies behind ``sync``, two mean curves: minus infinity above
    all of sync's, infinity where sync never was so low.

    Sync's curve is made to rise (its running maximum) and read backwards, linear between snapshots
    and from (0 updates, 0.5) on.

    >>> behind([10, 20, 40], np.array([0.6, 0.7, 0.8]), np.array([0.55, 0.65, 0.75]))
    array([ 5.,  5., 10.])
    """
    times = np.array([0, *updates], float)
    rising = np.maximum.accumulate([0.5, *sync])
    reached = np.interp(late, rising, times, left=-np.inf, right=np.inf)
    # A flat stretch of sync's curve has many times of one AUC: the first is meant.
    first = np.searchsorted(rising, late).clip(max=len(updates))
    return times[1:] - np.where(rising[first] == late, times[first], reached)


def growth(
    updates: Sequence[int], least: np.ndarray, most: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By what share, from and to [draws], a delay between these [draws, snapshots] grows when a run
    is twice as long: its sum over snapshots at twice the updates of others, over the sum at those
    others, minus 1.

    So delays of any sign count; it may be anything where the lower sum is not surely above 0.
    """
    place = {count: number for number, count in enumerate(updates)}
    here = [number for count, number in place.items() if 2 * count in place]
    there = [place[2 * updates[number]] for number in here]
    low, high, below, above = (own[:, at].sum(1) for at in (here, there) for own in (least, most))
    known = (low > 0) & (high < np.inf)
    with np.errstate(all="ignore"):
        grown = np.array([top / under - 1 for top in (below, above) for under in (low, high)])
    return np.where(known, grown.min(0), -np.inf), np.where(known, grown.max(0), np.inf)


RatesOf = Literal["of sync", "own"]
Key = tuple[Cell, RatesOf]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The final runs, all finished, of one stream with one start of its rows' optimiser."""

    stream: Stream
    start: float
    rates: Mapping[Cell, Rates]
    """Each cell's own; sync's are those of the others' "of sync"."""
    runs: Mapping[Key, Mapping[int, Run]]
    """Cell and kind of rates -> seed -> run."""
    drifts: Mapping[int, float]
    """How far rows of a sync run move, by how many updates: sum p ||d||^2."""

    @property
    def columns(self) -> dict[str, Any]:
        """Whose lines they are."""
        return {"data": self.stream.name, "optimizer_start": self.start}

    @property
    def task(self) -> str:
        """The first task: rates are chosen on it, and the tables tell it."""
        return next(iter(next(iter(self._sync.values())).summary["tasks"]))

    @property
    def _sync(self) -> Mapping[int, Run]:
        return self.runs[SYNC, "own"]

    def gap(self, root: Path, key: Key, *less: Key, more: Sequence[Key] = ()) -> Interval:
        """AUC of a cell minus that of others, of sync unless told, plus that of ``more``.

        The interval is over seeds and test rows, or over draws, which have rows of their own.
        """
        less = less or ((SYNC, "own"),)
        signs = [*[-1] * len(less), *[1] * len(more), 1]
        runs = [self.runs[one] for one in (*less, *more, key)]
        return contrast_over_seeds(runs, signs, self.task, root)

    def delays(self, key: Key, root: Path) -> tuple[list[dict[str, float]], tuple[float, Ends]]:
        """Behind sync at each snapshot, and the growth; pushes on their way are not applied yet."""

        def curve(run: Run) -> dict[int, float | None]:
            lines = read_metrics(run.point.folder(root))
            return {one.updates: one.tasks[self.task]["auc"] for one in lines if not one.drained}

        cells = self._sync, self.runs[key]
        curves = [[curve(runs[seed]) for seed in self.runs[key]] for runs in cells]
        sync, late = np.array([[[*one.values()] for one in own] for own in curves], float)
        return delays([*curves[0][0]], sync, late)


def gap_lines(group: Group, root: Path) -> list[dict[str, Any]]:
    """A line of the CSV per cell and kind of rates, sync first."""
    lines = []
    for key, runs in group.runs.items():
        cell, kind = key
        config = next(iter(runs.values())).point.config
        gap = group.gap(root, key)
        alone = {c.rows_late: (c, k) for c, k in group.runs if k == kind and not c.dense_late}
        lines.append(
            {
                "data": group.stream.name,
                "task": group.task,
                "optimizer_start": group.start,
                "rows_late": cell.rows_late,
                "dense_late": cell.dense_late,
                "rates": kind,
                "row_lr": config.rows.optimizer.lr,
                "lr": config.model.lr,
                "ranks": RANKS,
                "batch": config.batch,
                "updates": next(iter(runs.values())).summary["updates"],
                "seeds": gap.n,
                "seeds_planned": stream_of(group.stream.name).seeds,
                "redrawn": group.stream.is_drawn,
                "test_auc": mean_auc([*runs.values()], group.task),
                **gap_columns(gap),
                "drift_of_sync": group.drifts.get(cell.rows_late, math.nan)
                if key == (Cell(rows_late=cell.rows_late), "of sync")
                else math.nan,
                **columns_beside(
                    (cell.rows_late, cell.dense_late), alone, partial(group.gap, root, key)
                ),
            }
        )
    return lines


def delay_lines(group: Group, root: Path) -> list[dict[str, Any]]:
    """A line per snapshot of every cell whose rows alone are late, at sync's rates."""
    return [
        {**group.columns, "rows_late": cell.rows_late, **one}
        for (cell, kind) in group.runs
        if cell.rows_late and not cell.dense_late and kind == "of sync"
        for one in group.delays((cell, kind), root)[0]
    ]


def _outcome(name: str, what: str, value: float, ends: Ends, asked: Ends) -> dict[str, Any]:
    """What was asked, what came out, and whether it holds: where the whole 95 % interval does; it
    fails where none of it does, else it is open."""
    (from_, to), (low, high) = ends, asked
    inside, outside = low <= from_ and to <= high, to < low or from_ > high
    return {
        "hypothesis": name,
        "what": what,
        "value": value,
        "low_95": from_,
        "high_95": to,
        "asked_low": low,
        "asked_high": high,
        "outcome": "holds" if inside else "fails" if outside else "open",
    }


def drift_hypothesis_lines(gaps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """H5 of the plan, from the lines of all streams: whether the drift of sync orders the losses.

    A line per lateness of rows. The streams are those of the plan; the interval is what other seeds
    and test rows would change of the order. Of fewer than four streams nothing can be told.
    """
    from scipy.stats import spearmanr  # late: a second to import

    table: dict[int, list[Mapping[str, Any]]] = {}
    for line in gaps:
        if math.isfinite(line["drift_of_sync"]):
            table.setdefault(line["rows_late"], []).append(line)
    lines, draw = [], np.random.default_rng(0)
    for rows, own in sorted(table.items()):
        if len(own) < 2:
            continue
        drifts = [line["drift_of_sync"] for line in own]
        losses = np.array([-line["gap_to_sync"] for line in own])
        errors = [np.nansum([line["seeds_error"] ** 2, line["rows_error"] ** 2]) for line in own]
        drawn = losses + draw.normal(size=(RESAMPLES, len(own))) * np.sqrt(errors)
        ranks = [round(float(spearmanr(drifts, one)[0]), 9) for one in (losses, *drawn)]
        low, high = np.quantile(ranks[1:], [0.025, 0.975]) if len(own) >= 4 else (-1.0, 1.0)
        what = f"rank correlation of sync's drift and the loss, rows {rows} late"
        told = _outcome("H5", what, ranks[0], (float(low), float(high)), (0.8, 1.0))
        seeds = min(line["seeds"] for line in own)
        lines.append(
            {"data": f"{len(own)} streams", "optimizer_start": math.nan} | told | {"seeds": seeds}
        )
    return lines


def hypothesis_lines(group: Group, root: Path) -> list[dict[str, Any]]:
    """H1 to H4 and H6 of the plan on this stream; chosen rates have no interval."""
    lines: list[dict[str, Any]] = []

    def add(name: str, what: str, value: float, ends: Ends, asked: Ends, seeds: int) -> None:
        lines.append(group.columns | _outcome(name, what, value, ends, asked) | {"seeds": seeds})

    def add_gap(name: str, what: str, found: Interval, asked: Ends) -> None:
        ends = found.mean - found.half_width, found.mean + found.half_width
        add(name, what, found.mean, ends, asked, found.n)

    def own(rows: int, dense: int, kind: RatesOf = "own") -> Key:
        return Cell(rows_late=rows, dense_late=dense), kind

    for rows in (7, 16, 64):
        key = own(rows, 0, "of sync")
        (along, growth), n = group.delays(key, root), len(group.runs[key])
        end, low, high = (along[-1][f"behind{e}"] / rows for e in ("", "_low_95", "_high_95"))
        add("H1", f"growth of the delay a doubling, rows {rows} late", *growth, (-0.1, 0.1), n)
        add("H2", f"delay over lateness at the end, rows {rows} late", end, (low, high), (0.5, 2.0),
            n)  # fmt: skip
    dense = own(0, 7)
    costs = ((dense, (-0.5e-3, math.inf)), (own(0, 7, "of sync"), (-math.inf, -2e-3)))
    for key, asked in costs:
        add_gap("H3", f"gap of dense weights 7 late, rates {key[1]}", group.gap(root, key), asked)
    doublings = group.rates[dense[0]].dense - group.rates[SYNC].dense
    add("H3", "best dense rate with 7 late, in doublings of sync's", doublings,
        (doublings, doublings), (-math.inf, -1), len(group.runs[dense]))  # fmt: skip
    for rows in (7, 16, 64):
        beyond = group.gap(root, own(rows, 7), own(rows, 0), dense, more=[(SYNC, "own")])
        what = f"rows {rows} and dense 7 late, beyond the sum of both alone"
        add_gap("H4", what, beyond, (-0.5e-3, 0.5e-3))
    ahead = group.gap(root, own(16, 0), (Cell(batch_factor=2), "own"))
    add_gap("H6", "rows 16 late minus a doubling of the batch", ahead, (0.0, math.inf))
    return lines
