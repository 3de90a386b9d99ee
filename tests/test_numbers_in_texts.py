"""Every gap with an interval that a text quotes is a stored number, rounded once."""

from __future__ import annotations

import csv
import math
import re
from decimal import ROUND_HALF_EVEN, Decimal

import pytest

from experiments.paper.record import STORED
from tests.tree import ROOT

TEXTS = ("README.md", "docs/results/README.md", "docs/guides.md", "docs/training.md")
QUOTED = re.compile(r"([-+−]?\d[\d,]*\.?\d*) ± (\d[\d,]*\.?\d*)")
HALF = "half_width_95"
NOT_IN_TABLES = {
    # The exponents of a fit over `convergence_bound_steps.csv`, whose test recomputes them.
    ("0.96", "0.05"), ("1.12", "0.07"),
}  # fmt: skip
"""Quoted numbers that stand in no cell, and where they are held."""


def stored_pairs() -> list[tuple[Decimal, Decimal]]:
    """(value, half width) of every stored interval, as they are and in thousandths."""
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
    return pairs


def rounded(value: Decimal, text: str) -> bool:
    """Whether the number is what ``text`` says, to its last digit."""
    said = Decimal(text.replace(",", "").replace("−", "-"))
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
