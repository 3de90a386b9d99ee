"""Every fitted constant, from measurements: values, what the data say of each, errors held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np

from experiments.published.calibration import (
    HEADER,
    NOISE,
    Fit,
    classes,
    fit,
    interval,
    log_errors,
    naive_rates,
    score,
    without_each_series,
)
from experiments.published.gpu_rows import Measured, MeasuredFiles
from experiments.tables import aligned, write_csv
from persia_sim.presets.software import FITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(MeasuredFiles):
    """Persia's published points; with CSVs as of `predict-published`, GPU-sharded training."""

    held_out: bool = True
    """Also predict what is left out: each series in turn, or of Persia's points Taobao-Ad's (a
    minute or two)."""
    profiles: bool = False
    """Also refit along each constant for its 95 % interval (ten to thirty minutes)."""

    def check(self) -> None:
        """That the files are there."""
        given = self.rows or self.workloads != Path() or self.systems != Path()
        self.check_files(needed=bool(given))


def run(options: Options) -> None:
    """Fit, print constants and errors, write persia.csv or constants.csv and errors.csv."""
    if not options.rows:
        _persia(options.out, options.held_out)
        return
    rows, left_out = options.load(options.rows)
    rows = [row for row in rows if row.samples_per_s]
    if len(rows) < 2:
        raise ValueError(f"rows hold {len(rows)} measurements; a fit needs two or more")
    found = fit(rows)
    records = constants(rows, found, options.profiles)
    write_csv(options.out / "constants.csv", records)
    print(table(records))
    print(counts(rows, found))
    pairs = zip(rows, log_errors(rows, *found.applied()), strict=True)
    errors = [errors_record(row, e) for row, e in pairs]
    print(f"\n{'errors':34} {HEADER}")
    own = [-float(e["ln_step_error"]) for e in errors]
    lines = {"on the points that were fitted to": own}
    if options.held_out:
        held = (-without_each_series(rows, found)).tolist()
        for record, error in zip(errors, held, strict=True):
            record["held_out_ln_rate_error"] = round(error, 4)
        lines["each series left out in turn"] = held
    naive = naive_rates(rows, rows)
    lines["nearest other series (naive)"] = [
        log(rate / (row.samples_per_s or 1.0)) for rate, row in zip(naive, rows, strict=True)
    ]
    for name, values in lines.items():
        print(f"{name + ', classes':34} {score(_by_class(rows, values))}")
        print(f"{name + ', series':34} {score(_by_series(rows, values))}")
    if options.held_out:
        series = _by_series(rows, lines["each series left out in turn"])
        print(f"90 % band of a prediction: factor {exp(float(np.quantile(series, 0.9))):.2f}")
    write_csv(options.out / "errors.csv", errors)
    for why in left_out:
        print(f"left out: {why}")
    print(f"{len(records)} constants in {options.out / 'constants.csv'}; errors.csv beside it")


def _persia(out: Path, held_out: bool) -> None:
    # Late: they load the simulator.
    from experiments.published.persia import best_batches, left_out, left_out_table, points, report

    known = points()
    found = best_batches(known)
    print(report(found, known))
    best = found[0]
    records = [
        {"series": point.series, "gpus": point.gpus, "published": point.samples_per_s,
         "ln_rate_error": round(float(error), 4)}
        for point, error in zip(known, best.errors, strict=True)
    ]  # fmt: skip
    write_csv(out / "persia.csv", records)
    print(f"{len(records)} points in {out / 'persia.csv'}")
    if held_out:
        lines = left_out("taobao-ad", known, best.batches)
        write_csv(out / "persia_left_out.csv", lines)
        print(f"\n{left_out_table(lines)}")


def constants(rows: Sequence[Measured], found: Fit, profiles: bool) -> list[dict[str, object]]:
    """One record a constant."""
    records = []
    parts = zip(found.constants.names, found.logs, found.spread(), found.identified(), strict=True)
    for name, value, spread, known in parts:
        low, high = exp(value - 1.96 * spread), exp(value + 1.96 * spread)
        if profiles:
            low, high = interval(rows, found, name)
        about = found.constants.table[name]
        entered = sum(found.constants.touches(name, row.family) for row in rows)
        records.append(
            {
                "constant": name, "value": f"{exp(value):.4g}", "low_95": f"{low:.3g}",
                "high_95": f"{high:.3g}", "start": f"{about.start:.3g}",
                "start_width_ln": about.width, "preset": f"{about.value:.4g}",
                "points": entered, "identified": "yes" if known else "no",
            }
        )  # fmt: skip
    return records


def table(records: Sequence[dict[str, object]]) -> str:
    """The constants, aligned."""
    shown = ("constant", "value", "low_95", "high_95", "start", "preset", "points", "identified")
    return aligned(shown, [[str(record[c]) for c in shown] for record in records])


def counts(rows: Sequence[Measured], found: Fit) -> str:
    """How many constants were fitted to how much."""
    series = len({row.series for row in rows})
    known = int(found.identified().sum())
    return (
        f"{len(FITTED)} constants ({known} identified: the data halve the width of their start), "
        f"{len(rows)} points of {len(classes(rows))} classes in {series} series; "
        f"cost {found.cost:.1f} at a noise of {NOISE:.0%}"
    )


def errors_record(row: Measured, error: float) -> dict[str, object]:
    """One line of errors.csv."""
    return {"id": row.label, "series": row.series, "ln_step_error": round(float(error), 4)}


def _by_class(rows: Sequence[Measured], errors: Sequence[float]) -> list[float]:
    return [float(np.median([errors[k] for k in places])) for places in classes(rows)]


def _by_series(rows: Sequence[Measured], errors: Sequence[float]) -> list[float]:
    groups: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        groups.setdefault(row.series, []).append(abs(error))
    return [float(np.median(group)) for group in groups.values()]
