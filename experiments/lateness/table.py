"""From the stored runs to the study's tables: gaps with intervals, rates tried, delays, a forest.

Everything here is derived from the runs' file (and from that of the logs), on any machine, to the
same bytes; no data set is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.gaps import gap_columns
from experiments.lateness.delays import delays
from experiments.lateness.logs import LogFacts
from experiments.lateness.parts import RateSearch, gap_of
from experiments.lateness.runs import RunsFile, StudyRun, run_of
from experiments.lateness.streams import (
    ASYNC_0,
    BUFFER,
    CELLS,
    LATE,
    ORIGINS,
    OWN,
    RANKS,
    ROWS_7,
    ROWS_16,
    SHUFFLED,
    SYNC,
    TEST,
    TIME,
    Cell,
    Stream,
)
from experiments.search import NO_RATE, Rates
from experiments.statistics import Interval

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetting:
    """Under which circumstances runs of a stream are compared with each other."""

    stream: Stream
    order: str = TIME
    window: str = TEST
    start: float = 0.0
    updates: int | None = None
    """Length of the synchronous run of a drawn stream; None: its passes."""
    passes: int = 1
    split: str = OWN
    arithmetic: str | None = None
    """None: that of the stream's first runs."""
    fresh: str = ""
    without: str = ""


class LatenessStudy:
    """What the runs' file says of each setting: rates by the rule, runs, gaps to sync."""

    def __init__(self, file: RunsFile, streams: Sequence[Stream]) -> None:
        self.file = file
        self.streams = streams

    def search(self, stream: Stream, start: float = 0.0) -> RateSearch:
        """The search for rates, which all orders, windows and lengths share."""
        return RateSearch(self.file, stream, start)

    def runs(self, setting: StreamSetting, cell: Cell, rates: Rates) -> list[StudyRun]:
        """The final runs of a cell, a planned seed each, whether they are done or not."""
        return [
            run_of(
                setting.stream,
                cell,
                rates.row,
                rates.dense,
                seed,
                order=setting.order,
                window=setting.window,
                start=setting.start,
                updates=setting.updates,
                passes=setting.passes,
                split=setting.split,
                fresh=setting.fresh,
                without=setting.without,
                arithmetic=setting.arithmetic or self.file.arithmetic_of(setting.stream),
            )
            for seed in range(setting.stream.seeds)
        ]

    def rates(self, setting: StreamSetting, cell: Cell) -> Rates | None:
        """The cell's rates by the rule; None before its search has ended, or where it found none.

        Orders and lengths are compared at sync's rates, so that nothing else differs.
        """
        search = self.search(setting.stream, setting.start)
        if setting.order != TIME or setting.updates != setting.stream.updates:
            return search.sync()
        choice = search.choice(cell)
        return None if choice is None or choice.outcome == NO_RATE else choice.rates

    def terms(
        self, setting: StreamSetting, cell: Cell, rates: Rates | None = None, factor: float = 1.0
    ) -> list[tuple[float, list[StudyRun]]]:
        """The gap of a cell to sync as terms of `gap_of`; at the rule's rates unless given."""
        sync = self.search(setting.stream, setting.start).sync()
        rates = rates or self.rates(setting, cell)
        if sync is None or rates is None:
            return []
        return [
            (factor, self.runs(setting, cell, rates)),
            (-factor, self.runs(setting, SYNC, sync)),
        ]

    def gap(self, *terms: list[tuple[float, list[StudyRun]]], task: str | None = None) -> Interval:
        """The sum of such terms; without runs NaN, of no seeds."""
        if any(not part for part in terms):
            return Interval(math.nan, math.nan, 0)
        return gap_of(self.file, [term for part in terms for term in part], task)

    def settings(self) -> Iterator[StreamSetting]:
        """Every setting that the plan has, stream by stream."""
        for stream in self.streams:
            yield StreamSetting(stream=stream, updates=stream.updates)
            if not stream.is_drawn:
                yield StreamSetting(stream=stream, order=SHUFFLED)
            for buffer in stream.buffers:
                yield StreamSetting(stream=stream, order=f"{BUFFER}{buffer}")
            for start in stream.starts[1:]:
                yield StreamSetting(stream=stream, start=start, updates=stream.updates)
            if stream.has_windows:
                for window in ORIGINS:
                    yield StreamSetting(stream=stream, window=window)
                    yield StreamSetting(stream=stream, window=window, order=SHUFFLED)
            if stream.long_updates is not None:
                yield StreamSetting(stream=stream, updates=stream.long_updates)


