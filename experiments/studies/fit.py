"""Every fitted constant, from measurements: values, what the data say of each, errors held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np

from experiments.published import calibration
from experiments.published.gpu_rows import Measured, MeasuredFiles
from experiments.tables import table, write_csv
from persia_sim.presets.software import FITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(MeasuredFiles):
    """Persia's published points; with CSVs as of `predict-published`, GPU-sharded training."""

    held_out: bool = True
    """Also predict what is left out: each series in turn, and each class (a minute or two)."""
    profiles: bool = False
    """Also refit along each constant for its 95 % interval (ten to thirty minutes)."""

    def _check(self) -> None:
        given = self.rows or self.workloads or self.systems
        self.check_files(needed=bool(given))


def run(options: Options) -> None:
    """Fit, print constants and errors, write persia.csv or constants.csv and errors.csv."""
    if not options.rows:
        _persia(options.out, options.held_out)
        return
    rows, why_not = options.load(options.rows)
    rows = [row for row in rows if row.samples_per_s]
    if len(rows) < 2:
        raise ValueError(f"rows hold {len(rows)} measurements; a fit needs two or more")
    found = calibration.fit(rows)
    records = constants(rows, found, options.profiles)
    write_csv(options.out / "constants.csv", records)
    print(table(records, {name: f"{{{name}}}" for name in SHOWN}))
    print(_counts(rows, found))
    naive = np.log(
        np.array(calibration.naive_rates(rows, rows)) / [row.samples_per_s for row in rows]
    )
    own = np.array([-calibration.log_errors(rows, *calibration.applied(found.logs)), naive])
    print(f"\n{'errors':34} {calibration.HEADER}   nearest other series: median, p90")
    print(line_of("on the points that were fitted to", _by_job(rows, own)))
    lines = [_errors_record(row, "", error) for row, error in zip(rows, own.T, strict=True)]
    if options.held_out:
        each = calibration.left_out(rows, found, lambda row: [row.series])
        print(line_of("each series left out in turn", _joined(rows, each)))
        whole = calibration.left_out(rows, found, calibration.kinds)
        for name, (places, errors) in sorted(whole.items()):
            print(line_of(f"  {name} left out", _by_job([rows[k] for k in places], errors)))
        together = _joined(rows, whole)
        print(line_of("each class left out in turn", together))
        band = float(np.nanquantile(np.abs(together[0]), 0.9))
        print(f"90 % band of a prediction: factor {exp(band):.2f} ({band:.2f} in its logarithm)")
        for name, (places, errors) in (each | whole).items():
            lines += [
                _errors_record(rows[k], name, e) for k, e in zip(places, errors.T, strict=True)
            ]
    write_csv(options.out / "errors.csv", lines)
    for why in why_not:
        print(f"left out: {why}")
    print(f"{len(records)} constants in {options.out / 'constants.csv'}; errors.csv beside it")


def _persia(out: Path, held_out: bool) -> None:
    # Late: they load the simulator.
    from experiments.published import persia

    known = persia.points()
    found = persia.best_batches(known)
    print(persia.report(found, known))
    best = found[0]
    records = [
        {"series": point.series, "gpus": point.gpus, "published": point.samples_per_s,
         "ln_rate_error": round(float(error), 4)}
        for point, error in zip(known, best.errors, strict=True)
    ]  # fmt: skip
    write_csv(out / "persia.csv", records)
    print(f"{len(records)} points in {out / 'persia.csv'}")
    if held_out:
        lines = persia.left_out(known, best.batches)
        theirs = persia.rivals_left_out("taobao-ad")
        write_csv(out / "persia_left_out.csv", lines + theirs)
        print(persia.left_out_table(lines, theirs))


def constants(
    rows: Sequence[Measured], found: calibration.Fit, profiles: bool
) -> list[dict[str, object]]:
    """One record a constant."""
    records, wide, known = [], found.spread, found.identified
    for name, value in found.values.items():
        low, high = value * exp(-1.96 * wide[name]), value * exp(1.96 * wide[name])
        if profiles:
            low, high = calibration.interval(rows, found, name)
        about = FITTED[name]
        entered = sum(calibration.touches(name, row.family) for row in rows)
        records.append(
            {
                "constant": name, "value": f"{value:.4g}", "low_95": f"{low:.3g}",
                "high_95": f"{high:.3g}", "start": f"{about.start:.3g}",
                "start_width_ln": about.width, "preset": f"{about.value:.4g}",
                "points": entered, "identified": "yes" if name in known else "no",
            }
        )  # fmt: skip
    return records


SHOWN = ("constant", "value", "low_95", "high_95", "start", "preset", "points", "identified")
"""Columns of the constants on a terminal."""


def _counts(rows: Sequence[Measured], found: calibration.Fit) -> str:
    series = len({row.series for row in rows})
    known = len(found.identified)
    return (
        f"{len(FITTED)} constants ({known} identified: the data halve the width of their start), "
        f"{len(rows)} points of {len(calibration.classes(rows))} classes in {series} series; "
        f"cost {found.cost:.1f} at a noise of {calibration.NOISE:.0%}"
    )


def _errors_record(row: Measured, without: str, errors: calibration.Errors) -> dict[str, object]:
    model, naive = (round(float(error), 4) for error in errors)
    return {"id": row.label, "series": row.series, "left_out": without, "ln_rate_error": model,
            "naive_ln_rate_error": naive}  # fmt: skip


def line_of(name: str, errors: calibration.Errors) -> str:
    """The model's errors, and beside them the naive ones of the same points."""
    return calibration.compared(name, *errors[:, np.isfinite(errors[0])])


def _by_job(rows: Sequence[Measured], errors: calibration.Errors) -> calibration.Errors:
    """Submitters of one class count as one point."""
    return np.array(
        [np.median(errors[:, places], axis=1) for places in calibration.classes(rows)]
    ).T


def _joined(
    rows: Sequence[Measured], groups: dict[str, tuple[list[int], calibration.Errors]]
) -> calibration.Errors:
    parts = [_by_job([rows[k] for k in places], errors) for places, errors in groups.values()]
    return np.concatenate(parts, axis=1)
