"""Ratios of throughput: of the published bars with the error of reading, and of the simulator."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from experiments.paper.evidence import Row
from experiments.paper.verdicts import Found

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
SCALING = (
    ("taobao-ad Persia hybrid", 1, 8),
    ("taobao-ad Persia hybrid", 2, 8),
    ("avazu-ad Persia hybrid", 1, 8),
    ("avazu-ad Persia hybrid", 2, 8),
    ("kwai-video hybrid", 8, 64),
)
"""Series, and from how many GPUs to how many."""
SIZES = "100T cluster hybrid"


def plotted_ratio(rows: Sequence[Row], above: str, below: str, gpus: int) -> tuple[Found, ...]:
    """One published rate over another."""
    top, bottom = _published(rows, above, gpus), _published(rows, below, gpus)
    if top is None or bottom is None:
        return ()
    return (_read_off(f"{gpus} GPUs", top, bottom, *(reading_error(s) for s in (above, below))),)


def simulated_ratio(rows: Sequence[Row], above: str, below: str, gpus: int) -> tuple[Found, ...]:
    """The simulator's, within its largest errors on points of the same kind of both series."""
    top, bottom = _point(rows, above, gpus), _point(rows, below, gpus)
    if top is None or bottom is None:
        return ()
    ratio = float(top["model"]) / float(bottom["model"])
    band = sum(_largest_error(rows, row) for row in (top, bottom))
    return (_simulated(f"{gpus} GPUs", ratio, band, [top, bottom]),)


def plotted_efficiencies(rows: Sequence[Row]) -> tuple[Found, ...]:
    """Speed-up over the ratio of GPUs, as published."""
    found = []
    for series, few, many in SCALING:
        top, bottom = _published(rows, series, many), _published(rows, series, few)
        if top is not None and bottom is not None:
            error = reading_error(series)
            label = f"{series}, {few} to {many} GPUs"
            found.append(_read_off(label, top, bottom, error, error, many / few))
    return tuple(found)


def efficiencies(rows: Sequence[Row]) -> tuple[Found, ...]:
    """The same of the simulator."""
    found = []
    for series, few, many in SCALING:
        top, bottom = _point(rows, series, many), _point(rows, series, few)
        if top is not None and bottom is not None:
            share = float(top["model"]) / float(bottom["model"]) * few / many
            label = f"{series}, {few} to {many} GPUs"
            band = _largest_error(rows, top) + _largest_error(rows, bottom)
            found.append(_simulated(label, share, band, [top, bottom]))
    return tuple(found)


def plotted_deviations(rows: Sequence[Row]) -> tuple[Found, ...]:
    """The lowest and the highest published rate of the sizes over the mean of all."""
    points = [row for row in rows if row["series"] == SIZES]
    mean, error = _mean(points, "published"), reading_error(SIZES)
    return tuple(
        Found(
            label=row["label"],
            value=float(row["published"]) / mean,
            low=(float(row["published"]) - error) / mean,
            high=(float(row["published"]) + error) / mean,
        )
        for row in _ends(points, "published")
    )


def deviations(rows: Sequence[Row]) -> tuple[Found, ...]:
    """The same of the simulator."""
    points = [row for row in rows if row["series"] == SIZES]
    mean = _mean(points, "model")
    return tuple(
        _simulated(row["label"], float(row["model"]) / mean, _largest_error(rows, row), [row])
        for row in _ends(points, "model")
    )


def _mean(points: Sequence[Row], column: str) -> float:
    return sum(float(row[column]) for row in points) / max(1, len(points))


def _ends(points: Sequence[Row], column: str) -> list[Row]:
    """The lowest and the highest."""
    ordered = sorted(points, key=lambda row: float(row[column]))
    return [ordered[0], ordered[-1]] if ordered else []


@cache
def reading_error(series: str) -> float:
    """Samples per second by which a published point of a series may have been misread."""
    files = {
        "100T": "throughput_model_size.csv",
        "kwai": "throughput_kwai.csv",
    }
    name = next((f for word, f in files.items() if series.startswith(word)), None)
    with (PUBLISHED / (name or "throughput_public.csv")).open(newline="") as file:
        texts = [f"{row['note']} {row['source']}" for row in csv.DictReader(file)]
    found = [float(n) for text in texts for n in re.findall(r"\+-(\d+)", text)]
    if not found:
        raise ValueError(f"the published points of {series} do not say how well they were read")
    return max(found)


def _read_off(
    label: str, top: float, bottom: float, above: float, below: float, over: float = 1.0
) -> Found:
    return Found(
        label=label,
        value=top / bottom / over,
        low=(top - above) / (bottom + below) / over,
        high=(top + above) / (bottom - below) / over if bottom > below else math.inf,
    )


def _simulated(label: str, value: float, band: float, points: Sequence[Row]) -> Found:
    return Found(
        label=label,
        value=value,
        low=value * math.exp(-band),
        high=value * math.exp(band),
        fitted=all(row["kind"] == "fit" for row in points),
    )


def _point(rows: Sequence[Row], series: str, gpus: int) -> Row | None:
    """The row of a series at a size; of several, the measured one, and of the largest model."""
    found = [row for row in rows if row["series"] == series and int(row["gpus"]) == gpus]
    measured = [row for row in found if "plotted as half" not in row["note"]]
    return measured[-1] if measured else None


def _published(rows: Sequence[Row], series: str, gpus: int) -> float | None:
    row = _point(rows, series, gpus)
    return float(row["published"]) if row is not None and row["published"] else None


def _largest_error(rows: Sequence[Row], point: Row) -> float:
    """Of the points of its series that are fitted, or predicted, as it is; logarithmic."""
    own = [row for row in rows if all(row[key] == point[key] for key in ("series", "kind"))]
    errors = [float(row["error"]) for row in own if row["error"]]
    return max((abs(math.log1p(error)) for error in errors), default=0.0)
