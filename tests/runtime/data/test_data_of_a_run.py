"""From options to samples: which rows a run trains on, in which order, and what it says of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime.__main__ import main
from runtime.config import DataConfig, TrainConfig
from runtime.data.open import open_source
from runtime.rank.feed import stream_from, training_stream

SCHEMA = """
name = "numbered"
file = "d.csv"
split = { column = "day", test_from = 2013-02-09 }
[[columns]]
name = "user"
[[columns]]
name = "n"
kind = "numeric"
log = false
"""
N_TRAIN, N_TEST = 40, 12


def write_data(folder: Path, replaced: dict[int, str] | None = None) -> str:
    """Rows 1 to 52; the last 12 test. Column n holds the row's number."""
    lines = []
    for n in range(1, N_TRAIN + N_TEST + 1):
        day = "2013-02-08" if n <= N_TRAIN else "2013-03-01"
        lines.append((replaced or {}).get(n, f"u{n % 5},{n},{day},{n % 2}"))
    (folder / "d.csv").write_text("\n".join(["user,n,day,label", *lines]) + "\n")
    (folder / "d.toml").write_text(SCHEMA)
    return str(folder / "d.toml")


def trained_rows(name: str, seed: int = 5, **data: Any) -> list[list[int]]:
    """Row numbers of each batch of 16 that a run trains on."""
    config = TrainConfig(batch=16, seed=seed, data=DataConfig(name=name, **data))
    source = open_source(name, rows=config.data.rows)
    return [batch.dense[:, 0].astype(int).tolist() for batch in training_stream(config, source)]


def cut(rows: list[int]) -> list[list[int]]:
    return [rows[start : start + 16] for start in range(0, len(rows), 16)]


ALL = list(range(1, N_TRAIN + 1))


def test_shuffling_permutes_each_pass_with_the_seed_the_pass_and_the_window(tmp_path):
    name = write_data(tmp_path)

    def permuted(seed: int, pass_: int, rows: list[int]) -> list[int]:
        order = np.random.default_rng([seed, pass_, 0]).permutation(len(rows))
        return [rows[place] for place in order]

    for seed in (5, 6):
        expected = cut(permuted(seed, 0, ALL)) + cut(permuted(seed, 1, ALL))
        assert trained_rows(name, seed, epochs=2, shuffle=True) == expected
    first_20 = cut(permuted(5, 0, ALL[:20]))
    assert trained_rows(name, rows=20, shuffle=True) == first_20


def test_a_shuffle_buffer_mixes_each_pass_and_a_resumed_stream_goes_on_in_the_same_order(tmp_path):
    name = write_data(tmp_path)
    mixed = [row for batch in trained_rows(name, epochs=2, shuffle_buffer=8) for row in batch]
    first, second = mixed[:N_TRAIN], mixed[N_TRAIN:]
    assert sorted(first) == sorted(second) == ALL and first != second
    config = TrainConfig(batch=16, seed=5, data=DataConfig(name=name, epochs=2, shuffle_buffer=8))
    _, rest = stream_from(config, open_source(name), 20)
    ids = [n for batch in rest for n in batch.dense[:, 0].astype(int).tolist()]
    assert ids == (first + second)[20:]


def run(folder: Path, name: str, *options: str) -> dict[str, Any]:
    words = ["train", "--data.name", name, "--out", str(folder / "run"), "--batch", "8"]
    assert main([*words, "--model.hidden", "4", *options]) == 0
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def test_a_run_says_its_split_and_its_rows_before_it_trains(tmp_path, capsys):
    summary = run(tmp_path, write_data(tmp_path))
    split = "train day < 2013-02-09 (as dates), test the others"
    printed = capsys.readouterr()
    said = f"data: numbered: {split}; train 40 samples, test 12 samples"
    assert said in (printed.out + printed.err).splitlines()
    assert summary["data"]["split"] == split
    assert (summary["data"]["train_rows"], summary["data"]["test_rows"]) == (40, 12)
    assert (summary["samples"], summary["updates"]) == (40, 5)


def test_bad_rows_are_counted_in_a_run_of_few_steps(tmp_path, capsys, monkeypatch):
    """The run stops long before the file's end; what it read held one bad row of each kind."""
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 256)  # some ten rows
    bad = {2: "u2,x,2013-02-08,0", 4: "torn", 39: "u4,y,2013-02-08,1", 44: "u4,z,2013-03-01,0"}
    name = write_data(tmp_path, bad)
    summary = run(tmp_path, name, "--data.skip-bad-rows", "--steps", "1")
    assert summary["samples"] == 8
    data = summary["data"]
    assert data["rows_skipped"] == 3, "row 39 was not read"
    train, test, outside = data["skipped_where"].split(", ")
    assert train.startswith("1 of train (file read up to row ")
    assert (test, outside) == ("1 of test (whole file read)", "1 of no part")
    said = capsys.readouterr().out
    assert re.search(rf"  bad rows +3 skipped: {re.escape(data['skipped_where'])}\n", said)


