"""A figure, its study and its table share a stem, and a committed picture is its table drawn."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from experiments.catalogue import BENCHES, PIECES, STUDIES
from experiments.commands import module_of

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs" / "results"
PICTURES = sorted(path.stem for path in (ROOT / "paper_figs" / "out").glob("*.png"))
FIGURES = sorted(
    path.stem
    for path in (ROOT / "paper_figs").glob("*.py")
    if path.stem not in ("__init__", "style")
)


def test_there_are_pictures():
    assert {"demo", "scale_workers"} <= set(PICTURES)


@pytest.mark.parametrize("stem", PICTURES)
def test_a_committed_picture_has_its_table_and_a_figure_and_a_study(stem):
    assert (TABLES / f"{stem}.csv").is_file()
    assert stem in FIGURES
    assert stem.replace("_", "-") in STUDIES


@pytest.mark.parametrize("stem", FIGURES)
def test_a_figure_has_one_function_named_like_it(stem):
    assert callable(getattr(importlib.import_module(f"paper_figs.{stem}"), f"{stem}_figure"))
    assert stem.replace("_", "-") in STUDIES | BENCHES


@pytest.mark.parametrize("name", [*STUDIES, *BENCHES])
def test_a_study_has_a_module_of_its_name(name):
    assert (ROOT / Path(*module_of(name).split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.csv")), ids=lambda path: path.stem)
def test_a_committed_table_belongs_to_a_study(path):
    written = {name for piece in PIECES for name in piece.csv}
    stems = [name.replace("-", "_") for name in STUDIES]
    assert (
        path.name in written | {"index.csv"}
        or path.stem in stems
        or path.stem.startswith(tuple(f"{stem}_" for stem in stems))
    )
