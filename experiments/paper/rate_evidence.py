"""Claims of throughput and memory: published bars with the error of reading, the simulator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

from experiments.paper.record import Lookup, Row, Table
from experiments.paper.verdicts import (
    FITTED,
    PREDICTED,
    Claim,
    Finding,
    Part,
    Range,
    distinct_tables,
)
from experiments.published.descriptions import published_rates

SCALING = (
    ("taobao-ad Persia hybrid", 1, 8),
    ("taobao-ad Persia hybrid", 2, 8),
    ("avazu-ad Persia hybrid", 1, 8),
    ("avazu-ad Persia hybrid", 2, 8),
    ("kwai-video hybrid", 8, 64),
)
"""Series that scale, from how many GPUs to how many."""
SIZES = "100T cluster hybrid"
Kind = Literal["plots", "evidence"]
"""Kind of a number: read off the paper's plots, or simulated."""


def ratio(
    kind: Kind, rows: Sequence[Row], above: str, below: str, gpus: int
) -> tuple[Finding, ...]:
    """One rate over another at so many GPUs."""
    top = rate(kind, rows, above, gpus)
    bottom = rate(kind, rows, below, gpus)
    return (top.over(bottom, f"{gpus} GPUs"),) if top and bottom else ()


def plotted_speed_up_over(rows: Sequence[Row], rival: str, gpus: int) -> tuple[Finding, ...]:
    """Persia's speed-up over a rival on Avazu-Ad, over that on Taobao-Ad, as published."""
    avazu, taobao = (
        ratio("plots", rows, f"{data} Persia hybrid", f"{data} {rival}", gpus)
        for data in ("avazu-ad", "taobao-ad")
    )
    label = f"Avazu-Ad over Taobao-Ad, {gpus} GPUs"
    return (avazu[0].over(taobao[0], label),) if avazu and taobao else ()


def efficiencies(kind: Kind, rows: Sequence[Row]) -> tuple[Finding, ...]:
    """Speed-up of each series over the ratio of its numbers of GPUs."""
    shares = []
    for series, few, many in SCALING:
        top = rate(kind, rows, series, many)
        bottom = rate(kind, rows, series, few)
        if top and bottom:
            shares.append(top.over(bottom, f"{series}, {few} to {many} GPUs", many / few))
    return tuple(shares)


def deviations(kind: Kind, rows: Sequence[Row]) -> tuple[Finding, ...]:
    """The lowest and the highest rate of the sizes over the mean of all."""
    sizes = [_rate(kind, rows, row) for row in rows if row["series"] == SIZES]
    ordered = sorted(sizes, key=lambda one: one.value)
    mean = sum(one.value for one in ordered) / max(1, len(ordered))
    middle = Finding.around(mean, 0.0, label="")
    return tuple(one.over(middle, one.label) for one in (*ordered[:1], *ordered[-1:]))


@cache
def reading_error(series: str) -> float:
    """Samples per second by which a published point of a series may have been misread."""
    ends = {"100T": "model_size", "kwai": "kwai"}
    end = next((end for word, end in ends.items() if series.startswith(word)), "public")
    texts = [f"{row['note']} {row['source']}" for row in published_rates(f"throughput_{end}.csv")]
    errors = [float(n) for text in texts for n in re.findall(r"\+-(\d+)", text)]
    if not errors:
        raise ValueError(f"the published points of {series} do not say how well they were read")
    return max(errors)


def rate(kind: Kind, rows: Sequence[Row], series: str, gpus: int) -> Finding | None:
    """The rate of a series at a size; of several the measured one, and that of the largest model.

    A published rate has the error of reading, a simulated one the largest error on points of the
    same kind of the series.
    """
    points = [row for row in rows if row["series"] == series and int(row["gpus"]) == gpus]
    measured = [row for row in points if "plotted as half" not in row["note"]]
    if not measured or (kind == "plots" and not measured[-1]["published"]):
        return None
    return _rate(kind, rows, measured[-1])


