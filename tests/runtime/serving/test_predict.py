"""`predict`: probabilities of a table's rows, as evaluation has them; labels are not needed."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from runtime.__main__ import main
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.inference import open_model
from runtime.run.folder import read_metrics

EXAMPLES = Path(__file__).parents[3] / "examples"
CLICKS = pd.read_csv(EXAMPLES / "clicks.csv", dtype=str, keep_default_na=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict") / "run"
    words = ["--data.name", str(EXAMPLES / "clicks.toml"), "--model.hidden", "16"]
    assert main(["train", *words, "--checkpoint-every", "end", "--out", str(folder)]) == 0
    assert main(["export", str(folder), "--out", str(folder.parent / "export")]) == 0
    return folder


def predicted(run, table, out, *words):
    file = out / f"table{len(list(out.iterdir()))}.csv"
    table.to_csv(file, index=False)
    scores = file.with_suffix(".parquet")
    assert main(["predict", str(run), "--data", str(file), "--out", str(scores), *words]) == 0
    return pd.read_parquet(scores)


def test_scores_of_the_test_part_have_the_auc_of_the_run(run, tmp_path):
    named = CLICKS.rename(columns={"clicked": "truth"})
    found = predicted(run, named, tmp_path, "--also", "day", "truth")
    test = found.day >= "2026-03-09"
    auc = roc_auc_score(found.truth[test].astype(int), found.clicked[test])
    last = read_metrics(run)[-1]
    assert auc == pytest.approx(next(iter(last.tasks.values()))["auc"], abs=1e-12)


def test_a_label_rides_along_beside_its_score(run, tmp_path):
    head = CLICKS.iloc[:300]
    table = predicted(run, head, tmp_path, "--also", "clicked", "user")
    assert list(table.columns) == ["clicked", "user", "clicked_score"]
    assert table.clicked.astype(int).tolist() == head.clicked.astype(int).tolist()
    alone = predicted(run, head.drop(columns="clicked"), tmp_path)
    assert np.array_equal(table.clicked_score, alone.clicked)


def test_a_frame_a_file_a_batch_and_an_export_have_the_same_scores(run, tmp_path):
    head = CLICKS.iloc[:500].drop(columns=["clicked", "day"])
    of_file = predicted(run, head, tmp_path).clicked.to_numpy()
    assert np.array_equal(open_model(run).predict_frame(head)[:, 0], of_file)
    batch = next(open_source(str(EXAMPLES / "clicks.toml")).chunks("train")).rows(0, 500)
    assert np.array_equal(open_model(run).predict(batch)[:, 0], of_file)
    of_export = predicted(run.parent / "export", head, tmp_path).clicked.to_numpy()
    np.testing.assert_allclose(of_export, of_file, rtol=1e-5)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_large_numbers_are_written_as_they_stand_also_where_one_is_absent(
    run, tmp_path, suffix, monkeypatch
):
    monkeypatch.setattr("runtime.data.table.ROWS_PER_BATCH", 2)
    request, user = [2**60 + 1, None, 2**60 + 3, 7, None], [2**64 - 1, 2**63, None, 0, 1]
    columns = {name: pa.array(CLICKS[name][:5]) for name in CLICKS}
    columns |= {"request": pa.array(request, pa.int64()), "account": pa.array(user, pa.uint64())}
    table, scores = tmp_path / "table.parquet", tmp_path / f"scores{suffix}"
    pq.write_table(pa.table(columns), table)
    words = ["--data", str(table), "--out", str(scores), "--also", "request", "account"]
    assert main(["predict", str(run), *words]) == 0
    if suffix == ".parquet":
        found = pq.read_table(scores).to_pydict()
        assert (found["request"], found["account"]) == (request, user)
    else:
        found = pd.read_csv(scores, dtype=str, keep_default_na=False)
        told = [["" if n is None else str(n) for n in column] for column in (request, user)]
        assert [found.request.tolist(), found.account.tolist()] == told


def test_vectors_of_values_are_those_of_their_ids(run):
    model = open_model(run)
    table, ids = model.columns.ids("user", ["u1", "u17"])
    assert np.array_equal(model.vectors("user", ["u1", "u17"]), model.lookup(table, ids))
    item, in_history = (model.vectors(name, ["i3"])[0] for name in ("item", "history"))
    assert not np.array_equal(item, in_history), "each column has ids of its own"
    padded = model.vectors("user", [" u1 "])
    assert np.array_equal(padded, model.vectors("user", ["u1"])), "blanks are no part of an id"


def test_ids_that_were_never_trained_are_told(run, tmp_path, capsys):
    predicted(run, CLICKS.iloc[:50].assign(user="nobody"), tmp_path)
    told = capsys.readouterr().out
    assert "user 0 %" in told and "warning: fewer than half of the ids of user have a row" in told


def test_the_share_of_known_ids_is_that_of_all_rows(run, tmp_path, capsys, monkeypatch):
    """Of the 50 users one in five is known, whatever pieces the table is read in."""
    monkeypatch.setattr("runtime.data.table.ROWS_PER_BATCH", 40)
    table = CLICKS.iloc[:50].assign(user=["nobody"] * 40 + ["u1"] * 10)
    table.to_parquet(tmp_path / "t.parquet")
    words = ["--data", str(tmp_path / "t.parquet"), "--out", str(tmp_path / "s.csv")]
    assert main(["predict", str(run), *words]) == 0
    assert "user 20 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [(lambda t: t.drop(columns="item"), "no column 'item'"),
     (lambda t: t.assign(price="cheap"), "row 1, column price: 'cheap'")],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_named(run, tmp_path, capsys, change, sentence):
    """An option that `predict` has not is told as that of others."""
    file = tmp_path / "other.csv"
    change(CLICKS.iloc[:9]).to_csv(file, index=False)
    words = ["predict", str(run), "--data", str(file), "--out", str(tmp_path / "s.csv")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "skip-bad-rows" not in told or "train and evaluate can skip bad rows" in told
    assert not (tmp_path / "s.csv").exists()
    with pytest.raises(DataError, match=sentence.removeprefix("row 1, ")):
        open_model(run).predict_frame(change(CLICKS.iloc[:9]))


def test_a_schema_in_place_of_a_table_is_told(tmp_path, capsys):
    words = ["predict", str(tmp_path), "--data", str(EXAMPLES / "clicks.toml")]
    assert main([*words, "--out", str(tmp_path / "s.csv")]) == 2
    told = capsys.readouterr().err
    assert "--data must be a table" in told and "clicks.toml" in told


LINES = "a,1,u1,3,2\na,0,u2,4,1\n" * 20 + "b,1,u1,4,1\nb,0,u2,3,2\n" * 20
"""Columns day, y, user, item, w."""


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """A run over lines without names, as publishers of contests give them."""
    folder = tmp_path_factory.mktemp("headless")
    (folder / "train.txt").write_text(LINES)
    (folder / "s.toml").write_text(
        'name = "s"\nfile = "train.txt"\nlabels = ["y"]\nweight = "w"\n'
        'header = ["day", "y", "user", "item", "w"]\n'
        'split = { column = "day", test_equals = "b" }\ncolumns = ["user", "item"]\n'
    )
    words = ["--data.name", str(folder / "s.toml"), "--model.hidden", "4"]
    assert main(["train", *words, "--checkpoint-every", "end", "--out", str(folder / "run")]) == 0
    return folder


@pytest.mark.parametrize(
    ("places", "lacking"),
    [((0, 2, 3, 4), "y"), ((2, 3), "day, y, w"), ((0, 1, 2, 3, 4), "")],
    ids=["no label", "what is scored alone", "as in training"],
)
def test_lines_without_names_may_lack_what_nobody_scores_by(headless, places, lacking, capsys):
    """The values stand at other places than in the lines that trained: of their own columns."""
    file, scores = headless / f"{len(places)}.txt", headless / f"{len(places)}.parquet"
    rows = [[line.split(",")[p] for p in places] for line in LINES.split()]
    file.write_text("".join(",".join(row) + "\n" for row in rows))
    words = ["predict", str(headless / "run"), "--data", str(file), "--out", str(scores)]
    assert main(words) == 0
    told = capsys.readouterr()
    frame = pd.DataFrame([line.split(",")[2:4] for line in LINES.split()], columns=["user", "item"])
    expected = open_model(headless / "run").predict_frame(frame)
    assert np.array_equal(pd.read_parquet(scores).to_numpy(), expected)
    assert ("samples trained this model" in told.err) == (not lacking), "by labels that are there"
    assert (f"has no column {lacking}; it holds" in told.out) == bool(lacking)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--out", "s.txt"], "--out must end in .parquet or .csv"),
     (["--out", "s.csv", "--also", "clicked", "clicked_score"], "'clicked_score', which is a"),
     (["--out", "s.csv", "--also", "user", "user"], "'user', which is a column already"),
     (["--out", "there.csv"], "is there already"),
     (["--out", "s.csv", "--also", "nowhere"], "no column 'nowhere'")],
)  # fmt: skip
def test_a_mistake_ends_in_a_sentence(run, tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    Path("there.csv").touch()
    assert main(["predict", str(run), "--data", str(EXAMPLES / "clicks.csv"), *words]) == 2
    assert sentence in capsys.readouterr().err


SLOTS = """name = "slots"
file = "clicks-us.parquet"
labels = ["y"]
split = { test_fraction = 0.3 }
columns = ["slot", "u", "kind"]
joins = [{ file = "kinds.csv", left = "slot", right = "slot" }]
"""


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    """A model of hours, of whole numbers above 1e16, and of a column that is joined by the hour."""
    folder, draw = tmp_path_factory.mktemp("slots"), np.random.default_rng(3)
    hours = pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 48, 300), "h")
    users, clicks = 10**16 + 2 * draw.integers(0, 30, 300), draw.integers(0, 2, 300)
    table = pd.DataFrame({"slot": hours, "u": users, "y": clicks})
    table["slot"] = table.slot.astype("datetime64[us]")
    table.to_parquet(folder / "clicks-us.parquet")
    kinds = table[["slot"]].drop_duplicates().assign(kind=lambda t: t.slot.dt.hour % 5)
    kinds.to_csv(folder / "kinds.csv", index=False)
    (folder / "slots.toml").write_text(SLOTS)
    words = ["--data.name", str(folder / "slots.toml"), "--batch", "32", "--model.hidden", "8"]
    words += ["--rows.optimizer.lr", "1.0", "--checkpoint-every", "end"]
    assert main(["train", *words, "--out", str(folder / "run")]) == 0
    assert main(["export", str(folder / "run"), "--out", str(folder / "export")]) == 0
    table["kind"] = table.slot.dt.hour % 5
    return folder, table


OTHER_TYPES = {
    **{f"instants in {u}": {"slot": f"datetime64[{u}]"} for u in ("s", "ms", "ns")},
    "instants as texts": {"slot": str},
    "ids as float64": {"u": float},
    "ids as texts": {"u": str},
    "a small whole number as float32": {"kind": "float32"},
}


@pytest.mark.parametrize("types", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_a_value_in_another_type_is_scored_as_the_same_value(slots, types, tmp_path, capsys):
    folder, table = slots
    model, other = open_model(folder / "export"), table.astype(types)
    expected = model.predict_frame(table)
    assert len(np.unique(expected)) > 100
    assert np.array_equal(model.predict_frame(other), expected)
    for suffix in (".parquet", ".csv"):
        file, scores = tmp_path / f"other{suffix}", tmp_path / f"scores{suffix}.parquet"
        other.to_parquet(file) if suffix == ".parquet" else other.to_csv(file, index=False)
        words = ["--data", str(file), "--out", str(scores)]
        assert main(["predict", str(folder / "export"), *words]) == 0
        assert np.array_equal(pd.read_parquet(scores).y.to_numpy(), expected[:, 0])
    assert "warning" not in capsys.readouterr().out
    for column in types:
        found = model.vectors(column, list(other[column]))
        assert np.array_equal(found, model.vectors(column, list(table[column])))
