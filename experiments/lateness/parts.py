"""The parts of the study in their order: which runs each wants, given what is known by then.

A part asks for runs by `Trainer.train` and reads what came out of `Trainer.file`. Rates are chosen
on the way, by `experiments.search`; the tables derive the same choices from the file alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from experiments.lateness.runs import (
    FIRST_TUNING_SEED,
    FLUSHED,
    TUNING_SEEDS,
    Record,
    RunsFile,
    StudyRun,
    run_of,
)
from experiments.lateness.streams import (
    APART,
    BUFFER,
    BUFFER_CELLS,
    CELLS,
    FEW_CELLS,
    FRESH_CELLS,
    LATE,
    LONG_CELLS,
    ORDER_CELLS,
    ORIGINS,
    PASSES,
    ROWS_16,
    SHUFFLED,
    SHUFFLED_WINDOW_CELLS,
    START_CELLS,
    SYNC,
    TAU_CELLS,
    TIME,
    VALIDATION,
    WHOLE_CELLS,
    WHOLE_TENNIS,
    WINDOW_CELLS,
    Cell,
    Stream,
)
from experiments.search import (
    BETTER,
    NO_RATE,
    SYNCS,
    Choice,
    Rates,
    best_of,
    choice_of,
    search_late,
    search_reference,
    to_try_of_cell,
)
from experiments.statistics import Interval, covariance_of_sums, over_seeds_and_rows, t_interval


class Trainer(Protocol):
    """Who trains what a part wants."""

    file: RunsFile
    plans_only: bool
    """Only counts what would be trained, so nothing new is known afterwards."""

    def train(self, runs: Sequence[StudyRun], what: str) -> None:
        """Train those of the runs that are not done; ``what`` they are, for the progress bar."""
        ...

    def fields(self, stream: Stream) -> Sequence[str]:
        """The stream's fields, each counted in the log where that is not done."""
        ...


def gap_of(
    file: RunsFile, terms: Sequence[tuple[float, Sequence[StudyRun]]], task: str | None = None
) -> Interval:
    """A sum of AUCs, each term's runs by seed with its factor, over seeds and test users.

    Seeds of which a run is missing are left out. Runs whose seeds have test samples of their own
    have no group sums: their interval is over seeds alone. NaN where no seed has all runs.
    """
    # Seed by seed the sum of the terms, where all of its runs are there.
    gaps = []
    sums = []
    for of_seed in zip(*(runs for _, runs in terms), strict=True):
        records = [file.by_run.get(run) for run in of_seed]
        if any(record is None for record in records):
            continue
        present = [record for record in records if record is not None]
        name = task or present[0].task
        factors = np.array([factor for factor, _ in terms])
        gaps.append(float(factors @ [record.auc[name] for record in present]))

        # What each user's rows add to it, where the runs share their test samples.
        parts = [file.sums(record.hash, name) for record in present]
        if all(part is not None for part in parts):
            sums.append(1e-3 * factors @ np.array(parts))

    # Over seeds alone, or over seeds and users together.
    if not gaps or len(sums) < len(gaps) or math.isnan(sum(gaps)):
        over_seeds = t_interval(gaps)
        error = over_seeds.n and float(np.std(gaps, ddof=over_seeds.n > 1)) / over_seeds.n**0.5
        rows_error = 0.0 if gaps and not sums else math.nan
        return Interval(over_seeds.mean, over_seeds.half_width, over_seeds.n, error, rows_error)
    return over_seeds_and_rows(np.array(gaps), covariance_of_sums(np.array(sums)))


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The search for rates on one stream with one start of Adagrad, as far as the file has it."""

    file: RunsFile
    stream: Stream
    start: float = 0.0

    def runs(self, cell: Cell, rates: Rates) -> list[StudyRun]:
        """The tuning runs of a cell at these rates, a seed each."""
        seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + TUNING_SEEDS)
        return [
            run_of(
                self.stream,
                cell,
                rates.row,
                rates.dense,
                seed,
                window=VALIDATION,
                start=self.start,
                arithmetic=self.file.arithmetic_of(self.stream),
            )
            for seed in seeds
        ]

    def tried(self, cell: Cell) -> dict[Rates, float]:
        """Mean validation AUC at all rates at which the cell has all its tuning runs."""
        by_rates: dict[Rates, list[Record]] = {}
        for record in self.file.like(self.runs(cell, Rates(row=0.0, dense=0.0))[0]):
            rates = Rates(row=record.run.row_lr, dense=record.run.dense_lr)
            by_rates.setdefault(rates, []).append(record)
        return {
            rates: float(np.mean([record.auc[record.task] for record in records]))
            for rates, records in sorted(by_rates.items())
            if len(records) == TUNING_SEEDS
        }

    def sync(self) -> Rates | None:
        """Sync's rates; None before its search has begun."""
        tried = self.tried(SYNC)
        return best_of(tried) if tried else None

    def gain(self, cell: Cell, rates: Rates, over: Rates) -> Interval:
        """Validation AUC of a cell at these rates minus that at others, paired by seed."""
        return gap_of(self.file, [(1, self.runs(cell, rates)), (-1, self.runs(cell, over))])

    def choice(self, cell: Cell) -> Choice | None:
        """The rates of a late cell by the rule; None before its search has ended."""
        sync = self.sync()
        if sync is None:
            return None
        if cell not in LATE:
            return Choice(rates=sync, outcome=SYNCS)
        tried = self.tried(cell)
        if to_try_of_cell(sync, tried, self.tried(SYNC)[sync]):
            return None
        return choice_of(sync, tried, lambda rates: self.gain(cell, rates, sync))