def _rate(kind: Kind, rows: Sequence[Row], row: Row) -> Finding:
    if kind == "plots":
        error = reading_error(row["series"])
        return Finding.around(float(row["published"]), error, label=row["label"])
    value = float(row["model"])
    off = math.exp(_largest_error(rows, row))
    reason = FITTED if row["kind"] == "fit" else PREDICTED
    return Finding(
        label=row["label"], value=value, low=value / off, high=value * off, no_evidence=reason
    )


def _largest_error(rows: Sequence[Row], point: Row) -> float:
    """Largest logarithmic error of the points of a series that are fitted, or predicted, as this
    one is."""
    same_kind = [row for row in rows if all(row[key] == point[key] for key in ("series", "kind"))]
    errors = [float(row["error"]) for row in same_kind if row["error"]]
    return max((abs(math.log1p(error)) for error in errors), default=0.0)


SAME = 0.10
"""A speed-up within ten per cent of the stated one counts as the stated one."""
NEARLY_LINEAR = Range(0.8, math.inf)
"""Share of the speed-up that as many workers more would give at best."""
STABLE = Range(0.95, 1.05)
"""Each size's throughput over the mean of all sizes."""
COMPARABLE = Range(0.9, math.inf)
"""Hybrid's throughput over async's."""
SAME_LEVEL = Range(0.8, 1.25)
"""A speed-up on one data set over that on another."""


def speed_claims(lookup: Lookup) -> list[Claim]:
    """The claims of throughput and of memory."""
    # The two tables that hold all rates.
    workers = lookup("scale_workers.csv")
    sizes = lookup("scale_model_size.csv")
    bars = workers.rows if workers else []
    points = sizes.rows if sizes else []
    persia = "taobao-ad Persia hybrid"

    # Claim by claim, in the order of the paper.
    return [
        _speed_up(
            "xdl",
            "7.12 times the throughput of XDL sync and 8.4 times that of XDL async on Taobao-Ad"
            " (the bars say it the other way round: the text has the two swapped).",
            workers,
            ("over XDL sync", 7.12, persia, "taobao-ad XDL sync", 8),
            ("over XDL async", 8.4, persia, "taobao-ad XDL async", 8),
        ),
        _speed_up(
            "paddle",
            "1.71 times the throughput of PaddlePaddle on Taobao-Ad.",
            workers,
            ("over PaddlePaddle", 1.71, persia, "taobao-ad PaddlePaddle heter", 8),
        ),
        _speed_up(
            "kwai",
            "3.8 and 2.6 times the throughput of synchronous training on Kwai-Video.",
            workers,
            ("at 8 GPUs", 3.8, "kwai-video hybrid", "kwai-video sync", 8),
            ("at 64 GPUs", 2.6, "kwai-video hybrid", "kwai-video sync", 64),
        ),
        Claim(
            key="other-sets",
            says="The speed-ups on Avazu-Ad and Criteo-Ad are on the same level as on Taobao-Ad.",
            rule=f"a speed-up between {SAME_LEVEL.low:g} and {SAME_LEVEL.high:g} times that on"
            " Taobao-Ad, over each rival (Avazu-Ad: no bars of Criteo-Ad were read off)",
            parts=tuple(
                Part(f"over {rival}", SAME_LEVEL, plotted_speed_up_over(bars, rival, 8), ())
                for rival in ("XDL sync", "XDL async", "PaddlePaddle heter")
            ),
            tables=distinct_tables([workers]),
            none_possible=_NO_CLUSTER,
        ),
        Claim(
            key="beside-async",
            says="Hybrid has a hardware efficiency comparable to fully asynchronous training.",
            rule=f"at least {COMPARABLE.low:.0%} of async's throughput",
            parts=tuple(
                _part(label, COMPARABLE, ratio, rows, f"{of} hybrid", f"{of} async", 64)
                for label, of, rows in (
                    ("on Kwai-Video, 64 GPUs", "kwai-video", bars),
                    ("at 100 T", "100T cluster", points),
                )
            ),
            tables=distinct_tables([workers, sizes]),
        ),
        _speed_up(
            "100t",
            "2.6 times synchronous training at 100 trillion parameters.",
            sizes,
            ("at 100 T", 2.6, "100T cluster hybrid", "100T cluster sync", 64),
        ),
        Claim(
            key="linear",
            says="Throughput grows nearly linearly with the number of GPUs.",
            rule=f"at least {NEARLY_LINEAR.low:.0%} of the ideal speed-up",
            parts=(_part("share of the ideal speed-up", NEARLY_LINEAR, efficiencies, bars),),
            tables=distinct_tables([workers]),
            note="Scaling from 1 GPU: its bar without all-reduce, the only one that was measured.",
        ),
        Claim(
            key="stable",
            says="Throughput stays stable from 6.25 to 100 trillion parameters.",
            rule=f"each size within {STABLE.high - 1:.0%} of the mean of the five",
            parts=(_part("over the mean of the sizes", STABLE, deviations, points),),
            tables=distinct_tables([sizes]),
        ),
        _capacity(),
    ]


