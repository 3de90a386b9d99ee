"""What rows 16 late and both 7 late lose on every real stream and window, and pooled over streams.

Derived from the stored runs alone, as all of the study's tables.
"""

from __future__ import annotations

import math

import numpy as np

from experiments.lateness.streams import ASYNC_0, ROWS_16, TIME, Cell
from experiments.lateness.table import LatenessStudy, Line
from experiments.statistics import Interval

FOREST_CELLS = (ROWS_16, ASYNC_0)


def forest_lines(study: LatenessStudy) -> list[Line]:
    """The losses of rows 16 late and of both 7 late on the real streams and their windows, in
    thousandths, and of each cell a line that pools the streams (random effects of DerSimonian and
    Laird, Control. Clin. Trials 7, 1986; a stream's windows are its mean first)."""
    lines = []
    for cell in FOREST_CELLS:
        of_stream: dict[str, list[Interval]] = {}
        for setting in study.settings():
            if setting.stream.is_drawn or setting.order != TIME or setting.start:
                continue
            gap = study.gap(study.terms(setting, cell))
            if gap.n < 2:
                continue
            loss = Interval(-gap.mean, gap.half_width, gap.n, gap.seeds_error, gap.rows_error)
            of_stream.setdefault(setting.stream.key, []).append(loss)
            lines.append(_forest_line(cell, setting.stream.key, setting.window, loss))
        if len(of_stream) > 1:
            lines.append(_forest_line(cell, "all streams", "pooled", pooled(of_stream)))
    return lines


def _forest_line(cell: Cell, data: str, window: str, loss: Interval) -> Line:
    return {
        "rows_late": cell.rows_late,
        "dense_late": cell.dense_late,
        "data": data,
        "window": window,
        "seeds": loss.n,
        "loss": loss.mean,
        "loss_half_width_95": loss.half_width,
    }


def pooled(of_stream: dict[str, list[Interval]]) -> Interval:
    """One mean over streams, whose true values differ, with an interval over streams."""
    from scipy.special import stdtrit  # late, as in `statistics`

    # One mean and one variance a stream.
    means = np.array([np.mean([one.mean for one in intervals]) for intervals in of_stream.values()])
    variances = np.array(
        [
            np.mean([_variance(one) for one in intervals]) / len(intervals)
            for intervals in of_stream.values()
        ]
    )

    # How much streams differ beyond their own errors (DerSimonian and Laird 1986).
    weights = 1 / variances
    fixed = float(weights @ means / weights.sum())
    excess = float(weights @ (means - fixed) ** 2) - (len(means) - 1)
    between = max(0.0, excess / (weights.sum() - (weights**2).sum() / weights.sum()))

    # Weighted by both; few streams need Student's t.
    weights = 1 / (variances + between)
    mean = float(weights @ means / weights.sum())
    error = float(weights.sum() ** -0.5)
    half_width = float(stdtrit(len(means) - 1, 0.975)) * error
    return Interval(mean, half_width, len(means))


def _variance(interval: Interval) -> float:
    rows = 0.0 if math.isnan(interval.rows_error) else interval.rows_error
    return interval.seeds_error**2 + rows**2
