"""The paper's claims: what the text says, what its own plots show, what is found here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.paper.auc_evidence import LEAST_STEPS, auc_gaps, long_runs, plotted_auc_gaps
from experiments.paper.evidence import Table, table
from experiments.paper.rate_evidence import (
    deviations,
    efficiencies,
    plotted_deviations,
    plotted_efficiencies,
    plotted_ratio,
    simulated_ratio,
)
from experiments.paper.verdicts import (
    LEAST_DATA_SETS,
    Found,
    Range,
    Verdict,
    judged,
    together,
)

Lookup = Callable[[str], Table | None]
"""File name of a table -> the table."""

SAME = 0.10
"""A speed-up within ten per cent of the stated one counts as the stated one."""
NEARLY_LINEAR = Range(0.8, math.inf)
"""Share of the speed-up that as many workers more would give at best."""
STABLE = Range(0.95, 1.05)
"""Each size's throughput over the mean of all sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One number of a claim: the range that the text claims, and what was found for it."""

    label: str
    claimed: Range
    plots: tuple[Found, ...]
    found: tuple[Found, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim, judged."""

    key: str
    says: str
    """The text."""
    rule: str
    """What range the text is taken to claim."""
    parts: tuple[Part, ...]
    unit: str = ""
    scale: float = 1.0
    """For the reader: 1e3 for thousandths of AUC."""
    tables: tuple[Table, ...] = field(default=())
    """That the findings were computed from."""
    note: str = ""
    of_every_data_set: bool = False
    """One data set may contradict it, but not support it."""

    @property
    def verdict(self) -> Verdict:
        """By what was found here."""
        return self._together([(part, found) for part in self.parts for found in part.found])

    @property
    def plots_verdict(self) -> Verdict:
        """By the paper's own plots."""
        return self._together([(part, found) for part in self.parts for found in part.plots])

    @property
    def sources(self) -> str:
        """Which tables the findings are of: "this run", or since when they are stored."""
        return "; ".join(dict.fromkeys(t.source for t in self.tables)) or "no table yet"

    def verdict_of(self, part: Part, found: Found) -> Verdict:
        """One number of a part, judged as one of all that the claim has."""
        everything = [found for part in self.parts for found in (*part.found, *part.plots)]
        family = sum(found.n is not None for found in everything)
        return judged(part.claimed, found, max(1, family))

    def _together(self, numbers: Sequence[tuple[Part, Found]]) -> Verdict:
        verdict = together(self.verdict_of(part, found) for part, found in numbers)
        data_sets = {found.data for _, found in numbers}
        few = self.of_every_data_set and len(data_sets) < LEAST_DATA_SETS
        return "undecided" if few and verdict == "supported" else verdict


def claims(out: Path) -> list[Claim]:
    """All claims, by the tables of a report's folder and those stored."""
    return judged_claims(lambda name: table(name, out))


def judged_claims(lookup: Lookup) -> list[Claim]:
    """All claims, by tables that are looked up by name."""
    return [*_accuracy(lookup), *_speed(lookup)]


def _accuracy(lookup: Lookup) -> list[Claim]:
    tables = _known([long_runs(lookup("gap_study.csv")) or lookup("demo.csv")])
    found_hybrid = tuple(f for t in tables for f in auc_gaps(t.rows, "hybrid"))
    found_async = tuple(f for t in tables for f in auc_gaps(t.rows, "async"))
    within, below = Range(-1e-3, math.inf), Range(-1e-2, -5e-3)
    hybrid = Part(
        label="hybrid minus sync",
        claimed=within,
        plots=plotted_auc_gaps("hybrid"),
        found=found_hybrid,
    )
    late = Part(
        label="async minus sync", claimed=below, plots=plotted_auc_gaps("async"), found=found_async
    )
    unit = {
        "unit": "thousandths of AUC", "scale": 1e3, "tables": tables, "of_every_data_set": True,
    }  # fmt: skip
    seeds = (
        "Accuracy found here: 95 % intervals over paired seeds, one for each data set, task and"
        " choice of learning rates. Of the plots: the error of reading them; they compare Persia"
        " with XDL's sync. The claims"
        f" are of trained models: runs of gap-study with fewer than {LEAST_STEPS:,} dense updates,"
        " as in its quick form, are left out, and the demo's stand instead."
    )
    return [
        Claim(
            key="hybrid-auc",
            says="Test AUC of hybrid training is always within 0.1 % of synchronous training.",
            rule="a gap to sync above -1 thousandth of AUC, in every data set and task",
            parts=(hybrid,),
            note=seeds,
            **unit,
        ),
        Claim(
            key="async-auc",
            says="Fully asynchronous training ends 0.5 to 1.0 % of AUC below synchronous training.",
            rule="a gap to sync between -10 and -5 thousandths of AUC, in every data set and task",
            parts=(late,),
            note=seeds,
            **unit,
        ),
    ]


SPEED_UPS = (
    ("xdl", "7.12 times the throughput of XDL sync and 8.4 times that of XDL async on Taobao-Ad.",
     (("over XDL sync", 7.12, "taobao-ad Persia hybrid", "taobao-ad XDL sync", 8),
      ("over XDL async", 8.4, "taobao-ad Persia hybrid", "taobao-ad XDL async", 8))),
    ("paddle", "1.71 times the throughput of PaddlePaddle on Taobao-Ad.",
     (("over PaddlePaddle", 1.71, "taobao-ad Persia hybrid", "taobao-ad PaddlePaddle heter", 8),)),
    ("kwai", "3.8 and 2.6 times the throughput of synchronous training on Kwai-Video.",
     (("at 8 GPUs", 3.8, "kwai-video hybrid", "kwai-video sync", 8),
      ("at 64 GPUs", 2.6, "kwai-video hybrid", "kwai-video sync", 64))),
)  # fmt: skip
"""Key, text, and of each part: label, stated speed-up, the two series of scale-workers, GPUs."""


def _speed(lookup: Lookup) -> list[Claim]:
    workers, sizes = lookup("scale_workers.csv"), lookup("scale_model_size.csv")
    found = [
        _speed_up(key, says, [(*part, workers) for part in parts])
        for key, says, parts in SPEED_UPS
    ]  # fmt: skip
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
            tables=_known([workers]),
            note="Scaling from 1 GPU: its bar without all-reduce, the only one that was measured.",
        ),
        Claim(
            key="stable",
            says="Throughput stays stable from 6.25 to 100 trillion parameters.",
            rule=f"each size within {STABLE.high - 1:.0%} of the mean of the five",
            parts=(stable,),
            tables=_known([sizes]),
        ),
    ]
    return found


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
        tables=_known(tables),
        note="Speeds found here are the simulator's; their intervals are its largest errors on the"
        " two series, fitted and predicted points apart. Intervals of the plots are the error of"
        " reading them.",
    )


def _known(tables: Sequence[Table | None]) -> tuple[Table, ...]:
    found = [t for t in tables if t is not None]
    return tuple({id(t): t for t in found}.values())


def claim_records(found: Sequence[Claim]) -> list[dict[str, Any]]:
    """One line a number, for claims.csv."""
    records = []
    for claim in found:
        sources = "; ".join(f"{t.command} ({t.source})" for t in claim.tables)
        for part in claim.parts:
            for kind, numbers in (("own plots", part.plots), ("found", part.found)):
                for number in numbers:
                    records.append(
                        {
                            "claim": claim.key,
                            "part": part.label,
                            "claimed_low": part.claimed.low,
                            "claimed_high": part.claimed.high,
                            "of": kind,
                            "label": number.label,
                            "value": number.value,
                            "low": number.low,
                            "high": number.high,
                            "seeds": "" if number.n is None else number.n,
                            "fitted": number.fitted,
                            "verdict": claim.verdict_of(part, number),
                            "verdict_of_claim": claim.verdict,
                            "verdict_of_own_plots": claim.plots_verdict,
                            "command": sources,
                        }
                    )
    return records
