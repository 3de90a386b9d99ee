"""A figure, its study and its table share a stem, and a committed picture is its table drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.__main__ import module_of
from experiments.catalogue import BENCHES, PIECES, STUDIES
from paper_figs import figure_of

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs" / "results"
PICTURES = sorted(path.stem for path in (ROOT / "paper_figs" / "out").glob("*.png"))
FIGURES = sorted(
    stem
    for path in (ROOT / "paper_figs").glob("*.py")
    for stem in re.findall(r"^def (\w+)_figure\(", path.read_text(), re.MULTILINE)
)


def test_there_are_pictures():
    assert {"demo", "scale_workers"} <= set(PICTURES)


@pytest.mark.parametrize("stem", PICTURES)
def test_a_committed_picture_has_its_table_and_a_figure_and_a_study(stem):
    assert (TABLES / f"{stem}.csv").is_file()
    assert stem in FIGURES
    assert stem.replace("_", "-") in STUDIES


@pytest.mark.parametrize("stem", FIGURES)
def test_a_figure_is_found_and_named_like_its_study(stem):
    assert figure_of(stem).__name__ == f"{stem}_figure"
    assert stem.replace("_", "-") in STUDIES | BENCHES


def test_a_table_without_a_figure_is_named():
    with pytest.raises(LookupError, match="no nothing_figure in auc, "):
        figure_of("nothing")


@pytest.mark.parametrize("name", [*STUDIES, *BENCHES])
def test_a_study_has_a_module_of_its_name(name):
    assert (ROOT / Path(*module_of(name).split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.csv")), ids=lambda path: path.stem)
def test_a_committed_table_belongs_to_a_study(path):
    written = {name for piece in PIECES for name in piece.csv}
    stems = [name.replace("-", "_") for name in (*STUDIES, *BENCHES)]
    assert (
        path.name in written | {"index.csv"}
        or path.stem in stems
        or path.stem.startswith(tuple(f"{stem}_" for stem in stems))
    )
