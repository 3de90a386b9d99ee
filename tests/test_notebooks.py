"""A notebook and its reviewed source say the same."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest

SOURCES = sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_and_source_are_paired(source):
    cells = [
        [(cell.cell_type, cell.source.strip()) for cell in jupytext.read(file).cells]
        for file in (source, source.with_suffix(".ipynb"))
    ]
    assert cells[0] == cells[1], f"run: jupytext --to ipynb --update {source}"
