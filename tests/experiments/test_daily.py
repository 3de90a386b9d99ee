"""`daily`: every day is judged before it trains, and begins with the model of the day before."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.studies import daily
from persia_sim.base.vocabulary import Mode
from runtime.data.errors import DataError

SCHEMA = """name = "clicks"
file = "day-*.csv"
labels = ["click"]
split = { test_fraction = 0.5 }
columns = ["user", "item"]
"""


def write_days(folder: Path, days: int = 3) -> pd.DataFrame:
    draw = np.random.default_rng(2)
    frames = []
    for day in range(1, days + 1):
        user, item = draw.integers(0, 40, 240), draw.integers(0, 40, 240)
        click = (draw.random(240) < 0.15 + user / 60).astype(int)
        frame = pd.DataFrame({"user": user, "item": item, "click": click, "day": day})
        frame.to_csv(folder / f"day-{day}.csv", index=False)
        frames.append(frame)
    (folder / "days.toml").write_text(SCHEMA)
    return pd.concat(frames)


def options(folder: Path, schema: str = "days.toml", **changes) -> daily.Options:
    typed = f"data.name={folder / schema}", "model.hidden=8", "batch=32", "sync.ranks=2"
    given = {
        "set": typed,
        "modes": (Mode.SYNC, Mode.HYBRID),
        "seeds": 1,
        "jobs": 1,
        "out": folder / "out",
    }
    return daily.Options(**given | changes)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("daily")
    write_days(folder)
    daily.run(options(folder))
    return folder / "out"


@pytest.mark.long
@pytest.mark.multiproc
def test_a_line_for_each_day_but_the_first_and_each_mode(ran):
    with (ran / "daily.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(one["judged_by"], one["mode"]) for one in lines] == [
        ("day-2", "sync"), ("day-2", "hybrid"), ("day-3", "sync"), ("day-3", "hybrid"),
    ]  # fmt: skip
    assert all(one["judged_rows"] == "240" and 0 < float(one["auc"]) < 1 for one in lines)
    assert [one["versus"] for one in lines] == ["", "sync"] * 2
    assert (ran / "daily.png").is_file()


@pytest.mark.multiproc
def test_each_day_begins_with_the_model_of_the_day_before_in_its_mode(ran):
    for mode in ("sync", "hybrid-tau4"):
        (first,) = ran.glob(f"day-1-{mode}-seed0-*")
        (second,) = ran.glob(f"day-2-{mode}-seed0-*")
        config = json.loads((second / "config.json").read_text())
        assert Path(config["warm_start"]).parent.parent == first
        assert json.loads((first / "config.json").read_text())["warm_start"] is None
        assert config["rows"]["capacity"]["expire_after_steps"] == 7, "240 rows, batches of 32"


def test_one_file_is_cut_into_days_by_the_column_of_its_split(tmp_path):
    table = write_days(tmp_path, days=11)
    table.to_csv(tmp_path / "all.csv", index=False)
    split = 'split = { column = "day", test_from = 9 }'
    text = SCHEMA.replace("day-*.csv", "all.csv").replace("split = { test_fraction = 0.5 }", split)
    (tmp_path / "days.toml").write_text(text)
    _, files = daily.days_of(options(tmp_path))
    assert [file.stem for file in files] == [str(day) for day in range(1, 12)], "10 behind 9"
    read = pd.read_parquet(files[9])
    expected = table[table.day == 10]
    assert read.user.tolist() == expected.user.astype(str).tolist()


@pytest.mark.parametrize("kind", ["dates", "seconds"])
def test_days_come_in_the_order_of_their_times(kind, tmp_path):
    """Day 10 behind day 9, whatever their names sort like, and no day before another."""
    start = {"dates": pd.Timestamp("2024-05-01"), "seconds": 1_714_521_600}[kind]
    day = {"dates": pd.Timedelta(days=1), "seconds": 86_400}[kind]
    write_days(tmp_path, days=11)
    for number in range(1, 12):
        file = tmp_path / f"day-{number}.csv"
        times = [start + (number - 1) * day, start + number * day] * 120  # where the next begins
        pd.read_csv(file).assign(at=times).to_csv(file, index=False)
    first = "2024-05-03" if kind == "dates" else 1_714_600_000
    split = f'split = {{ column = "at", test_from = {first} }}'
    (tmp_path / "days.toml").write_text(SCHEMA.replace("split = { test_fraction = 0.5 }", split))
    _, files = daily.days_of(options(tmp_path))
    assert [file.stem for file in files] == [f"day-{number}" for number in range(1, 12)]
    swapped = [files[0], files[2], files[1]]
    with pytest.raises(DataError, match=r"day-2\.csv begins at .*, before .*day-3\.csv ends at"):
        daily.days_of(options(tmp_path, days=tuple(swapped)))
    (tmp_path / "day-4.csv").rename(tmp_path / "day-04b.csv")
    (tmp_path / "day-3.csv").rename(tmp_path / "day-12.csv")
    with pytest.raises(DataError, match=r"day-12\.csv begins at .*, before .*day-11\.csv ends at"):
        daily.run(options(tmp_path))


def test_a_day_alone_is_refused(tmp_path):
    write_days(tmp_path)
    with pytest.raises(DataError, match="has 1 day; give 2 or more"):
        daily.run(options(tmp_path, days=(tmp_path / "day-1.csv",)))


def test_two_days_whose_files_would_be_one_are_refused(tmp_path):
    whole = write_days(tmp_path, 2)
    whole["day"] = whole["day"].map({1: "1/2", 2: "1-2"})
    whole.to_csv(tmp_path / "all.csv", index=False)
    text = SCHEMA.replace("day-*.csv", "all.csv")
    text = text.replace("{ test_fraction = 0.5 }", '{ column = "day", test_equals = "1-2" }')
    (tmp_path / "one.toml").write_text(text)
    with pytest.raises(DataError, match=r"two values of day make one file, 1-2\.parquet"):
        daily.run(options(tmp_path, "one.toml"))


def test_a_file_says_what_is_not_typed_and_two_values_of_an_option_are_refused(tmp_path):
    write_days(tmp_path)
    (tmp_path / "run.toml").write_text("batch = 64\nseed = 9\n[model]\nlr = 4e-3\n")
    base = options(tmp_path, config=tmp_path / "run.toml").base
    assert (base.batch, base.model.lr, base.sync.ranks, base.seed) == (32, 4e-3, 2, 0)
    with pytest.raises(ValueError, match=r"set gives batch 2 values.*give one"):
        options(tmp_path, set=("batch=16,32",)).base  # noqa: B018