def _part(
    label: str, claimed: Range, measure: Callable[..., tuple[Finding, ...]], *of: Any
) -> Part:
    """A part whose plotted and simulated numbers come from one measure."""
    return Part(label, claimed, measure("plots", *of), measure("evidence", *of))


_NO_CLUSTER = "it takes the paper's cluster and the rivals' systems; the simulator is fitted to it"
PARAMETERS = 100e12
MEMORY_BYTES = 30 * 12e12
"""Memory of 30 hosts (source: the paper's cluster)."""
POD_BYTES = 120 * 2500 * 2**30
"""Memory of 120 server processes (source: the manifest of the 100 T run)."""
ROW_OVERHEAD_BYTES = (83, 103)
"""Overhead of a row, at least and at most, in the branch that made the run: node, allocator, hash
slot."""


def _capacity() -> Claim:
    """The claim of memory; arithmetic is evidence of its own."""
    # Values in float16, and rows of 128 of them with what a row takes beside.
    values_bytes = 2 * PARAMETERS
    low, high = (values_bytes + PARAMETERS / 128 * extra for extra in ROW_OVERHEAD_BYTES)
    values = Finding.around(values_bytes / MEMORY_BYTES, 0.0, label="values alone")
    rows = Finding(
        label="rows of 128 with their overhead",
        value=(low + high) / 2 / POD_BYTES,
        low=low / POD_BYTES,
        high=high / POD_BYTES,
    )
    return Claim(
        key="capacity",
        says="100 trillion parameters fit into 30 hosts of 12 TB.",
        rule="a share of the memory below 1, in float16",
        parts=(
            Part("of 360 TB, values alone", Range(0.0, 1.0), (), (values,)),
            Part("of the processes' 322 TB, rows of 128", Range(0.0, 1.0), (), (rows,)),
        ),
        note="Capacity by arithmetic: in float32 the values alone take 400 TB and do not fit; in"
        " float16 rows of 64 take 330 to 361 TB with their overhead and miss the processes' 322;"
        " the rows were filled with a constant, not trained.",
    )


def _speed_up(
    key: str, says: str, source: Table | None, *parts: tuple[str, float, str, str, int]
) -> Claim:
    """A claim of speed-ups; of each part: label, stated speed-up, the two series of the table,
    GPUs."""
    # The stated number counts as met within the error of reading a plot.
    rows = source.rows if source else []
    return Claim(
        key=key,
        says=says,
        rule=f"a ratio within {SAME:.0%} of the stated one",
        parts=tuple(
            _part(
                f"{stated:g} {label}",
                Range(stated * (1 - SAME), stated * (1 + SAME)),
                ratio,
                rows,
                *series,
            )
            for label, stated, *series in parts
        ),
        tables=distinct_tables([source]),
        note="Speeds found here are the simulator's; their intervals are its largest errors on the"
        " two series, fitted and predicted points apart. Intervals of the plots are the error of"
        " reading them.",
    )
