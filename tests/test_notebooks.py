"""A notebook is its script in cells, and the script runs from top to bottom."""

from __future__ import annotations

import json
import runpy

import pytest

from tests.tree import ROOT

SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_and_script_are_paired(script):
    import jupytext  # late: it loads a grammar of URLs for seconds

    stored = json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    cells = [(cell.cell_type, cell.source.strip()) for cell in jupytext.read(script).cells]
    assert cells == [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in stored], (
        f"run: jupytext --to ipynb --update {script}"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(script, monkeypatch, capsys):
    """In this process: a kernel for each takes longer than what is in it. Without real data, which
    would be read for each of its runs."""
    from matplotlib import pyplot as plt

    monkeypatch.delenv("PERSIA_DATA_DIR", raising=False)
    monkeypatch.chdir(script.parent)
    runpy.run_path(str(script))
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    plt.close("all")
