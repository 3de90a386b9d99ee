"""Every mode predicted from runs of sync with one rank, beside a rule of two lines.

Nothing that is predicted was fitted: not the modes, not ranks that share a step. The runs of the
profile are measured twice, and the bands, which lie in a file before any case runs, hold what they
differ by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tables import Column
from experiments.validating.cases import Case, held_by, travels
from experiments.validating.profiling import (
    LINK_TOLERANCE,
    REPEATS,
    MeasuredRun,
    Profile,
    Runs,
    fit_profile,
)
from experiments.validating.schedule import Schedule, contended
from experiments.validating.stages import costs_by_law
from persia_sim.base.files import atomic_write
from persia_sim.base.rules import require
from runtime.profiling.laws import LawPoint
from runtime.profiling.stage_times import STAGES, Stages, parts_of

GOALS = {"mean": 0.06, "largest": 0.20, "knee": 1.0, "histogram": 0.05, "bytes": 0.01}
"""Errors of throughput, of a knee in steps of tau, of a histogram of staleness in total variation,
and of the bytes that a link to another host carries."""
SIDES = 1.645
"""Standard deviations that a normal error exceeds in one of ten cases."""
NEAR_PLATEAU = 16
"""Windows from which on, in `cases.KNEE_WINDOWS`, training is never held up."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is written before a case runs."""

    samples_per_s: float
    low: float
    """The 90 % band of one run's throughput."""
    high: float
    rule: float
    """Samples a second of `rule_of`."""
    stale_steps: float
    step_p95_s: float
    stale_shares: tuple[float, ...]


def predicted(profile: Profile, case: Case, steps: int) -> tuple[Schedule, Stages]:
    """The laws' stages through the schedule; what is asked to sleep sleeps as long as it does."""
    held = held_by(case, steps)
    costs = costs_by_law(profile.laws, held, case.mode, case.ranks, case.half)

    def slept(asked_s: float) -> float:
        return profile.laws["sleep"]({"one": 1.0, "asked_s": asked_s}) if asked_s else 0.0

    as_slept = replace(case, slow_s=slept(case.slow_s))
    return contended(as_slept, costs, profile.host, steps, slept(case.latency_s))


def rule_of(case: Case, stages: Stages) -> float:
    """Samples a second by two lines: in sync the sum of the four printed stages, else the longest.

    >>> from persia_sim.base.vocabulary import Mode
    >>> stages = dict.fromkeys(STAGES, 0.0) | {"load": 0.001, "forward": 0.003}
    >>> round(rule_of(Case(mode=Mode.SYNC), stages)), round(rule_of(Case(), stages))
    (128000, 170667)
    """
    parts = parts_of(stages).values()
    step_s = sum(parts) if case.mode.reads_fresh_rows else max(parts)
    return case.updates_per_step * case.batch / step_s


def predictions(
    every: Sequence[Case],
    runs: Runs,
    loops: Mapping[str, Sequence[LawPoint]],
    cores: int,
    steps: int,
) -> dict[str, Prediction]:
    """By the profile's runs together, with bands from what each of its measurements predicts.

    A band's variance is the sum of three: what the two profiles' predictions differ by, over all
    cases; what two runs of one configuration differ by; and how well the laws fit.
    """
    # All runs together, and each measurement alone.
    both = fit_profile(runs, loops, cores)
    halves = [
        fit_profile({run: [repeats[k]] for run, repeats in runs.items()}, loops, cores)
        for k in range(REPEATS)
    ]
    of_each = [[predicted(half, case, steps)[0].samples_per_s for case in every] for half in halves]

    # What is not known, as the variance of a logarithm.
    of_profile = _variance(zip(*of_each, strict=True)) / REPEATS
    of_run = _variance([run.samples_per_s for run in repeats] for repeats in runs.values())
    fits = [law.spread for name, law in both.laws.items() if name in STAGES]
    of_laws = float(np.mean(np.square(fits)))
    factor = exp(SIDES * sqrt(of_profile + of_run + of_laws))

    # Each case by all runs.
    result = {}
    for case in every:
        expected, stages = predicted(both, case, steps)
        rate = expected.samples_per_s
        result[case.name] = Prediction(
            samples_per_s=rate,
            low=rate / factor,
            high=rate * factor,
            rule=rule_of(case, stages),
            stale_steps=expected.stale_steps,
            step_p95_s=expected.step_p95_s,
            stale_shares=expected.stale_shares,
        )
    return result


