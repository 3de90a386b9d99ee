"""`evaluate --rank-against`: every item of a table ranked for every click, against plain Python."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from runtime.__main__ import main
from runtime.inference import open_model

ITEMS = pd.DataFrame(
    {
        "title": [f"the {n}th" for n in range(23)],
        "item": [f"i{n}" for n in range(23)],
        "tags": ["|".join(f"t{k % 5}" for k in range(n % 4)) for n in range(23)],
        "price": np.arange(23) / 3,
    }
)
SCHEMA = """name = "made"
file = "log.csv"
labels = ["clicked", "bought"]
optional = ["bought"]
split = { column = "day", test_from = 8 }
columns = [
    "user", "item",
    { name = "tags", kind = "multi", separator = "|" },
    { name = "hour", kind = "numeric" }, { name = "price", kind = "numeric", log = false },
]
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    """Clicks of 12 users, some of whom are not known, on 25 items, two of which the table lacks."""
    folder = tmp_path_factory.mktemp("ranked")
    draw = np.random.default_rng(1)
    frame = pd.DataFrame({"day": np.repeat(range(10), 60)})
    frame["user"] = draw.choice([*(f"u{n}" for n in range(11)), ""], len(frame))
    frame["item"] = [f"i{n}" for n in draw.integers(0, 25, len(frame))]
    frame = frame.merge(ITEMS.drop(columns="title"), on="item", how="left")
    frame["price"] = frame.price.fillna(1.0)
    frame["hour"] = draw.integers(0, 24, len(frame))
    frame["clicked"] = draw.integers(0, 2, len(frame))
    frame["bought"] = draw.choice(["0", "1", ""], len(frame))
    frame.to_csv(folder / "log.csv", index=False)
    ITEMS.to_csv(folder / "items.csv", index=False)
    ITEMS.to_parquet(folder / "items.parquet")
    return folder, pd.read_csv(folder / "log.csv", keep_default_na=False)


def run_of(folder: Path, group: str, *options: str) -> Path:
    (folder / f"{group}.toml").write_text(f'group = "{group}"\n{SCHEMA}' if group else SCHEMA)
    out = folder / f"run-{group}-{len(options)}"
    words = ["--data", str(folder / f"{group}.toml"), "--batch", "32", "--out", str(out), *options]
    assert main(["train", *words, "--checkpoint-every", "end", "--model.hidden", "8"]) == 0
    return out


def places_of(predicted: np.ndarray, own: int) -> tuple[float, float]:
    """Recall@10 and NDCG@10 of one item, on average over every order of equal predictions."""
    better = int((predicted > predicted[own]).sum())
    equal = int((predicted == predicted[own]).sum())
    places = range(better, better + equal)
    return (
        sum(place < 10 for place in places) / equal,
        sum(1 / math.log2(place + 2) for place in places if place < 10) / equal,
    )


def by_hand(run: Path, frame: pd.DataFrame, group: str) -> tuple[float, float, int]:
    model = open_model(run)
    clicks = frame[frame.clicked == 1]
    judged = clicks[(clicks.day >= 8) & clicks["item"].isin(ITEMS["item"])]
    found = []
    for number, click in judged.iterrows():
        others = clicks.drop(index=number)
        known = group and click[group] != ""
        seen = {*others["item"][others[group] == click[group]]} if known else set()
        rows = ITEMS[~ITEMS["item"].isin(seen - {click["item"]})].reset_index(drop=True)
        rows = rows.assign(user=click.user, hour=click.hour)
        predicted = model.predict_frame(rows)[:, 0]
        found.append(places_of(predicted, int(np.flatnonzero(rows["item"] == click["item"])[0])))
    return *np.mean(found, axis=0), len(found)


@pytest.mark.parametrize(("group", "file"), [("user", "items.csv"), ("", "items.parquet")])
def test_full_ranking_is_that_of_a_loop_over_frames(log, group, file, tmp_path, capsys):
    folder, frame = log
    run = run_of(folder, group)
    recall, ndcg, lists = by_hand(run, frame, group)
    out = tmp_path / "scores.json"
    assert (
        main(["evaluate", str(run), "--rank-against", str(folder / file), "--out", str(out)]) == 0
    )
    ranked = json.loads(out.read_text())["ranking"]
    assert ranked["recall@10"] == pytest.approx(recall, rel=1e-9)
    assert ranked["ndcg@10"] == pytest.approx(ndcg, rel=1e-9)
    assert (ranked["items"], ranked["lists"]) == (23, lists)
    absent = frame[(frame.day >= 8) & (frame.clicked == 1) & ~frame["item"].isin(ITEMS["item"])]
    assert ranked["lists_without_item"] == len(absent) > 0
    told = capsys.readouterr().out
    assert f"recall@10 {recall:.4f}, ndcg@10 {ndcg:.4f} of 23 items for each of {lists}" in told


def test_equal_predictions_share_their_places(log, tmp_path):
    """A model that has learned nothing: each place is as likely as any other (closed form)."""
    folder, _ = log
    run = run_of(
        folder,
        "",
        "--rows.initial-scale",
        "0",
        "--model.lr",
        "1e-30",
        "--rows.optimizer.lr",
        "1e-30",
    )
    (tmp_path / "items.csv").write_text("item\n" + "\n".join(ITEMS["item"]) + "\n")
    out = tmp_path / "scores.json"
    words = ["--rank-against", str(tmp_path / "items.csv"), "--out", str(out)]
    assert main(["evaluate", str(run), *words]) == 0
    ranked = json.loads(out.read_text())["ranking"]
    assert ranked["recall@10"] == pytest.approx(10 / 23)
    best = sum(1 / math.log2(place + 2) for place in range(10))
    assert ranked["ndcg@10"] == pytest.approx(best / 23)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("item,price\ni1,1\ni2,2\ni1,3\n", "row 3, column item: it stood there before"),
        ("item,user\ni1,u1\n", "has the column user"),
        ("price,item\n1,i1\n", "the first that the schema names must be the item's"),
        ("name\nx\n", "the first that the schema names must be the item's"),
        ("item,price\nelse,1\n", "has the item of no test sample"),
        ("item,price\ni1,cheap\n", "row 1, column price: 'cheap'"),
    ],
)
def test_a_table_that_is_none_of_items_is_refused(log, tmp_path, text, said, refused):
    folder, _ = log
    run = folder / "run-user-0"
    if not run.exists():
        run_of(folder, "user")
    (tmp_path / "items.csv").write_text(text)
    assert said in refused("evaluate", str(run), "--rank-against", str(tmp_path / "items.csv"))
