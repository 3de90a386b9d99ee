"""The second plan from the stored runs: the tau that one takes, passes, splits, and fresh fields.

Tables, and the five hypotheses F1 to F5 of docs/results/plan.md. A gap never mixes two arithmetics
(`runs.FLUSHED`), so every run here has sync runs of its own beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from experiments.gaps import gap_columns
from experiments.lateness.hypotheses import Hypothesis, Statement, above, below, rank_order
from experiments.lateness.logs import FieldFacts
from experiments.lateness.runs import FLUSHED
from experiments.lateness.streams import (
    APART,
    FEW_CELLS,
    FRESH_CELLS,
    PASSES,
    ROWS_16,
    SHUFFLED,
    SYNC,
    TAU_CELLS,
    TIME,
    WHOLE_CELLS,
    WHOLE_TENNIS,
    Cell,
    Stream,
)
from experiments.lateness.table import LatenessStudy, Line, StreamSetting
from experiments.search import Rates
from experiments.statistics import Interval

LOSES = 2e-3
"""AUC that rows 16 late must lose on a stream for a hypothesis to be judged on it (the plan)."""
GIVES_BACK, GIVES_BACK_LITTLE = 0.5, 0.2
"""Shares of the loss (F1, F2)."""
PASS_KEEPS = 0.5
"""Share of the loss of one pass that is left by two (F3)."""
ORDERED_BY_MISSED = 0.6
"""Rank correlation (F5); that of F4 is `hypotheses.RANK_CORRELATION`."""
RIGHT_STREAMS = 3
"""Streams on which the order of F5 must have the right sign."""


def tau_lines(study: LatenessStudy) -> list[Line]:
    """What the second plan trained: a line per stream, order, passes, split, cell and task, with
    the gap to sync, and of async that to rows alone as late, at sync's rates."""
    lines = []
    for setting, cells in _tau_settings(study.streams):
        sync = study.search(setting.stream).sync()
        for cell in cells if sync is not None else ():
            runs = study.runs(setting, cell, sync)
            records = [study.file.by_run[run] for run in runs if run in study.file.by_run]
            of_sync = [(-1.0, study.runs(setting, SYNC, sync))]
            of_rows = [(-1.0, study.runs(setting, replace(cell, dense_late=0), sync))]

            # A line a task. Sync has no gap, and rows alone have none to themselves.
            for task in records[0].auc if records else ():
                gap = study.gap([(1.0, runs)], of_sync, task=task)
                beside = Interval(math.nan, math.nan, 0)
                if cell.dense_late:
                    beside = study.gap([(1.0, runs)], of_rows, task=task)
                lines.append(
                    {
                        "data": setting.stream.key,
                        "order": setting.order,
                        "passes": setting.passes,
                        "split": setting.split or "own",
                        "task": task,
                        "rows_late": cell.rows_late,
                        "dense_late": cell.dense_late,
                        "row_lr": sync.row,
                        "lr": sync.dense,
                        "batch": runs[0].batch,
                        "updates": records[0].trained_updates,
                        "seeds": gap.n if cell != SYNC else len(records),
                        "seeds_planned": setting.stream.seeds,
                        "test_auc": float(np.mean([r.auc[task] for r in records])),
                        "log_loss": float(np.mean([r.log_loss[task] for r in records])),
                        **gap_columns(gap),
                        **gap_columns(beside, "gap_to_rows_late"),
                    }
                )
    return lines


def fresh_lines(study: LatenessStudy) -> list[Line]:
    """One field fresh: a line per stream, field, cell and task, with the gaps to sync and to all
    rows as late, and the share of the loss that freshness gives back."""
    lines = []
    for stream in study.streams:
        apart = StreamSetting(stream=stream, fresh=APART, arithmetic=FLUSHED)
        sync = study.search(stream).sync()
        for field in stream.fresh_fields if sync is not None else ():
            setting = replace(apart, fresh=field)
            for cell in FRESH_CELLS:
                runs = study.runs(setting, cell, sync)
                records = [study.file.by_run[run] for run in runs if run in study.file.by_run]
                of_sync = [(-1.0, study.runs(apart, SYNC, sync))]
                late = study.runs(apart, cell, sync)
                for task in records[0].auc if records else ():
                    loss = study.gap([(1.0, late)], of_sync, task=task)
                    gap = study.gap([(1.0, runs)], of_sync, task=task)
                    back = study.gap([(1.0, runs)], [(-1.0, late)], task=task)
                    lines.append(
                        {
                            "data": stream.key,
                            "task": task,
                            "fresh": field,
                            "rows_late": cell.rows_late,
                            "seeds": gap.n,
                            "seeds_planned": stream.seeds,
                            "test_auc": float(np.mean([r.auc[task] for r in records])),
                            **gap_columns(gap),
                            **gap_columns(loss, "gap_of_all_late"),
                            **gap_columns(back, "gap_to_all_late"),
                            "given_back": back.mean / -loss.mean if loss.mean else math.nan,
                        }
                    )
    return lines