def _variance(pairs: Any) -> float:
    """Variance of one logarithm, from several of each configuration."""
    return float(np.mean([np.var(np.log(values), ddof=1) for values in pairs]))


def write_before_runs(path: Path, foretold: Mapping[str, Prediction]) -> None:
    """Write what is predicted; where it lies already, it must be the same."""
    text = json.dumps({name: asdict(each) for name, each in foretold.items()}, indent=1)
    if path.exists():
        same = path.read_text() == text
        rule = "holds other predictions than these runs of the profile give"
        require(same, "predictions", path, rule, "choose another --out, or remove the folder")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())


def error(predicted: float, measured: float) -> float:
    """The signed error: 0.1 where the prediction is 10 % above the measurement; 0 for 0 against 0.

    >>> round(error(110.0, 100.0), 9), error(0.0, 0.0)
    (0.1, 0.0)
    """
    if predicted == measured:
        return 0.0
    return predicted / measured - 1 if measured else np.inf


def total_variation(first: Sequence[float], second: Sequence[float]) -> float:
    """Half the sum of the distances of two histograms: the share that lies elsewhere.

    >>> total_variation([0.5, 0.5], [0.25, 0.5, 0.25])
    0.25
    """
    size = max(len(first), len(second))
    both = [np.pad(np.asarray(each, float), (0, size - len(each))) for each in (first, second)]
    return float(np.abs(both[0] - both[1]).sum() / 2)


def knee_of(rates: Mapping[int, float]) -> float:
    """The window at which throughput stops growing, from samples a second by tau: where the line
    through the origin of the batches in flight, tau + 1, meets the plateau.

    >>> knee_of({0: 10.0, 1: 20.0, 16: 50.0, 32: 50.0})
    4.0
    """
    plateau = float(np.median([rate for tau, rate in rates.items() if tau >= NEAR_PLATEAU]))
    rising = [rate / (tau + 1) for tau, rate in rates.items() if rate < 0.8 * plateau]
    return plateau / float(np.median(rising)) - 1 if rising else 0.0


def records_of(
    every: Sequence[Case],
    foretold: Mapping[str, Prediction],
    runs: Mapping[str, Sequence[MeasuredRun]],
) -> list[dict[str, Any]]:
    """A record for each case: predictions beside the medians of its runs."""
    records = []
    for case in every:
        # The medians of its runs, and the mean of their histograms. Runs on a link that was off its
        # rate count only where there are no others.
        expected = foretold[case.name]
        of_case = [run for run in runs[case.name] if run.on_its_link] or runs[case.name]
        rate = float(np.median([run.samples_per_s for run in of_case]))
        p95_s = float(np.median([run.step_p95_s for run in of_case]))
        size = max(len(run.stale_shares) for run in of_case)
        shares = [np.pad(run.stale_shares, (0, size - len(run.stale_shares))) for run in of_case]
        measured_shares = np.mean(shares, axis=0).tolist()

        # Each figure beside its prediction.
        record: dict[str, Any] = {
            "case": case.name,
            "samples_per_s": rate,
            "predicted": expected.samples_per_s,
            "error": error(expected.samples_per_s, rate),
            "rule": expected.rule,
            "rule_error": error(expected.rule, rate),
            "band_low": expected.low,
            "band_high": expected.high,
            "runs": len(of_case),
            "inside": sum(expected.low <= run.samples_per_s <= expected.high for run in of_case),
            "step_p95_s": p95_s,
            "step_p95_predicted_s": expected.step_p95_s,
            "step_p95_error": error(expected.step_p95_s, p95_s),
            "stale_steps": float(np.mean([run.stale_steps for run in of_case])),
            "stale_predicted": expected.stale_steps,
            "stale_variation": total_variation(expected.stale_shares, measured_shares),
            "foreign_cores": float(np.median([run.foreign_cores for run in of_case])),
        }
        if case.servers:
            record |= _of_link(case, of_case, len(runs[case.name]))
        records.append(record)
    return records


def _of_link(case: Case, of_case: Sequence[MeasuredRun], runs: int) -> dict[str, Any]:
    """Bytes of a rank's batch, counted and predicted, and what the link did."""
    there, back = map(float, np.median([run.link_bytes for run in of_case], axis=0))
    expected = travels(case)
    reads = 2 if case.mode.prefetches_rows else 1  # read ahead, and again
    return {
        "sent_bytes": there,
        "sent_error": error(expected.request_bytes + expected.push_bytes, there),
        "come_bytes": back,
        "come_error": error(reads * expected.rows_bytes, back),
        "control": max((run.control for run in of_case), key=lambda share: abs(share - 1)),
        "off_their_link": runs - sum(run.on_its_link for run in of_case),
    }


