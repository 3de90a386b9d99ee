"""The example that scores an export without this project gives the scores of `predict`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from runtime.__main__ import main

EXAMPLE = Path(__file__).parents[1] / "examples" / "score_without_us.py"
SCHEMA = """name = "shop"
file = "shop.csv"
labels = ["click"]
split = { test_fraction = 0.2 }
columns = [
    "user",
    { name = "city", group = "places" },
    { name = "from", group = "places" },
    { name = "tags", kind = "multi", separator = "|", pooling = "mean" },
    { name = "seen", kind = "sequence", separator = " ", max_length = 3 },
    { name = "height", kind = "bucket" },
    { name = "price", kind = "numeric", fill = 2.5 },
    { name = "rank", kind = "numeric", log = false },
]
"""


def shop(rows: int) -> pd.DataFrame:
    draw = np.random.default_rng(3)
    pick = draw.choice
    return pd.DataFrame(
        {
            "user": pick(["7", "7.0", "007", " u1", "-3", "?", "ü"], rows),
            "city": pick(["Kiel", "", "Ulm"], rows),
            "from": pick(["Ulm", "Jena"], rows),
            "tags": pick(["a|b|a", "", "c", "b|?"], rows),
            "seen": pick(["1 2 3 4", "5", "", "2 x"], rows),
            "height": pick(["-3", "0", "17.5", "?"], rows),
            "price": pick(["3.5", "-1000", "", "0"], rows),
            "rank": draw.random(rows).round(3).astype(str),
            "click": draw.integers(0, 2, rows),
        }
    )


def test_its_scores_are_those_of_predict(tmp_path):
    shop(300).to_csv(tmp_path / "shop.csv", index=False)
    (tmp_path / "shop.toml").write_text(SCHEMA)
    run, exported = str(tmp_path / "run"), tmp_path / "exported"
    train = ["train", "--data.name", str(tmp_path / "shop.toml"), "--out", run, "--batch", "16"]
    assert main([*train, "--checkpoint-every", "end", "--model.hidden", "8"]) == 0
    assert main(["export", run, "--out", str(exported)]) == 0

    # Ids that were never trained, too.
    table = tmp_path / "new.csv"
    frame = shop(60).assign(user=lambda t: t.user.where(t.index % 3 > 0, "new" + t.user))
    frame.to_csv(table, index=False)
    out = [str(tmp_path / name) for name in ("ours.parquet", "theirs.csv")]
    assert main(["predict", str(exported), "--data", str(table), "--out", out[0]]) == 0

    spec = importlib.util.spec_from_file_location("score_without_us", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    theirs = example.score(exported, pd.read_csv(table, dtype=str, keep_default_na=False))
    ours = pd.read_parquet(out[0])
    assert len(set(ours.click)) > 30
    np.testing.assert_allclose(theirs.click, ours.click, rtol=0, atol=2e-6)


@pytest.mark.long
def test_it_imports_nothing_of_this_project(tmp_path):
    probe = (
        f"import runpy, sys; sys.argv = ['x', 'a', 'b', 'c']\n"
        f"try: runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
        "except FileNotFoundError: pass\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('runtime', 'persia_sim')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert found.stdout.strip() == "[]"