def gap_lines(study: LatenessStudy, logs: Mapping[tuple[str, str], LogFacts]) -> list[Line]:
    """A line per setting, cell, rates and task of which some seed is done, sync first; with what is
    known of the log by ``logs`` (by stream and order)."""
    # Each setting's cells at sync's rates, and at the chosen ones where these are others.
    lines = []
    for setting in study.settings():
        search = study.search(setting.stream, setting.start)
        sync = search.sync()
        if sync is None:
            continue
        for cell in CELLS:
            chosen = study.rates(setting, cell)
            for rates in dict.fromkeys(r for r in (sync, chosen) if r is not None):
                runs = study.runs(setting, cell, rates)
                records = [study.file.by_run[run] for run in runs if run in study.file.by_run]
                facts = logs.get((setting.stream.key, setting.order))

                # A line a task, with the gap and what is known of the log.
                for task in records[0].auc if records else ():
                    gap = study.gap(study.terms(setting, cell, rates), task=task)
                    lines.append(
                        _columns_of(setting)
                        | {
                            "task": task,
                            "rows_late": cell.rows_late,
                            "dense_late": cell.dense_late,
                            "rates": "of sync" if rates == sync else "own",
                            "chosen": rates == chosen,
                            "row_lr": rates.row,
                            "lr": rates.dense,
                            "ranks": RANKS,
                            "batch": runs[0].batch,
                            "updates": records[0].trained_updates,
                            "seeds": gap.n if cell != SYNC or rates != sync else len(records),
                            "seeds_planned": setting.stream.seeds,
                            "redrawn": setting.stream.is_drawn,
                            "test_auc": float(np.mean([r.auc[task] for r in records])),
                            "log_loss": float(np.mean([r.log_loss[task] for r in records])),
                            **gap_columns(gap),
                            **_beside_hybrid(study, setting, cell, rates, task),
                            "b_16": facts.b_16 if facts else math.nan,
                            "drift_16": facts.drift_16 if facts else math.nan,
                        }
                    )
    return lines


def _columns_of(setting: StreamSetting) -> Line:
    """Whose line it is."""
    return {
        "data": setting.stream.key,
        "order": setting.order,
        "window": setting.window,
        "optimizer_start": setting.start,
    }


def _beside_hybrid(
    study: LatenessStudy, setting: StreamSetting, cell: Cell, rates: Rates, task: str
) -> dict[str, Any]:
    """The gap of a cell that is as late as async to rows alone as late, or the next later, at the
    rates that the rule chose there."""
    hybrids = [one for one in LATE if not one.dense_late and one.rows_late >= cell.rows_late]
    gap = Interval(math.nan, math.nan, 0)
    rows_late = None
    if cell.rows_late and cell.dense_late and hybrids:
        hybrid = min(hybrids, key=lambda one: one.rows_late)
        rows_late = hybrid.rows_late
        terms = study.terms(setting, hybrid, factor=-1.0)
        gap = study.gap(study.terms(setting, cell, rates), terms, task=task)
    return {"hybrid_rows_late": rows_late, **gap_columns(gap, "gap_to_hybrid")}


def delay_lines(study: LatenessStudy) -> list[Line]:
    """A line per cell of a drawn stream whose rows alone are late: its delay behind sync, at sync's
    rates, by length of the run."""
    # Drawn streams alone: their curves can be told apart from noise.
    lines = []
    for setting in study.settings():
        if not setting.stream.is_drawn or setting.start:
            continue
        sync = study.search(setting.stream).sync()
        for cell in (one for one in LATE if not one.dense_late and sync is not None):
            runs = zip(
                study.runs(setting, SYNC, sync), study.runs(setting, cell, sync), strict=True
            )

            # Pairs of a seed, at the same updates.
            known = study.file.by_run
            pairs = [(known[a], known[b]) for a, b in runs if a in known and b in known]
            if len(pairs) < 2:
                continue
            updates = sorted(pairs[0][0].snapshots)
            curves = np.array([[[r.snapshots[u] for u in updates] for r in p] for p in pairs])
            measured = delays(updates, curves[:, 0], curves[:, 1])
            lines.append(
                _columns_of(setting)
                | {
                    "rows_late": cell.rows_late,
                    "updates": updates[-1],
                    "draws": len(pairs),
                    "delay": measured.delay,
                    "delay_low_95": measured.low,
                    "delay_high_95": measured.high,
                    "slope": measured.slope,
                }
            )
    return lines


COLUMNS_OF_EMPTY = {
    "_moderator": (
        "data",
        "optimizer_start",
        "mean_square_gradient",
        "s",
        "rows_late",
        "dense_late",
        "seeds",
        "loss",
        "loss_half_width_95",
    ),
    "_forest": (
        "rows_late",
        "dense_late",
        "data",
        "window",
        "seeds",
        "loss",
        "loss_half_width_95",
    ),
    "_tau": ("data", "order", "passes", "split", "task", "rows_late", "dense_late"),
    "_delays": (
        "data",
        "order",
        "window",
        "optimizer_start",
        "rows_late",
        "updates",
        "draws",
        "delay",
        "delay_low_95",
        "delay_high_95",
        "slope",
    ),
}
"""Headers of tables that hold nothing before their parts have run, by the ends of their names."""

MODERATED = (ROWS_7, ROWS_16, ASYNC_0)


def moderator_lines(study: LatenessStudy, logs: Mapping[tuple[str, str], LogFacts]) -> list[Line]:
    """The losses of late cells, in thousandths, against s: the accumulator that Adagrad starts
    from over the mean squared row gradient of sync's first updates."""
    # Streams with several starts, and a log that says how large gradients are.
    lines = []
    for stream in study.streams:
        facts = logs.get((stream.key, TIME))
        for start in stream.starts if facts is not None and len(stream.starts) > 1 else ():
            setting = StreamSetting(stream=stream, start=start, updates=stream.updates)
            for cell in MODERATED:
                gap = study.gap(study.terms(setting, cell))
                if gap.n < 2 or facts is None:
                    continue
                lines.append(
                    {
                        "data": stream.key,
                        "optimizer_start": start,
                        "mean_square_gradient": facts.mean_square_gradient,
                        "s": start / facts.mean_square_gradient,
                        "rows_late": cell.rows_late,
                        "dense_late": cell.dense_late,
                        "seeds": gap.n,
                        "loss": -gap.mean,
                        "loss_half_width_95": gap.half_width,
                    }
                )
    return lines
