"""Claims of throughput and memory: published bars with the error of reading, the simulator."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.paper.record import Lookup, Row, Table
from experiments.paper.verdicts import Claim, Found, Part, Range, known_tables, part_of

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
SCALING = (
    ("taobao-ad Persia hybrid", 1, 8),
    ("taobao-ad Persia hybrid", 2, 8),
    ("avazu-ad Persia hybrid", 1, 8),
    ("avazu-ad Persia hybrid", 2, 8),
    ("kwai-video hybrid", 8, 64),
)
"""Series, and from how many GPUs to how many."""
FITTED = "constants of the simulator were fitted to these very bars"
PREDICTED = (
    "a prediction from the same authors' other bars tests the simulator, not the measurement"
)
SIZES = "100T cluster hybrid"


def plotted_ratio(rows: Sequence[Row], above: str, below: str, gpus: int) -> tuple[Found, ...]:
    """One published rate over another."""
    top, bottom = _published(rows, above, gpus), _published(rows, below, gpus)
    if top is None or bottom is None:
        return ()
    errors = [reading_error(series) for series in (above, below)]
    return (_read_off(f"{gpus} GPUs", top, bottom, *errors),)


def simulated_ratio(rows: Sequence[Row], above: str, below: str, gpus: int) -> tuple[Found, ...]:
    """The simulator's, within its largest errors on points of the same kind of both series."""
    top, bottom = _point(rows, above, gpus), _point(rows, below, gpus)
    if top is None or bottom is None:
        return ()
    ratio = float(top["model"]) / float(bottom["model"])
    band = sum(_largest_error(rows, row) for row in (top, bottom))
    return (_simulated(f"{gpus} GPUs", ratio, band, [top, bottom]),)


def plotted_speed_up_over(rows: Sequence[Row], rival: str, gpus: int) -> tuple[Found, ...]:
    """Persia's speed-up over a rival on Avazu-Ad, over that on Taobao-Ad, as published."""
    ratios = [
        plotted_ratio(rows, f"{data} Persia hybrid", f"{data} {rival}", gpus)
        for data in ("avazu-ad", "taobao-ad")
    ]
    if not all(ratios):
        return ()
    (avazu,), (taobao,) = ratios
    return (
        Found(
            label=f"Avazu-Ad over Taobao-Ad, {gpus} GPUs",
            value=avazu.value / taobao.value,
            low=avazu.low / taobao.high,
            high=avazu.high / taobao.low,
        ),
    )


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
        no_evidence=FITTED if all(row["kind"] == "fit" for row in points) else PREDICTED,
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


SAME = 0.10
"""A speed-up within ten per cent of the stated one counts as the stated one."""
NEARLY_LINEAR = Range(0.8, math.inf)
"""Share of the speed-up that as many workers more would give at best."""
STABLE = Range(0.95, 1.05)
"""Each size's throughput over the mean of all sizes."""
COMPARABLE = Range(0.9, math.inf)
"""Of hybrid's throughput over async's."""
SAME_LEVEL = Range(0.8, 1.25)
"""Of a speed-up on one data set over that on another."""
SPEED_UPS = (
    ("xdl", "7.12 times the throughput of XDL sync and 8.4 times that of XDL async on Taobao-Ad"
     " (the bars say it the other way round: the text has the two swapped).",
     (("over XDL sync", 7.12, "taobao-ad Persia hybrid", "taobao-ad XDL sync", 8),
      ("over XDL async", 8.4, "taobao-ad Persia hybrid", "taobao-ad XDL async", 8))),
    ("paddle", "1.71 times the throughput of PaddlePaddle on Taobao-Ad.",
     (("over PaddlePaddle", 1.71, "taobao-ad Persia hybrid", "taobao-ad PaddlePaddle heter", 8),)),
    ("kwai", "3.8 and 2.6 times the throughput of synchronous training on Kwai-Video.",
     (("at 8 GPUs", 3.8, "kwai-video hybrid", "kwai-video sync", 8),
      ("at 64 GPUs", 2.6, "kwai-video hybrid", "kwai-video sync", 64))),
)  # fmt: skip
"""Key, text, and of each part: label, stated speed-up, the two series of scale-workers, GPUs."""


def speed_claims(lookup: Lookup) -> list[Claim]:
    """What is said of throughput and of memory."""
    workers, sizes = lookup("scale_workers.csv"), lookup("scale_model_size.csv")
    found = [
        _speed_up(key, says, [(*part, workers) for part in parts])
        for key, says, parts in SPEED_UPS
    ]  # fmt: skip
    found += [_same_level(workers), _beside_async(workers, sizes)]
    largest = ("at 100 T", 2.6, "100T cluster hybrid", "100T cluster sync", 64, sizes)
    found.append(
        _speed_up("100t", "2.6 times synchronous training at 100 trillion parameters.", [largest])
    )
    linear = Part(
        label="share of the ideal speed-up",
        claimed=NEARLY_LINEAR,
        plots=plotted_efficiencies(workers.rows) if workers else (),
        found=efficiencies(workers.rows) if workers else (),
    )
    stable = Part(
        label="over the mean of the sizes",
        claimed=STABLE,
        plots=plotted_deviations(sizes.rows) if sizes else (),
        found=deviations(sizes.rows) if sizes else (),
    )
    found += [
        Claim(
            key="linear",
            says="Throughput grows nearly linearly with the number of GPUs.",
            rule=f"at least {NEARLY_LINEAR.low:.0%} of the ideal speed-up",
            parts=(linear,),
            tables=known_tables([workers]),
            note="Scaling from 1 GPU: its bar without all-reduce, the only one that was measured.",
        ),
        Claim(
            key="stable",
            says="Throughput stays stable from 6.25 to 100 trillion parameters.",
            rule=f"each size within {STABLE.high - 1:.0%} of the mean of the five",
            parts=(stable,),
            tables=known_tables([sizes]),
        ),
        _capacity(),
    ]
    return found


