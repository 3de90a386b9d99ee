"""Recipes of the synthetic stream: the default, and shapes of the paper's workloads.

A shape copies what is known of a workload (number of fields, dense features, distinct ids, click
rate); everything else is assumed and said so in its ``source``: how the ids spread over the fields,
their popularity, and the truth. ``scale`` multiplies the distinct ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from runtime.data.synthetic import Pair, Recipe, SyntheticField

SMALLEST_FIELD = 4
"""Distinct ids of a shape's smallest field (assumed)."""
LARGEST_SCALE = 1e6
"""Of a shape; a field's ids must stay below 2**53, which the largest shapes reach before this."""
PAPER_DIM = 16
"""Embedding dimension of the paper's public workloads; parameters / 16 = ids."""


def default() -> Recipe:
    """A million users, and a truth that one pass of 3 million samples can learn.

    Most of the logit is carried by fields whose ids come back often; the rare users, items and
    authors carry the rest. Three pairs of fields act together, out of reach of a linear model.
    """
    one = SyntheticField
    return Recipe(
        name="default",
        fields=(
            one(name="user", values=1_000_000, exponent=1.25, weight=0.2),
            one(name="item", values=200_000, exponent=1.25, weight=0.35),
            one(name="author", values=50_000, exponent=1.25, weight=0.25),
            one(name="tags", values=20_000, exponent=1.25, weight=0.4, max_length=5),
            one(name="category", values=500, exponent=1.1, weight=0.7),
            one(name="city", values=1_000, exponent=1.1, weight=0.3),
            one(name="device", values=100, exponent=1.0, weight=0.4),
            one(name="hour", values=24, exponent=0.3, weight=0.4),
            one(name="page", values=8, exponent=0.8, weight=0.5),
        ),
        pairs=(
            Pair(first="category", second="page", weight=0.6),
            Pair(first="device", second="hour", weight=0.6),
            Pair(first="item", second="page", weight=0.3),
        ),
        dense=2,
        dense_weight=0.3,
        click_rate=0.25,
        gain=1.2,
        source="made up for this project; every number is a choice",
    )


def _shape(
    name: str,
    *,
    fields: int,
    dense: int,
    distinct_ids: float,
    click_rate: float,
    source: str,
    multi: int = 0,
    exponent: float = 1.1,
    scale: float = 1.0,
) -> Recipe:
    """A recipe of a given shape; the last ``multi`` fields hold bags of 1 to 8 ids."""
    if not 0 < scale <= LARGEST_SCALE:  # NaN is not
        raise ValueError(
            f"scale must be > 0 and at most {LARGEST_SCALE:g}, got {scale};"
            " 1 is the size of the real workload"
        )
    sizes = _field_sizes(round(distinct_ids * scale), fields)
    return Recipe(
        name=name if scale == 1.0 else f"{name}:{scale:g}",
        fields=tuple(
            SyntheticField(
                name=f"c{n}",
                values=size,
                exponent=exponent,
                weight=1.0 if size < 1_000_000 else 0.5,
                max_length=8 if n >= fields - multi else 1,
            )
            for n, size in enumerate(sizes)
        ),
        pairs=(
            Pair(first=f"c{fields - 1}", second=f"c{fields - 2}", weight=1.5),
            Pair(first=f"c{fields - 3}", second=f"c{fields // 2}", weight=1.5),
        ),
        dense=dense,
        click_rate=click_rate,
        gain=1.2,
        source=source,
    )


def _field_sizes(total: int, fields: int) -> list[int]:
    """Distinct ids of each field, largest first: a geometric series that sums to ``total``."""
    total = max(total, fields * SMALLEST_FIELD)
    low, high = 1.0, (total / SMALLEST_FIELD) ** (1 / (fields - 1))
    for _ in range(200):
        ratio = (low + high) / 2
        above = sum(SMALLEST_FIELD * ratio**n for n in range(fields)) > total
        low, high = (low, ratio) if above else (ratio, high)
    sizes = [int(SMALLEST_FIELD * low**n) for n in range(fields)]
    sizes[-1] += total - sum(sizes)
    return sizes[::-1]


_ASSUMED = "ids over fields, popularity (Zipf 1.1) and truth assumed"
_CRITEO_SHAPE = "26 categorical and 13 integer columns, as in the public Criteo logs"

_SHAPES: dict[str, Callable[..., Recipe]] = {
    "taobao-ad": partial(
        _shape,
        fields=14,
        dense=0,
        distinct_ids=1.81e6,
        click_rate=0.0514,
        source="paper: 29 M parameters, 16 a row; 14 fields assumed from the public columns; "
        f"click rate 5.14 % recalled, not read; {_ASSUMED}",
    ),
    "avazu-ad": partial(
        _shape,
        fields=22,
        dense=0,
        distinct_ids=8.38e6,
        click_rate=0.1698,
        source="paper: 134 M parameters, 16 a row; 22 public columns; click rate of Avazu_x4 "
        f"(BARS); {_ASSUMED}",
    ),
    "criteo-ad": partial(
        _shape,
        fields=26,
        dense=13,
        distinct_ids=33.75e6,
        click_rate=0.2562,
        source=f"paper: 540 M parameters, 16 a row; {_CRITEO_SHAPE}; click rate of Criteo_x4 "
        f"(BARS); {_ASSUMED}",
    ),
    "kwai-video": partial(
        _shape,
        fields=40,
        dense=0,
        multi=8,
        distinct_ids=2e12 / PAPER_DIM,
        click_rate=0.4496,
        source="paper: 2 T parameters; the data is private: 16 a row, 40 fields (8 with several "
        "ids) and one task assumed, click rate that of a public log of the same company "
        f"(KuaiRand-Pure, 25 April to 8 May 2022); {_ASSUMED}",
    ),
    **{
        f"criteo-syn{n}": partial(
            _shape,
            fields=26,
            dense=13,
            distinct_ids=6.25e12 * 2 ** (n - 1) / PAPER_DIM,
            click_rate=0.2562,
            source=f"paper: {6.25 * 2 ** (n - 1):g} T parameters, synthetic after Criteo; 16 a row "
            f"assumed; {_CRITEO_SHAPE}; click rate of Criteo_x4 (BARS); {_ASSUMED}",
        )
        for n in range(1, 6)
    },
    **{
        f"zipf-{exponent:g}": partial(
            _shape,
            fields=16,
            dense=0,
            distinct_ids=400_000,
            click_rate=0.25,
            exponent=exponent,
            source="made up for this project: popularity is what the three of them differ in",
        )
        for exponent in (1.1, 1.4, 1.8)
    },
}

PRESETS = ("default", *_SHAPES)
"""Names of all recipes."""


def recipe(name: str, scale: float = 1.0, draw: int = 1) -> Recipe:
    """A recipe by name; a shape with ``scale`` times its distinct ids.

    Another ``draw`` is another truth, other samples and other test rows of the same description.
    """
    if name != "default":
        return replace(_SHAPES[name](name, scale=scale), seed=draw)
    if scale != 1.0:
        raise ValueError(f"the default recipe has one size, got scale {scale}; scale a shape")
    return replace(default(), seed=draw)
