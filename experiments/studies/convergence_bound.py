"""The convergence bound against measured gradients, and the largest step that is stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Annotated, Any, NamedTuple

import numpy as np

from experiments import theory
from experiments.lateness.logistic import (
    GradientNorms,
    Logistic,
    exponents,
    largest_stable_step,
    made,
    train,
)
from experiments.options import Count, OneOf, PairedSeeds, Planned, Some
from experiments.result_cache import ResultCache
from experiments.statistics import t_interval
from experiments.tables import Column, leave, table
from persia_sim.base.popularity import of_batch
from persia_sim.base.schema import Within

CASES: dict[str, tuple[tuple[int, ...], float]] = {
    "cold ids": ((200, 200, 200, 200), 0.0),
    "hot ids": ((200, 200, 200, 2), 1.5),
}
"""Values of the fields, and Zipf's exponent: all ids equally rare, or a few in most samples."""
POPULATION = 2048
MOST_TAU = 4096
TURNED = ((300, 300), 3000)
"""Values of the fields and samples where alpha is turned: ids of a share of 0.0033 beside it, and
ten samples an id, so that no weights fit them all."""
ALPHA_TAUS = (4, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Regularised logistic regression with rows tau updates late."""

    seeds: PairedSeeds = 10
    """Paired seeds: the same samples in every mode."""
    taus: Some[Annotated[int, Within(1, MOST_TAU)]] = (1, 4, 16, 64)
    """Updates that rows (hybrid) or all weights (async) miss."""
    updates: Some[Count] = (64, 512, 4096)
    """Factor T: updates of a run; the learning rate is tuned for each."""
    batch: Some[Count] = (8, 256)
    """Factor B: samples of an update."""
    cases: Some[Annotated[str, OneOf(CASES)]] = tuple(CASES)
    """Factor: cold ids, hot ids."""
    alphas: tuple[Annotated[float, Within(0.003, 0.99)], ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 0.9)
    """Shares of one id, at which the largest stable step is looked for; two at least."""

    def _check(self) -> None:
        if len(self.alphas) < 2:
            raise ValueError(f"alphas must be two or more for an exponent, got {self.alphas}")


class Setting(NamedTuple):
    """One line of the table."""

    case: str
    updates: int
    batch: int
    mode: str
    tau: int


def run(options: Options) -> None:
    """Train, print both tables and draw the figure."""
    # Two kinds of work. First: settings, each trained with all its seeds.
    lateness = [("sync", 0), *product(("hybrid", "async"), options.taus)]
    sizes = product(options.cases, options.updates, options.batch)
    settings = [
        (Setting(*size, *late), options.seeds, POPULATION) for size in sizes for late in lateness
    ]
    trained = ResultCache(options.out / "settings.jsonl")

    # Second: problems of one alpha, whose largest stable step is looked for.
    draws = product(range(options.seeds), options.alphas, ALPHA_TAUS)
    steps = [(*draw, TURNED) for draw in draws]
    turned = ResultCache(options.out / "steps.jsonl")

    # The plan.
    work: tuple[tuple[Sequence[Any], ResultCache], ...] = ((settings, trained), (steps, turned))
    done = sum(len(calls) - results.missing(calls) for calls, results in work)
    print(
        f"{len(settings)} settings of {options.seeds} seeds and {len(steps)} largest steps, {done}"
        f" of them done; results in {options.out}"
    )
    if options.dry_run:
        share = sum(options.updates) / sum(Options().updates)
        print(f"  {options.duration('cases', 'seeds', 'taus', share=share)}, less what is done")
        return

    # Compute what is missing.
    measured = trained.of(_measure, settings, "settings")
    limits = turned.of(_stable, steps, "steps")

    # Show and write both tables.
    records = [_record(*setting, row) for setting, row in zip(settings, measured, strict=True)]
    print(f"\nmean squared norm of the gradient over the run\n{table(records, COLUMNS)}")
    print(_exponents(limits))
    leave(options, {"": records, "_steps": limits}, drawn_first=1)


@cache
def _drawn(case: str, samples: int) -> tuple[Logistic, theory.Problem]:
    """The samples of a case, and the constants of the theorem."""
    logistic = made(*CASES[case], samples)
    return logistic, logistic.problem()


def _bound(setting: Setting, problem: theory.Problem, alpha: float) -> theory.Bound:
    size = {"updates": setting.updates, "batch": setting.batch}
    if setting.mode == "sync":
        return theory.sync(problem, **size)
    if setting.mode == "async":
        return theory.asynchronous(problem, **size, delay=setting.tau)
    return theory.hybrid(problem, **size, tau=setting.tau, alpha=alpha)


def _measure(setting: Setting, seeds: int, population: int) -> dict[str, Any]:
    """Results of training with the step that the theorem tunes ("own"), and with that of sync,
    which it may not allow."""
    logistic, problem = _drawn(setting.case, population)
    alpha = float(logistic.shares.max())
    steps = {
        "own": _bound(setting, problem, alpha).step,
        "sync": theory.sync(problem, updates=setting.updates, batch=setting.batch).step,
    }

    # Results go through JSON, so arrays become lists.
    results: dict[str, Any] = {}
    for name, step in steps.items():
        result: GradientNorms = train(
            logistic,
            seeds=seeds,
            updates=setting.updates,
            batch=setting.batch,
            step=step,
            tau=setting.tau,
            dense_late=setting.mode == "async",
        )
        results[name] = {
            field: value.tolist() if hasattr(value, "tolist") else value
            for field, value in asdict(result).items()
        }
    return results


def _record(
    setting: Setting, seeds: int, population: int, results: dict[str, Any]
) -> dict[str, Any]:
    # The bound with alpha of a sample, as in the theorem, and with that of a batch.
    logistic, problem = _drawn(setting.case, population)
    alpha = float(logistic.shares.max())
    alpha_batch = of_batch(alpha, setting.batch)
    bound = _bound(setting, problem, alpha)
    whole = _bound(setting, problem, alpha_batch)
    plain = theory.sync(problem, updates=setting.updates, batch=setting.batch)

    # What was measured over seeds, with either step.
    measured = t_interval(results["own"]["square_norm"])
    bold = t_interval(results["sync"]["square_norm"])
    return {
        **setting._asdict(),
        "seeds": seeds,
        "alpha": 1.0 if setting.mode == "async" else alpha,
        "alpha_batch": 1.0 if setting.mode == "async" else alpha_batch,
        "smoothness": problem.smoothness,
        "variance": problem.variance,
        "variance_met": results["own"]["variance"],
        "loss_gap": problem.gap,
        "step": bound.step,
        "sync_step": plain.step,
        "untrained": problem.untrained,
        "bound": bound.total,
        "bound_start": bound.start,
        "bound_noise": bound.noise,
        "bound_late": bound.late,
        "vacuous": bound.vacuous,
        "bound_batch_alpha": whole.total,
        "vacuous_batch_alpha": whole.vacuous,
        "bound_of_sync": plain.total,
        "measured": measured.mean,
        "measured_half_width_95": measured.half_width,
        "measured_at_sync_step": bold.mean,
        "measured_at_sync_step_half_width_95": bold.half_width,
    }


def _stable(seed: int, alpha: float, tau: int, turned: tuple[Any, int]) -> dict[str, Any]:
    """The largest step that is stable, and that which the theorem allows, on a problem drawn anew.

    The problem's smoothness does not depend on alpha; its variance and its loss to gain are in the
    result.
    """
    values, samples = turned
    logistic = made(values, 0.0, samples, seed, popular=alpha)
    problem = logistic.problem()
    share = float(logistic.shares.max())
    return {
        "alpha": share,
        "tau": tau,
        "seed": seed,
        "smoothness": problem.smoothness,
        "variance": problem.variance,
        "loss_gap": problem.gap,
        "stable_step": largest_stable_step(logistic, tau),
        "allowed_step": theory.allowed_step(problem.smoothness, tau, share),
    }


def exponents_by_seed(limits: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Exponents (a, t) of step ~ alpha^-a tau^-t, a seed each."""
    import pandas as pd  # late: a second to import

    seeds = pd.DataFrame(limits).groupby("seed")
    columns = (of_seed[[name, "alpha", "tau"]].to_numpy(float).T for _, of_seed in seeds)
    return [exponents(np.log(steps), alphas, taus) for steps, alphas, taus in columns]


def _exponents(limits: Sequence[dict[str, Any]]) -> str:
    lines = ["", "largest step ~ alpha^-a tau^-t (95 % t interval over seeds)"]
    for name, title in (("stable_step", "measured"), ("allowed_step", "the theorem's")):
        fitted = zip(*exponents_by_seed(limits, name), strict=True)
        intervals = (t_interval(list(values)) for values in fitted)
        a, t = (f"{one.mean:.2f} ± {one.half_width:.2f}" for one in intervals)
        lines.append(f"  {title:14} a = {a}, t = {t}")
    return "\n".join(lines)


COLUMNS: dict[str, Column] = {
    "case": "{case}",
    "T": "{updates:,}",
    "B": "{batch}",
    "mode": "{mode}",
    "tau": "{tau}",
    "alpha": "{alpha:.3f}",
    "alpha_B": "{alpha_batch:.3f}",
    "tau alpha_B": lambda r: f"{r['tau'] * r['alpha_batch']:.2g}",
    "bound": lambda r: f"{r['bound']:.3g}" + (" vacuous" if r["vacuous"] else ""),
    "with alpha_B": lambda r: (
        f"{r['bound_batch_alpha']:.3g}" + (" vacuous" if r["vacuous_batch_alpha"] else "")
    ),
    "measured": "{measured:.3g} ± {measured_half_width_95:.1g}",
    "at sync's step": "{measured_at_sync_step:.3g}",
}