def _same_level(workers: Table | None) -> Claim:
    """No bars of Criteo-Ad were read off; the simulator's would be predictions."""
    rows = workers.rows if workers else []
    return Claim(
        key="other-sets",
        says="The speed-ups on Avazu-Ad and Criteo-Ad are on the same level as on Taobao-Ad.",
        rule=f"a speed-up between {SAME_LEVEL.low:g} and {SAME_LEVEL.high:g} times that on"
        " Taobao-Ad, over each rival (Avazu-Ad: no bars of Criteo-Ad were read off)",
        parts=tuple(
            part_of(f"over {rival}", SAME_LEVEL, plotted_speed_up_over(rows, rival, 8), ())
            for rival in ("XDL sync", "XDL async", "PaddlePaddle heter")
        ),
        tables=known_tables([workers]),
        none_possible=_NO_CLUSTER,
    )


_NO_CLUSTER = "it takes the paper's cluster and the rivals' systems; the simulator is fitted to it"


def _beside_async(workers: Table | None, sizes: Table | None) -> Claim:
    parts = [
        ("on Kwai-Video, 64 GPUs", "kwai-video hybrid", "kwai-video async", workers),
        ("at 100 T", "100T cluster hybrid", "100T cluster async", sizes),
    ]
    return Claim(
        key="beside-async",
        says="Hybrid has a hardware efficiency comparable to fully asynchronous training.",
        rule=f"at least {COMPARABLE.low:.0%} of async's throughput",
        parts=tuple(
            part_of(
                label,
                COMPARABLE,
                plotted_ratio(rows.rows if rows else [], above, below, 64),
                simulated_ratio(rows.rows if rows else [], above, below, 64),
            )
            for label, above, below, rows in parts
        ),
        tables=known_tables([workers, sizes]),
    )


PARAMETERS = 100e12
MEMORY_BYTES = 30 * 12e12
"""Of 30 hosts (source: the paper's cluster)."""
POD_BYTES = 120 * 2500 * 2**30
"""Of 120 server processes (source: the manifest of the 100 T run)."""
ROW_OVERHEAD_BYTES = (83, 103)
"""Of a row in the branch that made the run: node, allocator, hash slot."""


def _capacity() -> Claim:
    """Arithmetic: it is evidence of its own."""
    two = 2 * PARAMETERS
    low, high = (two + PARAMETERS / 128 * extra for extra in ROW_OVERHEAD_BYTES)
    values = Found(label="values alone", value=two / MEMORY_BYTES, low=two / MEMORY_BYTES,
                   high=two / MEMORY_BYTES)  # fmt: skip
    rows = Found(label="rows of 128 with their overhead", value=(low + high) / 2 / POD_BYTES,
                 low=low / POD_BYTES, high=high / POD_BYTES)  # fmt: skip
    return Claim(
        key="capacity",
        says="100 trillion parameters fit into 30 hosts of 12 TB.",
        rule="a share of the memory below 1, in float16",
        parts=(
            part_of("of 360 TB, values alone", Range(0.0, 1.0), (), (values,)),
            part_of("of the processes' 322 TB, rows of 128", Range(0.0, 1.0), (), (rows,)),
        ),
        note="Capacity by arithmetic: in float32 the values alone take 400 TB and do not fit; in"
        " float16 rows of 64 take 330 to 361 TB with their overhead and miss the processes' 322;"
        " the rows were filled with a constant, not trained.",
    )


def _speed_up(key: str, says: str, parts: Sequence[tuple[Any, ...]]) -> Claim:
    built, tables = [], []
    for label, stated, above, below, gpus, rows in parts:
        tables.append(rows)
        lines = rows.rows if rows else []
        built.append(
            Part(
                label=f"{stated:g} {label}",
                claimed=Range(stated * (1 - SAME), stated * (1 + SAME)),
                plots=plotted_ratio(lines, above, below, gpus),
                found=simulated_ratio(lines, above, below, gpus),
            )
        )
    return Claim(
        key=key,
        says=says,
        rule=f"a ratio within {SAME:.0%} of the stated one",
        parts=tuple(built),
        tables=known_tables(tables),
        note="Speeds found here are the simulator's; their intervals are its largest errors on the"
        " two series, fitted and predicted points apart. Intervals of the plots are the error of"
        " reading them.",
    )
