"""Published GPU-sharded training, predicted: rates with bands, errors beside a naive baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isnan, log, nan
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.published import calibration
from experiments.published.gpu_rows import Measured, MeasuredFiles
from experiments.tables import Column, drawn, table, write_csv
from persia_sim.presets.fitted import FITTED
from persia_sim.sharded.software import band_ln, is_unknown
from persia_sim.sharded.stages import Stages, fits, stages, step_s

_SHOWN = 20  # predictions on the screen where nothing is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(MeasuredFiles):
    """CSVs of what is to be predicted, else the project's own table of published steps; measured
    columns may be empty."""

    of: Literal["gpu", "persia"] = "gpu"
    """gpu: systems with tables on the GPUs. persia: the hybrid cluster at the points of the paper's
    figures, by constants that are fitted to them anew."""
    left_out: bool = False
    """Predict every row by constants of a fit that did not see its software, its machine, both
    together, its number of nodes, any system of several nodes, its source, and any software of its
    name, the last two by its title alone; of persia each series and size (some minutes)."""
    fit: bool = False
    """Fit the constants of tables on the GPUs anew, and print what the rows say of each."""

    def _check(self) -> None:
        given = bool(self.rows or self.workloads or self.systems)
        self.check_files(needed=given)
        if self.of == "persia" and (given or self.fit):
            raise ValueError("--of persia has points of its own, which it fits: drop --rows, --fit")


def run(options: Options) -> None:
    """Predict every row, write the table; where rows are measured, print errors and draw them."""
    # A dry run says what would be predicted.
    if options.of == "persia":
        _persia(options)
        return
    rows, left_out = options.load(options.rows)
    if options.dry_run:
        fits = ", each by fits that did not see it" * options.left_out
        print(f"{len(rows)} published steps are predicted{fits}; {options.duration()}")
        return

    # A software that is no system's name has constants of what its title may mean.
    unknown = Counter(
        (row.job.software.name, row.family) for row in rows if is_unknown(row.job.software)
    )
    for (name, taken), count in unknown.items():
        print(f"software {name!r} ({count} rows) is a title: taken for {taken}, with a wider band")
    measured = [row for row in rows if row.samples_per_s]
    if options.fit:
        _fit(measured, options.out)
        return
    if options.left_out:
        _left_out(measured, options.out)
        return
    known = [*rows, *options.load(())[0]] if options.rows else rows
    path = options.out / "predict_published.csv"
    records = predictions(rows, known)
    write_csv(path, records)
    print(report(rows, records))
    for why in left_out:
        print(f"left out: {why}")
    figure = f"; {drawn(path)}" if measured else ""
    print(f"{len(records)} predictions in {path}{figure}")


def _persia(options: Options) -> None:
    """Fit to the points of the paper's figures, and print every error; write persia.csv."""
    from experiments.published import persia  # late: it loads the simulator

    known = persia.points()
    if options.dry_run:
        fits = ", again without each series" * options.left_out
        print(f"{len(known)} points of the paper are fitted{fits}; {options.duration()}")
        return
    fits = persia.best_batches(known)
    print(persia.report(fits, known))
    best = fits[0]
    records = [
        {
            "series": point.series,
            "gpus": point.gpus,
            "published": point.samples_per_s,
            "ln_rate_error": round(float(error), 4),
        }
        for point, error in zip(known, best.errors, strict=True)
    ]
    print(f"{len(records)} points in {write_csv(options.out / 'persia.csv', records)}")
    if options.left_out:
        lines = persia.left_out(known, best.batches)
        theirs = persia.rivals_left_out("taobao-ad")
        write_csv(options.out / "persia_left_out.csv", lines + theirs)
        print(persia.left_out_table(lines, theirs))


def _fit(rows: Sequence[Measured], out: Path) -> None:
    """Fit the constants, and print how sure each is; write constants.csv."""
    if len(rows) < _LEAST:
        raise ValueError(f"rows hold {len(rows)} measurements; --fit needs {_LEAST} or more")
    fit = calibration.fit(rows)
    records = constants(rows, fit)
    path = write_csv(out / "constants.csv", records)
    print(table(records, {name: f"{{{name}}}" for name in SHOWN}))
    print(_counts(rows, fit))

    # The errors beside those of the simplest guess: the nearest point of another series.
    rates = np.array([row.samples_per_s for row in rows])
    naive = np.log(np.array(calibration.naive_rates(rows, rows)) / rates)
    errors = -calibration.log_errors(rows, *calibration.with_logs(fit.logs))
    print(f"\n{'errors':34} {calibration.HEADER}   nearest other series: median, p90")
    jobs = calibration.classes(rows)
    middle = [[np.median(of_all[places]) for places in jobs] for of_all in (errors, naive)]
    print(calibration.compared("on the points that were fitted to", *middle))
    print(f"{len(records)} constants in {path}")


def constants(rows: Sequence[Measured], fit: calibration.Fit) -> list[dict[str, object]]:
    """One record a constant, its interval from the curvature."""
    records = []
    wide = fit.spread
    known = fit.identified
    for name, value in fit.values.items():
        low = value * exp(-1.96 * wide[name])
        high = value * exp(1.96 * wide[name])
        about = FITTED[name]
        entered = sum(calibration.touches(name, row) for row in rows)

        # Beside the value what it started from, since a prior held it.
        records.append(
            {
                "constant": name,
                "value": f"{value:.4g}",
                "low_95": f"{low:.3g}",
                "high_95": f"{high:.3g}",
                "start": f"{about.start:.3g}",
                "start_width_ln": about.width,
                "preset": f"{about.value:.4g}",
                "spread": f"{wide[name]:.2g}",
                "points": entered,
                "identified": "yes" if name in known else "no",
            }
        )
    return records


SHOWN = ("constant", "value", "low_95", "high_95", "start", "preset", "points", "identified")
"""Columns of the constants on a terminal."""


def _counts(rows: Sequence[Measured], fit: calibration.Fit) -> str:
    series = len({row.series for row in rows})
    known = len(fit.identified)
    return (
        f"{len(FITTED)} constants ({known} identified: the data halve the width of their start), "
        f"{len(rows)} points of {len(calibration.classes(rows))} classes in {series} series; "
        f"cost {fit.cost:.1f} at a noise of {calibration.NOISE:.0%}"
    )


def _left_out(rows: Sequence[Measured], out: Path) -> None:
    """Print the tables of what was left out in turn, and write every error with its band."""
    if len(rows) < _LEAST:
        raise ValueError(f"rows hold {len(rows)} measurements; --left-out needs {_LEAST} or more")
    near = calibration.tangent(rows, np.log([each.value for each in FITTED.values()]))
    lines: list[dict[str, object]] = []
    for what, label in calibration.LEFT_OUT.items():
        held = calibration.held_out(near, label, what in calibration.BY_TITLE)
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