COLUMNS: dict[str, Column] = {
    "": "{case}",
    "samples/s": "{samples_per_s:,.0f}",
    "predicted": "{predicted:,.0f}",
    "error": "{error:+.1%}",
    "rule": "{rule_error:+.1%}",
    "90 % band": "{band_low:,.0f}-{band_high:,.0f}",
    "inside": "{inside}/{runs}",
    "p95 of a step [ms]": lambda r: f"{1e3 * r['step_p95_s']:.1f} ({r['step_p95_error']:+.0%})",
    "stale": "{stale_steps:.2f}",
    "predicted stale": "{stale_predicted:.2f}",
    "histograms apart": "{stale_variation:.3f}",
    "foreign cores": "{foreign_cores:.2f}",
}
LINK_COLUMNS: dict[str, Column] = {
    "of a rank's batch": "{case}",
    "sent [kB]": lambda r: f"{r['sent_bytes'] / 1e3:,.0f} ({r['sent_error']:+.1%})",
    "come [kB]": lambda r: f"{r['come_bytes'] / 1e3:,.0f} ({r['come_error']:+.1%})",
    "worst control": "{control:.2f}",
    "runs off their link": "{off_their_link}",
}
"""Bytes that the interface counted and the signed error of the prediction; control transfers."""


def conclusion(every: Sequence[Case], records: Sequence[Mapping[str, Any]]) -> str:
    """The goals beside the errors, and the rule's beside them."""

    def verdict(text: str, value: float, goal: float, show: str) -> str:
        met = "met" if value <= goal else "MISSED"
        return f"{text}: {value:{show}} (goal {goal:{show}}: {met})"

    # Throughput, the rule's, and how many runs the bands held.
    errors = np.abs([r["error"] for r in records])
    by_rule = np.abs([r["rule_error"] for r in records])
    held = sum(r["inside"] for r in records) / sum(r["runs"] for r in records)
    lines = [
        verdict("throughput, mean error", errors.mean(), GOALS["mean"], ".1%"),
        verdict("throughput, largest", errors.max(), GOALS["largest"], ".1%"),
        f"the two-line rule: mean {by_rule.mean():.1%}, largest {by_rule.max():.1%}",
        f"90 % bands, written before the runs, hold {held:.0%} of them",
    ]

    # Where windows decide: the knee.
    by_name = {r["case"]: r for r in records}
    windows = [case for case in every if case.name in by_name and case == _of_knee(case)]
    known = [case.window for case in windows]
    if min(known, default=NEAR_PLATEAU) < NEAR_PLATEAU <= max(known, default=0):
        knees = [
            knee_of({case.window: by_name[case.name][column] for case in windows})
            for column in ("predicted", "samples_per_s")
        ]
        text = f"knee at tau {knees[0]:.1f}, measured {knees[1]:.1f}, apart"
        lines.append(verdict(text, abs(knees[0] - knees[1]), GOALS["knee"], ".1f"))

    # Distributions.
    variations = [r["stale_variation"] for r in records]
    p95 = np.abs([r["step_p95_error"] for r in records])
    lines += [
        verdict("histogram of staleness, mean", np.mean(variations), GOALS["histogram"], ".3f"),
        verdict("histogram of staleness, worst", np.max(variations), GOALS["histogram"], ".3f"),
        f"95th percentile of a step, mean error {p95.mean():.1%}",
    ]

    # Of servers on another host: bytes, and runs on a link that was not what it was shaped to.
    linked = [r for r in records if "sent_error" in r]
    if linked:
        worst = max(abs(r[f"{way}_error"]) for r in linked for way in ("sent", "come"))
        off = sum(r["off_their_link"] for r in linked)
        lines += [
            verdict("bytes, largest error", worst, GOALS["bytes"], ".1%"),
            f"{off} runs on a link more than {LINK_TOLERANCE:.0%} off its rate",
        ]
    return "\n".join(lines)


def _of_knee(case: Case) -> Case:
    return Case(window=case.window, latency_s=case.latency_s) if case.latency_s else Case(dim=1)
