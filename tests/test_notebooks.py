"""A notebook is stored as somebody ran it from top to bottom, and runs so again."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from tests.tree import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MEASURES = ("tour",)
"""Whose numbers are those of threads, in the order of this very run."""


def code_of(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def pictures_of(cells):
    """How many pictures stand under each cell."""
    return [sum("image/png" in o.get("data", ()) for o in cell["outputs"]) for cell in cells]


@pytest.mark.long
@pytest.mark.minutes
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_jupyter_shows_each_figure_once(notebook, tmp_path):
    """As somebody sees it who presses "run": a kernel for each takes half a minute."""
    words = ["nbconvert", "--to", "notebook", "--execute", "--output-dir", str(tmp_path)]
    environment = {k: value for k, value in os.environ.items() if k != "PERSIA_DATA_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", *words, str(notebook)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(pictures_of(code_of(tmp_path / notebook.name))) == 1


def run_cell(source, name, names):
    """Run a cell as Jupyter does: the value of its last expression is shown, so it is returned."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran_with_a_figure(notebook):
    cells = code_of(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", ()) for output in shown)
    assert max(pictures_of(cells)) == 1, "a figure is shown twice"
    assert not any(output["output_type"] == "error" for output in shown)


@pytest.mark.first_case
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, monkeypatch, capsys):
    """In this process: a kernel for each takes longer than what is in it. Without real data, which
    would be read for each of its runs."""
    from matplotlib import pyplot as plt

    monkeypatch.delenv("PERSIA_DATA_DIR", raising=False)
    monkeypatch.chdir(notebook.parent)
    names: dict[str, object] = {"__name__": notebook.stem}
    for number, cell in enumerate(code_of(notebook), 1):
        result = run_cell("".join(cell["source"]), f"{notebook.name}, cell {number}", names)
        if isinstance(result, Figure):
            assert result.number not in plt.get_fignums(), "Jupyter shows it twice"
            result.canvas.draw()
        printed = capsys.readouterr().out
        told = [o for o in cell["outputs"] if o.get("name") == "stdout"]
        if notebook.stem not in MEASURES:
            assert printed == "".join("".join(o["text"]) for o in told), "run it again"
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()
    plt.close("all")