def test_the_figures_of_a_run_are_of_the_test_part_alone(tmp_path):
    summary = run(tmp_path, write_data(tmp_path))
    labels = np.load(tmp_path / "run" / "predictions.npz")["labels"]
    assert labels[:, 0].tolist() == [n % 2 for n in range(41, 53)]
    assert summary["tasks"]["label"]["label_rate"] == 0.5
    assert math.isfinite(summary["tasks"]["label"]["auc"])


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640])
def test_copies_of_private_data_are_private(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = "".join(f"{k % 7},{k % 2}\n" for k in range(300))
    (tmp_path / "rows.csv").write_text("user,label\n" + rows)
    (tmp_path / "rows.csv").chmod(mode)
    schema = tmp_path / "mine.toml"
    split = "[split]\ntest_fraction = 0.3\n"
    schema.write_text(f'name = "a"\nfile = "rows.csv"\n{split}[[columns]]\nname = "user"\n')
    words = ["--data.name", str(schema), "--steps", "2", "--batch", "8", "--out"]
    assert main(["train", *words, str(tmp_path / "run")]) == 0
    kept = tmp_path / "cache" / "persia-testbed" / "parsed"
    assert kept.is_dir() and kept.stat().st_mode & 0o777 == 0o700
    found = (tmp_path / "run" / "predictions.npz").stat().st_mode & 0o777
    assert (found == 0o600) == (mode == 0o600)


@pytest.mark.parametrize("kind", ["categorical", "multi"])
def test_views_of_texts_are_texts(kind, tmp_path):
    """As some writers of parquet mark their columns."""
    found = []
    for dtype in (pa.string(), pa.string_view()):
        user = pa.array([f"u{k % 7},{k % 3}" for k in range(300)], dtype)
        pq.write_table(pa.table({"user": user, "label": [k % 2 for k in range(300)]}),
                       tmp_path / "d.parquet")  # fmt: skip
        schema = tmp_path / "mine.toml"
        column = f'[[columns]]\nname = "user"\nkind = "{kind}"\n'
        text = f'name = "a"\nfile = "d.parquet"\n[split]\ntest_fraction = 0.3\n{column}'
        schema.write_text(text)
        found.append([batch.ids.tolist() for batch in open_source(str(schema)).chunks("train")])
    assert found[0] == found[1]


def test_what_is_absent_and_what_matches_no_row_is_said(tmp_path, capsys):
    """A column without values, and then the same data with its ids written in two other ways."""
    draw = np.random.default_rng(0)
    user, label = draw.integers(0, 40, 600), draw.integers(0, 2, 600)
    columns = {"user": [f"u{u}" for u in user], "device": [None] * 600, "label": label,
               "age": [None if n % 4 == 0 else str(n % 3) for n in range(600)]}  # fmt: skip

    def written(name, users):
        table = columns | {"user": pa.array(users), "device": pa.nulls(600, pa.string())}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        names = "".join(f'[[columns]]\nname = "{c}"\n' for c in ("user", "device", "age"))
        schema = tmp_path / f"{name}.toml"
        split = "[split]\ntest_fraction = 0.3\n"
        schema.write_text(f'name = "{name}"\nfile = "{name}.parquet"\n{split}{names}')
        return str(schema)

    words = ["--steps", "6", "--batch", "64", "--checkpoint-every", "end"]
    trained = written("mine", columns["user"])
    assert main(["train", "--data.name", trained, *words, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    said = told.out + told.err
    assert "absent values in the first rows: device 100 %, age 25 %" in said
    assert "warning: column device has no value in any of the first rows" in said
    assert re.search(
        "  ids with a row +100 %  of user\n +100 %  of device\n +100 %  of age\n", said
    )
    scores = []
    for name, users in (("blank", [f" {u} " for u in columns["user"]]),
                        ("padded", [f"u{u:05d}" for u in user])):  # fmt: skip
        data = written(name, users)
        out = tmp_path / f"{name}.json"
        words = ["evaluate", str(tmp_path / "run"), "--data", data, "--out", str(out)]
        assert main(words) == 0
        said = capsys.readouterr().out
        assert ("ids of the test part with a row: user 0 %" in said) == (name == "padded")
        assert ("fewer than half of the ids of user have a row" in said) == (name == "padded")
        scores.append(json.loads(out.read_text())["tasks"]["label"]["auc"])
    own = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]["label"]["auc"]
    assert scores[0] == own and scores[1] != own
