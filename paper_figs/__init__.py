"""Figures from tables: CSV in, matplotlib figure out; imports none of the other packages."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

MODULES = ("auc", "clusters", "lateness", "throughput")


def figure_of(stem: str) -> Callable[..., Any]:
    """The function that draws the table of this name: `demo_figure` of `demo`."""
    modules = [import_module(f"paper_figs.{name}") for name in MODULES]  # matplotlib: when asked
    found = [vars(m)[f"{stem}_figure"] for m in modules if f"{stem}_figure" in vars(m)]
    if not found:
        raise LookupError(f"no {stem}_figure in {', '.join(MODULES)} of paper_figs")
    return found[0]
