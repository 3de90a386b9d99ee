"""Law 17: which rows of which file trained, where several make a stream or others are joined."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint import lineage
from runtime.data.batch import Batch
from runtime.data.source import shuffled
from tests.runtime.clicks_of_a_user import write_clicks
from tests.runtime.test_lineage import A_DAY, EARLY, SPLIT, judged, schema_in, table, trained


@pytest.mark.law17
@pytest.mark.parametrize("random", [False, True])
def test_files_of_several_parts_are_placed_as_they_were_then(random, tmp_path):
    """Renamed so that they come in another order, one of them away, beside a new one."""
    write_clicks(tmp_path / "data")
    frame = table(tmp_path)
    then, now = tmp_path / "then", tmp_path / "now"
    then.mkdir()
    now.mkdir()
    names = {"a": ("z", frame[:250]), "b": ("gone", frame[250:400]), "c": ("k", frame[400:])}
    for old, (new, rows) in names.items():
        rows.to_parquet(file := then / f"{old}.parquet", index=False)
        if new != "gone":
            shutil.copy(file, now / f"{new}.parquet")
    frame.assign(price=frame.price + 5)[:100].to_parquet(now / "b.parquet", index=False)

    split = "{ test_fraction = 0.4, random_seed = 3 }" if random else "{ test_fraction = 0.4 }"
    run = trained(schema_in(then, "*.parquet", split), tmp_path / "run", "--steps", "12")
    trains = np.arange(800) < 480
    if random:
        trains = np.random.default_rng(3).random(800) >= 0.4
    read = trains & (np.cumsum(trains) <= 12 * 32)
    read[250:400] = False
    # In their new order: the fresh ones, then c, then a; all but the first 300 test.
    order = np.concatenate([np.full(100, -1), np.arange(400, 800), np.arange(250)])
    tests = np.arange(750) >= 300
    expected = int((read[order] & (order >= 0) & tests).sum())
    found = judged(run, schema_in(now, "*.parquet", "{ test_fraction = 0.6 }"))
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (expected, 450)
    assert 0 < expected < 450


@given(
    size=st.integers(1, 60),
    window=st.integers(1, 70),
    samples=st.integers(0, 130),
    bad=st.sets(st.integers(0, 59), max_size=3),
    seed=st.integers(0, 3),
)
def test_what_a_shuffled_stream_has_read_is_drawn_again(size, window, samples, bad, seed):
    """Against the stream itself; bad rows are left out of it, and none that was read is missed."""
    skipped = {row for row in bad if row < size}
    good = np.array([row for row in range(size) if row not in skipped])
    nothing = np.empty((len(good), 0), np.float32)
    chunk = Batch(good.astype(np.uint64), None, nothing, nothing)
    stream = shuffled(iter([chunk] if len(good) else []), seed, 0, window_rows=window)
    every = [int(row) for batch in stream for row in batch.ids]
    origin = lineage.Origin(
        run="", samples=samples, skipped=len(skipped), train_rows=size, shuffle=True, seed=seed,
        files=[{"sha256": "", "part": None, "rows": size, "trains": size}],
        split={"test_fraction": 0.5},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lineage, "SHUFFLE_WINDOW", window)
        found = set(np.flatnonzero(origin.read(np.arange(1, size + 1))).tolist())
    assert found >= set(every[:samples])
    if not skipped:
        assert found == set(every[:samples])


def test_a_column_that_splits_may_have_another_name_where_no_line_names_it(tmp_path):
    write_clicks(tmp_path / "data")
    table(tmp_path).to_csv(tmp_path / "then.csv", index=False, header=False)
    shutil.copy(tmp_path / "then.csv", tmp_path / "now.csv")
    names = '["user", "item", "tags", "price", "place", "day", "label"]'
    header = {"labels = ": f"header = {names}\nlabels = "}
    run = trained(schema_in(tmp_path, "then.csv", **header), tmp_path / "run", "--steps", "16")
    renamed = {"labels = ": header["labels = "].replace("day", "when").replace("place", "day")}
    early = EARLY.replace("day", "when")
    found = judged(run, schema_in(tmp_path, "now.csv", early, **renamed))
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (112, 400)


@pytest.mark.parametrize("joins", ["as then", "edited"])
def test_rows_that_a_joined_table_placed_are_known(joins, tmp_path):
    """Where the column that split is not there any more, or says otherwise, by what rows hold: here
    days that came early are late."""
    write_clicks(tmp_path / "data")
    frame = table(tmp_path).rename(columns={"place": "number"}).assign(number=range(800))
    frame[["number", "day"]].rename(columns={"number": "id"}).to_csv(tmp_path / "days.csv")
    frame.drop(columns="day").to_csv(tmp_path / "clicks.csv", index=False)
    join = '\n[[joins]]\nfile = "days.csv"\nleft = "number"\nright = "id"\n'
    schema = schema_in(tmp_path, "clicks.csv")
    schema.write_text(schema.read_text() + join)
    run = trained(schema, tmp_path / "run", "--steps", "16")
    if joins == "edited":
        late = table(tmp_path).day.map(lambda day: 9 - day)
        pd.DataFrame({"id": range(800), "day": late}).to_csv(tmp_path / "days.csv")
    early = {"as then": EARLY, "edited": SPLIT.replace("8", "5")}
    schema = schema_in(tmp_path, "clicks.csv", early[joins])
    schema.write_text(schema.read_text() + join)
    found = judged(run, schema)
    trained_on = 400 if joins == "edited" else 112
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (trained_on, 400)


def test_a_validation_part_did_not_train_and_may_judge(tmp_path):
    """The last tenth of 640 rows validates, so 576 train, and 64 of day 7 do not."""
    schema = write_clicks(tmp_path / "data")
    run = trained(schema, tmp_path / "run", "--data.validation-fraction", "0.1")
    for file in ("data/clicks.csv", "other.parquet"):
        table(tmp_path).to_parquet(tmp_path / "other.parquet")
        day = schema_in(tmp_path, file, '{ column = "day", test_equals = "7" }')
        assert judged(run, day)["rows_trained_on"] == 16


def test_bad_rows_that_were_left_out_move_the_end_of_what_was_read(tmp_path):
    """Ten bad rows among the first hundred: the first hundred good ones end at row 110."""
    schema = write_clicks(tmp_path / "data")
    file = schema.with_name("clicks.csv")
    rows = list(csv.reader(file.open()))
    for row in rows[5:55:5]:
        row[3] = "dear"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(rows)
    run = trained(schema, tmp_path / "run", "--data.rows", "100", "--data.skip-bad-rows")
    judges = schema_in(tmp_path, "data/clicks.csv", '{ column = "day", test_equals = "1" }')
    found = judged(run, judges, "--data.skip-bad-rows")
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (110 - A_DAY, A_DAY)


@pytest.mark.parametrize("rows", [640, 30])
def test_a_test_file_with_rows_of_the_training_file_is_told_by_the_run_itself(
    rows, tmp_path, capsys
):
    """All of it, as a copy of the file under another name, or some rows among others; two tasks."""
    write_clicks(tmp_path / "data")
    frame = table(tmp_path).assign(other=lambda f: f.index % 2)
    frame[:640].to_csv(tmp_path / "train.csv", index=False)
    frame[640 - rows : 640 if rows == 640 else None].to_csv(tmp_path / "test.csv", index=False)
    split = '{ test_file = "test.csv" }'
    schema = schema_in(tmp_path, "train.csv", split, **{'["label"]': '["label", "other"]'})
    run = trained(schema, tmp_path / "run")
    told = json.loads((run / "summary.json").read_text())["warnings"]
    count = f"{rows} of the {640 if rows == 640 else rows + 160} samples of the test part"
    assert [text for text in told if text.startswith(count)]
    assert judged(run, schema)["rows_trained_on"] == rows
    run = trained(write_clicks(tmp_path / "clean"), tmp_path / "clean" / "run")
    assert "trained" not in str(json.loads((run / "summary.json").read_text())["warnings"])
