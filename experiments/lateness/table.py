"""From the stored runs to the study's tables: settings, their rates by the rule, and gaps.

Everything here is derived from the runs' file, on any machine, to the same bytes; no data set is
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.gaps import gap_columns
from experiments.lateness.parts import RateSearch, gap_of
from experiments.lateness.runs import RunsFile, StudyRun, run_of
from experiments.lateness.streams import (
    BUFFER,
    CELLS,
    LATE,
    ORIGINS,
    OWN,
    RANKS,
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


def gap_lines(study: LatenessStudy) -> list[Line]:
    """A line per setting, cell, rates and task of which some seed is done, sync first."""
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

                # A line a task, with the gap.
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
