"""The newcomer's script runs as it stands, and says what a newcomer waits for."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    out = tmp_path_factory.mktemp("first") / "day"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = subprocess.run(
        ["sh", EXAMPLES / "first_day.sh", out], capture_output=True, text=True,
        env=os.environ | {"PATH": path}, timeout=550,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return out, found.stdout


@pytest.mark.long
@pytest.mark.multiproc
def test_the_script_goes_from_a_table_to_predictions(day):
    out, told = day
    scores = pd.read_parquet(out / "scores.parquet")
    clicks = pd.read_csv(EXAMPLES / "clicks.csv")
    assert list(scores.columns) == ["user", "item", "clicked"] and len(scores) == len(clicks)
    assert (scores.user == clicks.user).all() and scores.clicked.between(0, 1).all()
    for file in ("sweep/staleness.csv", "exported/manifest.json", "replayed/summary.json"):
        assert (out / file).is_file()
    for line in (
        "nothing else to look at", "interrupted by SIGTERM after", "goes on from ",
        "async tau 4          39           7 ",
        "note: a sample stands for 128 of the simulated cluster's", "20,000 rows: ",
    ):  # fmt: skip
        assert line in told, told
    assert "Traceback" not in told and "error:" not in told


@pytest.mark.long
@pytest.mark.multiproc
def test_the_stored_transcript_is_of_this_script(day):
    def typed(text):
        return [line for line in text.splitlines() if line.startswith("$ ")]

    out, told = day
    assert typed((EXAMPLES / "first_day.txt").read_text()) == typed(told.replace(str(out), "out"))
