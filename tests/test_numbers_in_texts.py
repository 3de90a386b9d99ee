"""Every gap with an interval that a text quotes is a stored number, rounded once."""

from __future__ import annotations

import csv
import math
import re
from decimal import ROUND_HALF_EVEN, Decimal

import pytest

from experiments.paper.record import STORED
from experiments.statistics import t_interval
from tests import results_page
from tests.tree import ROOT

TEXTS = ("README.md", "docs/results/README.md", "docs/guides.md", "docs/training.md")
QUOTED = re.compile(r"([-+]?\d[\d,]*\.?\d*) ± (\d[\d,]*\.?\d*)")
HALF = "half_width_95"
NOT_IN_TABLES = {
    # The exponents of a fit over `convergence_bound_steps.csv`, whose test recomputes them.
    ("0.96", "0.05"), ("1.12", "0.07"),
    # `convergence` prints it with the error of test users, which its table of curves lacks.
    ("-1.4", "1.7"),
}  # fmt: skip
"""Quoted numbers that stand in no cell, and where they are held."""


def stored_pairs() -> list[tuple[Decimal, Decimal]]:
    """(value, half width) of every stored interval, as they are and in thousandths.

    Those of the first day's transcript count, too: a test types its commands again.
    """
    pairs = []
    for path in STORED.glob("*.csv"):
        with path.open() as file:
            for line in csv.DictReader(file):
                for name, text in line.items():
                    if not name.endswith(HALF) or not text or math.isnan(float(text)):
                        continue
                    value = line.get(name.removesuffix(HALF).rstrip("_"), "")
                    if value and not math.isnan(float(value)):
                        for scale in (1, 1000):
                            for sign in (1, -1):
                                pairs.append((sign * scale * Decimal(value), scale * Decimal(text)))
    transcript = QUOTED.findall(results_page.TRANSCRIPT.read_text())
    pairs += [(Decimal(value), Decimal(half)) for value, half in transcript]
    return pairs + [pair for name in CURVES for pair in pairs_of_curves(name)]


CURVES = ("convergence.csv", "time_to_auc.csv")
"""Tables of curves, a line for each seed: a gap is the mean of paired final AUCs."""


def pairs_of_curves(name: str) -> list[tuple[Decimal, Decimal]]:
    """Gaps to sync at the end, with t intervals over seeds, in thousandths."""
    ends: dict[tuple[str, str], dict[str, float]] = {}
    with (STORED / name).open() as file:
        for line in csv.DictReader(file):
            if line["drained"] == "True":
                of_mode = ends.setdefault((line["data"], line["mode"]), {})
                of_mode[line["seed"]] = float(line["auc"])
    pairs = []
    for (data, mode), aucs in ends.items():
        sync = ends.get((data, "sync"), {})
        gap = t_interval([aucs[seed] - sync[seed] for seed in aucs if seed in sync])
        if mode != "sync" and gap.n > 1:
            pairs.append((Decimal(1e3 * gap.mean), Decimal(1e3 * gap.half_width)))
    return pairs


def rounded(value: Decimal, text: str) -> bool:
    """Whether the number is what ``text`` says, to its last digit."""
    said = Decimal(text.replace(",", ""))
    return value.quantize(Decimal(1).scaleb(said.as_tuple().exponent), ROUND_HALF_EVEN) == said


@pytest.mark.parametrize("name", TEXTS)
def test_every_gap_with_an_interval_is_a_stored_one(name):
    pairs = stored_pairs()
    missing = [
        f"{mean} ± {half}"
        for mean, half in QUOTED.findall((ROOT / name).read_text())
        if (mean, half) not in NOT_IN_TABLES
        and not any(rounded(value, mean) and rounded(width, half) for value, width in pairs)
    ]
    assert not missing, f"{name} quotes what no stored table has: {missing}"


@pytest.mark.parametrize("page", results_page.BLOCKS, ids=lambda page: page.parent.name)
def test_what_a_page_quotes_of_the_stored_tables_is_in_them(page):
    text = page.read_text()
    assert text == results_page.written(page), "run: python -m tests.results_page"
