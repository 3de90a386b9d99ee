"""Every fitted constant, from measurements: values, what the data say of each, errors held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Literal

import numpy as np

from experiments.published import calibration
from experiments.published.gpu_rows import Measured, MeasuredFiles
from experiments.tables import table, write_csv
from persia_sim.presets.software import FITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(MeasuredFiles):
    """Persia's published points; or tables on GPUs, from CSVs as of `predict-published`."""

    of: Literal["persia", "gpu"] = "persia"
    """Whose constants: the hybrid cluster's, or those of systems with tables on the GPUs, from the
    project's own table of published steps where no other rows are named."""
    held_out: bool = True
    """Also predict what is left out in turn: of tables on the GPUs each series."""
    profiles: bool = False
    """Also refit along each constant for its 95 % interval (ten to thirty minutes)."""

    def _check(self) -> None:
        given = bool(self.rows or self.workloads or self.systems)
        self.check_files(needed=given)
        if given and self.of == "persia":
            raise ValueError("--rows name measurements of tables on the GPUs; add --of gpu")


def run(options: Options) -> None:
    """Fit, print constants and errors, write persia.csv or constants.csv and errors.csv."""
    if options.dry_run:
        print(_plan(options))
        return

    # Persia's own points, or rows of a file.
    if options.of == "persia":
        _persia(options.out, options.held_out)
        return
    rows, why_not = options.load(options.rows)
    rows = [row for row in rows if row.samples_per_s]
    if len(rows) < 2:
        raise ValueError(f"rows hold {len(rows)} measurements; a fit needs two or more")

    # Fit, and say how sure each constant is.
    fit = calibration.fit(rows)
    records = constants(rows, fit, options.profiles)
    write_csv(options.out / "constants.csv", records)
    print(table(records, {name: f"{{{name}}}" for name in SHOWN}))
    print(_counts(rows, fit))

    # The errors beside those of the simplest guess: the nearest point of another series.
    naive = np.log(
        np.array(calibration.naive_rates(rows, rows)) / [row.samples_per_s for row in rows]
    )
    errors_here = -calibration.log_errors(rows, *calibration.with_logs(fit.logs))
    print(f"\n{'errors':34} {calibration.HEADER}   nearest other series: median, p90")
    jobs = calibration.classes(rows)
    middle = [[np.median(errors[places]) for places in jobs] for errors in (errors_here, naive)]
    print(calibration.compared("on the points that were fitted to", *middle))
    lines = [
        _errors_record(row, "", *both) for row, *both in zip(rows, errors_here, naive, strict=True)
    ]

    # What was fitted to says little: series that were left out say more.
    if options.held_out:
        held = calibration.held_out(rows, fit, calibration.series_of, rounds=3)
        print(calibration.left_out_table("series", held))
        lines += [_errors_record(x.row, x.group, x.error, x.naive) for x in held]
    write_csv(options.out / "errors.csv", lines)
    for why in why_not:
        print(f"left out: {why}")
    print(f"{len(records)} constants in {options.out / 'constants.csv'}; errors.csv beside it")


def _plan(options: Options) -> str:
    """What is fitted, and how long it takes."""
    parts = [
        f"the constants of {'tables on GPUs' if options.of == 'gpu' else 'the hybrid cluster'} are"
        " fitted"
    ]
    if options.held_out:
        parts.append("again without each of its series")
    if options.of == "gpu" and options.profiles:
        parts.append("and along each constant: ten to thirty minutes more")
    return f"{', '.join(parts)}; {options.duration()}"


def _persia(out: Path, held_out: bool) -> None:
    # Late: they load the simulator.
    from experiments.published import persia

    known = persia.points()
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
    write_csv(out / "persia.csv", records)
    print(f"{len(records)} points in {out / 'persia.csv'}")
    if held_out:
        lines = persia.left_out(known, best.batches)
        theirs = persia.rivals_left_out("taobao-ad")
        write_csv(out / "persia_left_out.csv", lines + theirs)
        print(persia.left_out_table(lines, theirs))


def constants(
    rows: Sequence[Measured], fit: calibration.Fit, profiles: bool
) -> list[dict[str, object]]:
    """One record a constant."""
    # An interval from the curvature, or from the profile where that was asked for.
    records = []
    wide = fit.spread
    known = fit.identified
    for name, value in fit.values.items():
        low = value * exp(-1.96 * wide[name])
        high = value * exp(1.96 * wide[name])
        if profiles:
            low, high = calibration.interval(rows, fit, name)
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


def _errors_record(row: Measured, without: str, model: float, naive: float) -> dict[str, object]:
    return {
        "id": row.label,
        "series": row.series,
        "left_out": without,
        "ln_rate_error": round(float(model), 4),
        "naive_ln_rate_error": round(float(naive), 4),
    }
