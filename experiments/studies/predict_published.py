"""Published GPU-sharded training, predicted: rates with bands, errors beside a naive baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isnan, log, nan
from pathlib import Path

import numpy as np

from experiments.published import calibration
from experiments.published.gpu_rows import Measured, MeasuredFiles
from experiments.tables import Column, drawn, table, write_csv
from persia_sim.presets.software import FITTED, band_ln
from persia_sim.sharded.stages import Stages, fits, stages, step_s

_SHOWN = 20  # predictions on the screen where nothing is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(MeasuredFiles):
    """CSVs of what is to be predicted, else the project's own table of published steps; measured
    columns may be empty."""

    known: tuple[Path, ...] = ()
    """Measured lines for the naive baseline, as known.csv; else the rows themselves."""
    left_out: bool = False
    """Predict every row by constants of a fit that did not see its software, its machine, its
    number of nodes, any system of several nodes (some minutes)."""

    def _check(self) -> None:
        self.check_files(needed=bool(self.rows or self.workloads or self.systems), known=self.known)


def run(options: Options) -> None:
    """Predict every row, write the table; where rows are measured, print errors and draw them."""
    rows, left_out = options.load(options.rows)
    # A dry run says what would be predicted.
    if options.dry_run:
        fits = ", each by fits that did not see it: some minutes more" * options.left_out
        print(f"{len(rows)} published steps are predicted{fits}; {options.duration()}")
        return
    if options.left_out:
        _left_out([row for row in rows if row.samples_per_s], options.out)
        return
    known = rows
    if options.known:
        known, _ = options.load(options.known)
    path = options.out / "predict_published.csv"
    records = predictions(rows, known)
    write_csv(path, records)
    print(report(rows, records))
    for why in left_out:
        print(f"left out: {why}")
    figure = f"; {drawn(path)}" if any(row.samples_per_s for row in rows) else ""
    print(f"{len(records)} predictions in {path}{figure}")


def _left_out(rows: Sequence[Measured], out: Path) -> None:
    """Print the tables of what was left out in turn, and write every error with its band."""
    if len(rows) < _LEAST:
        raise ValueError(f"rows hold {len(rows)} measurements; --left-out needs {_LEAST} or more")
    whole = calibration.fit(rows, np.log([each.value for each in FITTED.values()]))
    lines: list[dict[str, object]] = []
    for what, label in calibration.LEFT_OUT.items():
        held = calibration.held_out(rows, whole, label)
        print(calibration.left_out_table(what, held), end="\n\n", flush=True)
        lines += [held_record(what, each) for each in held]
    path = out / "predict_published_left_out.csv"
    write_csv(path, lines)
    print(f"{len(lines)} errors in {path}")


_LEAST = 8


def held_record(what: str, held: calibration.Held) -> dict[str, object]:
    """A line of the table of what was left out."""
    return {
        "left_out": what,
        "group": held.group,
        "id": held.row.label,
        "software": held.row.family,
        "ln_error": round(held.error, 4),
        "naive_ln_error": _known(held.naive, 4),
        "half_90": round(held.half(), 4),
        "new": " ".join(held.strange),
    }


def predictions(rows: Sequence[Measured], known: Sequence[Measured]) -> list[dict[str, object]]:
    """One record a row: predicted and measured rates, errors, and what the step is made of."""
    # Each row's step in parts, its rate, and what the nearest measurement alone would have said.
    result = []
    for row, by_nearest in zip(rows, calibration.naive_rates(rows, known), strict=True):
        parts = stages(row.job)
        job = row.job
        rate = job.batch / step_s(job)
        measured = row.samples_per_s or nan
        binds = seconds_by_part(parts)
        half = band_ln(job)
        result.append(
            {
                "id": row.label,
                "series": row.series,
                "workload": job.ranker.name,
                "framework": row.family,
                "system": job.system.host.name,
                "accelerator": job.system.host.chip.name,
                "gpus": job.system.gpus,
                "global_batch": job.batch,
                "predicted_samples_per_s": round(rate, 1),
                "low_90": round(rate * exp(-half), 1),
                "high_90": round(rate * exp(half), 1),
                "predicted_step_ms": round(1e3 * job.batch / rate, 4),
                "measured_step_ms": _known(1e3 * (job.batch / measured), 4),
                "measured_samples_per_s": row.samples_per_s or "",
                "ln_error": _known(log(rate / measured), 4),
                "naive_samples_per_s": _known(by_nearest, 1),
                "naive_ln_error": _known(log(by_nearest / measured), 4),
                "largest_part": max(binds, key=lambda name: binds[name]),
                "rows_fit": fits(job),
            }
        )
    return result


def _known(value: float, digits: int) -> float | str:
    return "" if isnan(value) else round(value, digits)


def seconds_by_part(parts: Stages) -> dict[str, float]:
    """What a step is made of; pipelined parts run beside others."""
    return {
        "host": parts.host_s,
        "dense": parts.dense_s,
        "lookup": parts.lookup_s,
        "update": parts.update_s,
        "exchange": 2 * parts.exchange_s,
        "misses": parts.miss_s,
        "small kernels": parts.gpu_s,
        "all-reduce": parts.allreduce_s,
        "input": parts.input_s,
    }


def report(rows: Sequence[Measured], records: Sequence[dict[str, object]]) -> str:
    """The table of errors: by series, over all classes, of scaling, and the baseline's."""
    import pandas as pd  # late: a second to import

    # Errors of the rows that have a measurement.
    names = ("ln_error", "naive_ln_error", "predicted_samples_per_s")
    error, naive, rates = (
        np.array([nan if record[name] == "" else record[name] for record in records], float)
        for name in names
    )
    if not np.isfinite(error).any():
        return f"{predicted(records)}\nno row has a measurement: nothing to compare with"

    # One point a class, so that a series of many rows counts no more than one of few.
    points = pd.DataFrame(
        {
            "series": rows[members[0]].series,
            "predicted": _median(error[members]),
            "naive": _median(naive[members]),
            "band": band_ln(rows[members[0]].job),
        }
        for members in calibration.classes(rows)
    )

    # By series, then of all.
    by_series = points.groupby("series", sort=False)
    width = max(map(len, points.series))
    lines = [f"{'series':{width}} {calibration.HEADER}   nearest series: median, p90"]
    lines += [
        calibration.compared(name, part.predicted, part.naive, width) for name, part in by_series
    ]
    lines.append(
        calibration.compared("all (one point a class)", points.predicted, points.naive, width)
    )
    if not np.isfinite(points.naive).any():
        lines.append("nearest series: no measured row is of another series; name some with --known")
    each = [_median(part.predicted.abs()) for _, part in by_series]
    lines.append(f"{'all (one point a series)':{width}} {calibration.score(each)}")

    # Whether the bands hold what they promise.
    known = points[points.predicted.notna()]
    inside = np.mean(known.predicted.abs() <= known.band)
    factors = [f"{exp(q):.2f}" for q in known.band.quantile([0, 0.5, 1])]
    text = f"factors of {factors[0]} to {factors[2]}, the middle one {factors[1]}"
    lines.append(f"90 % bands ({text}) hold {inside:.0%} of the points")

    # Ratios between cluster sizes, whose common errors cancel.
    ratios = [
        log(predicted / measured) for predicted, measured in calibration.scaling_ratios(rows, rates)
    ]
    if ratios:
        close = np.mean(np.abs(ratios) < log(1.15))
        lines.append(
            f"{len(ratios)} scaling ratios: median {np.expm1(np.median(np.abs(ratios))):.1%}, "
            f"{close:.0%} within 15 %"
        )
    return "\n".join(lines)


def predicted(records: Sequence[dict[str, object]]) -> str:
    """The first predictions as a table."""
    more = len(records) - _SHOWN
    text = f"\n... and {more} more in the CSV" if more > 0 else ""
    return table(records[:_SHOWN], COLUMNS) + text


def _short(name: str) -> Column:
    return lambda row: f"{row[name]:,.0f}" if row[name] >= 1000 else f"{row[name]:.3f}"


COLUMNS: dict[str, Column] = {
    "id": "{id}",
    "workload": "{workload}",
    "framework": "{framework}",
    "system": "{system}",
    "GPUs": "{gpus:,}",
    "batch": "{global_batch:,}",
    "samples/s": _short("predicted_samples_per_s"),
    "from": _short("low_90"),
    "to": _short("high_90"),
    "step ms": _short("predicted_step_ms"),
    "largest": "{largest_part}",
    "fits": lambda row: "yes" if row["rows_fit"] else "NO",
}


def _median(values: np.ndarray) -> float:
    """The median of the values that are not NaN."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else nan