def _tau_settings(streams: Sequence[Stream]) -> Iterator[tuple[StreamSetting, Sequence[Cell]]]:
    """Every setting of the second plan with its cells."""
    flushed = {"arithmetic": FLUSHED}
    for stream in streams:
        if stream.is_drawn:
            continue
        for order in (TIME, SHUFFLED):
            yield StreamSetting(stream=stream, order=order, **flushed), TAU_CELLS
        for passes in PASSES:
            yield StreamSetting(stream=stream, passes=passes, **flushed), FEW_CELLS
        if stream.other_split:
            yield StreamSetting(stream=stream, split=stream.other_split, **flushed), FEW_CELLS
        if stream.name == WHOLE_TENNIS.name:
            for order in (TIME, SHUFFLED):
                yield StreamSetting(stream=WHOLE_TENNIS, order=order), WHOLE_CELLS


def _apart(stream: Stream) -> StreamSetting:
    """Runs in which each field has a table of its own."""
    return StreamSetting(stream=stream, fresh=APART, arithmetic=FLUSHED)


def given_back(study: LatenessStudy, stream: Stream, field: str) -> Interval:
    """What rows 16 late gain when this field is fresh."""
    sync = study.search(stream).sync()
    if sync is None:
        return Interval(math.nan, math.nan, 0)
    late = _apart(stream)
    fresh = study.runs(replace(late, fresh=field), ROWS_16, sync)
    return study.gap([(1.0, fresh), (-1.0, study.runs(late, ROWS_16, sync))])


def worth(study: LatenessStudy, stream: Stream, field: str) -> Interval:
    """What a synchronous run loses when the model does not see this field."""
    sync = study.search(stream).sync()
    if sync is None:
        return Interval(math.nan, math.nan, 0)
    whole = _apart(stream)
    without = study.runs(replace(whole, without=field), SYNC, sync)
    return study.gap([(1.0, study.runs(whole, SYNC, sync)), (-1.0, without)])


def field_lines(study: LatenessStudy, facts: Sequence[FieldFacts]) -> list[Line]:
    """A line per field of a stream: what was counted of it, what its freshness gives back, and what
    it is worth; for the stream's first task."""
    streams = {stream.key: stream for stream in study.streams}
    lines = []
    for one in (fact for fact in facts if fact.stream in streams):
        stream = streams[one.stream]
        back = given_back(study, stream, one.field)
        value = worth(study, stream, one.field)
        lines.append(
            {
                "data": stream.key,
                "field": one.field,
                "b_4": one.b_4,
                "b_16": one.b_16,
                "missed_half_16": one.missed_half_16,
                "seeds": min(back.n, value.n),
                "seeds_planned": stream.seeds,
                **gap_columns(back, "given_back"),
                **gap_columns(value, "worth"),
            }
        )
    return lines


def _with_fields(study: LatenessStudy) -> list[Stream]:
    return [stream for stream in study.streams if stream.fresh_fields]


def _where_it_loses(
    study: LatenessStudy,
    name: str,
    says: str,
    of_stream: Callable[[Stream, Rates], tuple[Interval, Interval, Statement]],
) -> Hypothesis:
    """What is said of each stream on which rows 16 late lose enough for the question to be asked.

    ``of_stream``: what they lose on a stream, at sync's rates; something whose seeds say whether
    the other runs are done; and the statement.
    """
    statements = []
    missing = []
    for stream in _with_fields(study):
        sync = study.search(stream).sync()
        if sync is None:
            missing.append(stream.key)
            continue
        loss, others, statement = of_stream(stream, sync)
        loses = loss.mean - loss.half_width > LOSES
        if loss.n < stream.seeds or (loses and others.n < stream.seeds):
            missing.append(stream.key)
        if loses:
            statements.append(statement)
    return Hypothesis(
        name=name,
        says=says,
        statements=statements,
        complete=bool(statements) and not missing,
        missing=", ".join(missing),
    )


def share_hypothesis(
    study: LatenessStudy, name: str, says: str, share: float, place: int
) -> Hypothesis:
    """F1, F2: of what rows 16 late lose, the stream's first fresh field gives back more than a
    share, or its second one less. ``place``: 0 or 1."""

    def of_stream(stream: Stream, sync: Rates) -> tuple[Interval, Interval, Statement]:
        apart = _apart(stream)
        of_sync = study.runs(apart, SYNC, sync)
        late = study.runs(apart, ROWS_16, sync)
        field = stream.fresh_fields[place]
        fresh = study.runs(replace(apart, fresh=field), ROWS_16, sync)

        # What is given back, less the share of the loss, as one sum of paired runs.
        beyond = study.gap([(1.0, fresh), (share - 1.0, late), (-share, of_sync)])
        what = f"{stream.key}: `{field}` fresh gives back, less {share:g} of the loss"
        loss = study.gap([(1.0, of_sync), (-1.0, late)])
        return loss, study.gap([(1.0, fresh)]), (below if place else above)(what, beyond, 0.0)

    return _where_it_loses(study, name, says, of_stream)


