"""Figures from tables: CSV in, matplotlib figure out; imports none of the other packages."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

SHORT = {
    "kuairand-pure-14d": "KuaiRand",
    "movielens-latest-small-2016": "MovieLens",
    "oulad-assessments": "OULAD",
    "tennis": "tennis",
    "zipf-1.1": "drawn, Zipf 1.1",
    "zipf-1.8": "drawn, Zipf 1.8",
}
"""Short names of streams, where there is no room for the long ones."""
MODULES = ("auc", "clusters", "lateness", "throughput")


def figure_of(stem: str) -> Callable[..., Any]:
    """The function that draws the table of this name: `demo_figure` of `demo`."""
    for name in MODULES:  # imported here, since matplotlib takes a second
        functions = vars(import_module(f"paper_figs.{name}"))
        if f"{stem}_figure" in functions:
            return functions[f"{stem}_figure"]
    raise LookupError(f"no {stem}_figure in {', '.join(MODULES)} of paper_figs")