@dataclass(frozen=True, slots=True)
class CellSearch:
    """The search for the rates of one cell of it."""

    of: RateSearch
    cell: Cell

    def tried(self) -> dict[Rates, float]:
        """Mean validation AUC at all rates at which the cell has all its tuning runs."""
        return self.of.tried(self.cell)

    def gain(self, rates: Rates, over: Rates) -> Interval:
        """Validation AUC of the cell at these rates minus that at others, paired by seed."""
        return self.of.gain(self.cell, rates, over)


_RATES_OF_A_PLAN = Rates(row=0.05, dense=1e-3)
"""What a plan without runs is counted with."""


def search_sync(trainer: Trainer, stream: Stream, start: float = 0.0) -> Rates:
    """Train until sync's rates are known."""
    search = RateSearch(trainer.file, stream, start)
    train = partial(_train, trainer, "rates of sync")
    return search_reference(CellSearch(search, SYNC), train) or _RATES_OF_A_PLAN


def search_late_cells(
    trainer: Trainer, stream: Stream, cells: Iterable[Cell], start: float = 0.0
) -> dict[Cell, Choice]:
    """Train until the rates of these late cells are known, all of them side by side."""
    sync = search_sync(trainer, stream, start)
    search = RateSearch(trainer.file, stream, start)
    cells = [cell for cell in cells if cell in LATE]
    searches = [CellSearch(search, cell) for cell in cells]
    sync_auc = search.tried(SYNC).get(sync, math.nan)
    search_late(searches, sync, sync_auc, partial(_train, trainer, "rates of late cells"))
    choices = {cell: search.choice(cell) for cell in cells}
    return {cell: choice for cell, choice in choices.items() if choice is not None}


def _train(trainer: Trainer, what: str, asked: Sequence[tuple[CellSearch, Rates]]) -> bool:
    """Train cells at rates; False where that is only planned."""
    runs = [run for one, rates in asked for run in one.of.runs(one.cell, rates)]
    trainer.train(runs, what)
    return not trainer.plans_only


def finals(
    trainer: Trainer,
    stream: Stream,
    wanted: Iterable[tuple[Cell, Rates]],
    what: str,
    **other: Any,
) -> None:
    """Train cells at given rates, seed by seed, so that pairs are complete early."""
    other.setdefault("arithmetic", trainer.file.arithmetic_of(stream))
    wanted = list(wanted)
    runs = [
        run_of(stream, cell, rates.row, rates.dense, seed, **other)
        for seed in range(stream.seeds)
        for cell, rates in wanted
    ]
    trainer.train(runs, what)


def train_order(trainer: Trainer, stream: Stream) -> None:
    """The same training samples in time order and shuffled, at sync's rates."""
    if stream.is_drawn:
        return
    sync = search_sync(trainer, stream)
    both = [(cell, sync) for cell in ORDER_CELLS]
    finals(trainer, stream, both, "in time order")
    finals(trainer, stream, both, "shuffled", order=SHUFFLED)


def train_buffers(trainer: Trainer, stream: Stream) -> None:
    """The remedy: time order through shuffle buffers of several sizes."""
    if not stream.buffers:
        return
    sync = search_sync(trainer, stream)
    for buffer in stream.buffers:
        cells = [(cell, sync) for cell in BUFFER_CELLS]
        finals(trainer, stream, cells, f"buffer of {buffer:,}", order=f"{BUFFER}{buffer}")


def train_cells(trainer: Trainer, stream: Stream) -> None:
    """All cells at sync's rates, and at their own where the rule leaves sync's."""
    sync = search_sync(trainer, stream)
    finals(trainer, stream, [(cell, sync) for cell in CELLS], "cells at sync's rates")
    choices = search_late_cells(trainer, stream, LATE)
    chosen = [(cell, choice.rates) for cell, choice in choices.items() if choice.outcome == BETTER]
    finals(trainer, stream, chosen, "cells at rates of their own")


def train_starts(trainer: Trainer, stream: Stream) -> None:
    """Adagrad from other accumulators, each with rates of its own."""
    for start in stream.starts[1:]:
        sync = search_sync(trainer, stream, start)
        choices = search_late_cells(trainer, stream, START_CELLS, start)
        wanted = [(cell, sync) for cell in START_CELLS]
        wanted += [(cell, c.rates) for cell, c in choices.items() if c.outcome == BETTER]
        finals(trainer, stream, wanted, f"Adagrad from {start:.3g}", start=start)