def pass_hypothesis(study: LatenessStudy) -> Hypothesis:
    """F3: a second pass halves what rows 16 late lose."""

    def of_stream(stream: Stream, sync: Rates) -> tuple[Interval, Interval, Statement]:
        # What one pass loses, and two.
        of_passes = (
            StreamSetting(stream=stream, passes=passes, arithmetic=FLUSHED) for passes in (1, 2)
        )
        once, twice = (
            [(1.0, study.runs(setting, SYNC, sync)), (-1.0, study.runs(setting, ROWS_16, sync))]
            for setting in of_passes
        )

        # Paired by seed, so that what both have in common falls out.
        less = [(-PASS_KEEPS * factor, runs) for factor, runs in once]
        what = f"{stream.key}: loss of two passes, less {PASS_KEEPS:g} of that of one"
        statement = below(what, study.gap(twice, less), 0.0)
        return study.gap(once), study.gap(twice), statement

    says = "with a second pass rows 16 late lose less than half of what they lose with one"
    return _where_it_loses(study, "F3", says, of_stream)


def field_hypotheses(study: LatenessStudy, facts: Sequence[FieldFacts]) -> list[Hypothesis]:
    """F4 and F5: what orders the fields by what their freshness gives back."""
    # Of each field what was foreseen and what came out, where both have all their runs.
    streams = {stream.key: stream for stream in _with_fields(study)}
    missing = set(streams) - {one.stream for one in facts}
    backs: list[Interval] = []
    bursts: list[float] = []
    missed: list[float] = []
    of_stream: list[str] = []
    for one in (fact for fact in facts if fact.stream in streams):
        stream = streams[one.stream]
        back = given_back(study, stream, one.field)
        value = worth(study, stream, one.field)
        if min(back.n, value.n) < stream.seeds:
            missing.add(stream.key)
            continue
        backs.append(back)
        bursts.append(one.b_4)
        missed.append(one.missed_half_16 * value.mean)
        of_stream.append(one.stream)

    # An order of fewer than four says nothing.
    by_burst = []
    by_missed = []
    if len(backs) >= 4:
        told = f"what the field's freshness gives back, {len(backs)} fields"
        by_burst.append(rank_order(f"rank correlation of b(4) and {told}", bursts, backs))
        what = f"rank correlation of missed lookups times worth and {told}"
        by_missed.append(rank_order(what, missed, backs, ORDERED_BY_MISSED))
        by_missed.append(_right_streams(missed, backs, of_stream))
    says = {
        "F4": "b(4) orders what the freshness of a field gives back",
        "F5": "the share of lookups that miss half of their row's updates, times what the field is"
        " worth, orders what its freshness gives back",
    }
    # They ask for all fields of all streams: of some of them alone they decide nothing.
    return [
        Hypothesis(
            name=name,
            says=says[name],
            statements=[] if missing else statements,
            complete=bool(statements) and not missing,
            missing=", ".join(sorted(missing)),
            beside=statements if missing else [],
        )
        for name, statements in (("F4", by_burst), ("F5", by_missed))
    ]


def _right_streams(
    measure: Sequence[float], backs: Sequence[Interval], of_stream: Sequence[str]
) -> Statement:
    """On how many streams the order has the right sign."""
    # The rank correlation over each stream's fields alone.
    keys = sorted(set(of_stream))
    orders = []
    for key in keys:
        mine = [number for number, owner in enumerate(of_stream) if owner == key]
        orders.append(
            rank_order(key, [measure[n] for n in mine], [backs[n] for n in mine], least=0.0)
        )

    # The chance that so many are positive, were the errors drawn anew: stream by stream.
    chances = np.zeros(len(keys) + 1)
    chances[0] = 1.0
    for order in orders:
        chances = chances * order.p_holds + np.roll(chances, 1) * (1 - order.p_holds)
    reached = float(chances[RIGHT_STREAMS:].sum())
    return Statement(
        what=f"streams of {len(keys)} on which the order has the right sign",
        value=float(sum(order.value > 0 for order in orders)),
        low=math.nan,
        high=math.nan,
        asked=f">= {RIGHT_STREAMS}",
        p_holds=1 - reached,
        p_fails=reached,
        n=len(keys),
    )


def second_hypotheses(study: LatenessStudy, facts: Sequence[FieldFacts]) -> list[Hypothesis]:
    """The five of the second plan, in its order."""
    more = "the burstiest field fresh gives back at least half of the loss"
    less = "another field fresh gives back less than a fifth of the loss"
    return [
        share_hypothesis(study, "F1", more, GIVES_BACK, place=0),
        share_hypothesis(study, "F2", less, GIVES_BACK_LITTLE, place=1),
        pass_hypothesis(study),
        *field_hypotheses(study, facts),
    ]