def train_windows(trainer: Trainer, stream: Stream) -> None:
    """Earlier windows, at the rates that were chosen on the stream's end."""
    if not stream.has_windows:
        return
    sync = search_sync(trainer, stream)
    choices = search_late_cells(trainer, stream, WINDOW_CELLS)
    chosen = {cell: sync for cell in WINDOW_CELLS}
    chosen |= {cell: c.rates for cell, c in choices.items() if c.outcome != NO_RATE}
    for window in ORIGINS:
        finals(trainer, stream, chosen.items(), window, window=window)


def train_shuffled_windows(trainer: Trainer, stream: Stream) -> None:
    """Windows as before, behind shuffled training samples, at sync's rates."""
    if not stream.has_windows:
        return
    sync = search_sync(trainer, stream)
    cells = [(cell, sync) for cell in SHUFFLED_WINDOW_CELLS]
    for window in ORIGINS:
        finals(trainer, stream, cells, f"{window}, shuffled", window=window, order=SHUFFLED)


def train_long(trainer: Trainer, stream: Stream) -> None:
    """Longer runs on a drawn stream, at sync's rates."""
    if stream.long_updates is None:
        return
    sync = search_sync(trainer, stream)
    cells = [(cell, sync) for cell in LONG_CELLS]
    finals(trainer, stream, cells, "long runs", updates=stream.long_updates)


def train_taus(trainer: Trainer, stream: Stream) -> None:
    """The lateness that one takes, in both orders, at sync's rates."""
    if stream.is_drawn:
        return
    sync = search_sync(trainer, stream)
    cells = [(cell, sync) for cell in TAU_CELLS]
    for order in (TIME, SHUFFLED):
        finals(
            trainer, stream, cells, f"rows 1 to 39 late, {order}", order=order, arithmetic=FLUSHED
        )


def train_passes(trainer: Trainer, stream: Stream) -> None:
    """Several passes over the same rows, in time order."""
    if stream.is_drawn:
        return
    sync = search_sync(trainer, stream)
    cells = [(cell, sync) for cell in FEW_CELLS]
    for passes in PASSES:
        finals(trainer, stream, cells, f"{passes} passes", passes=passes, arithmetic=FLUSHED)


def train_splits(trainer: Trainer, stream: Stream) -> None:
    """The same stream cut another way."""
    if not stream.other_split:
        return
    sync = search_sync(trainer, stream)
    cells = [(cell, sync) for cell in FEW_CELLS]
    split = stream.other_split
    finals(trainer, stream, cells, f"split by {split}", split=split, arithmetic=FLUSHED)


def train_whole(trainer: Trainer, stream: Stream) -> None:
    """The longest real stream as a whole, in both orders, at rates of its own."""
    if stream.name != WHOLE_TENNIS.name:
        return
    sync = search_sync(trainer, WHOLE_TENNIS)
    cells = [(cell, sync) for cell in WHOLE_CELLS]
    for order in (TIME, SHUFFLED):
        finals(trainer, WHOLE_TENNIS, cells, f"whole, {order}", order=order)


def train_fresh(trainer: Trainer, stream: Stream) -> None:
    """One field fresh and all others late, beside all late and sync, at sync's rates; each field in
    a table of its own."""
    if not stream.fresh_fields:
        return
    sync = search_sync(trainer, stream)
    for cells, fresh in ((FEW_CELLS, APART), *((FRESH_CELLS, f) for f in stream.fresh_fields)):
        wanted = [(cell, sync) for cell in cells]
        finals(trainer, stream, wanted, f"fresh: {fresh}", fresh=fresh, arithmetic=FLUSHED)


def train_fields(trainer: Trainer, stream: Stream) -> None:
    """Each field fresh in turn while all others are late, and each left out of a sync run."""
    if not stream.fresh_fields:
        return
    sync = search_sync(trainer, stream)
    apart = {"arithmetic": FLUSHED}
    finals(trainer, stream, [(SYNC, sync), (ROWS_16, sync)], "all fields", fresh=APART, **apart)
    for field in trainer.fields(stream):
        finals(trainer, stream, [(ROWS_16, sync)], f"fresh: {field}", fresh=field, **apart)
        what = f"without {field}"
        finals(trainer, stream, [(SYNC, sync)], what, fresh=APART, without=field, **apart)


PARTS: dict[str, Callable[[Trainer, Stream], None]] = {
    "order": train_order,
    "buffers": train_buffers,
    "cells": train_cells,
    "starts": train_starts,
    "windows": train_windows,
    "long": train_long,
    "windows-shuffled": train_shuffled_windows,
    "taus": train_taus,
    "passes": train_passes,
    "splits": train_splits,
    "whole": train_whole,
    "fresh": train_fresh,
    "fields": train_fields,
}
"""Name -> what trains it on one stream, in the order of the plan."""
