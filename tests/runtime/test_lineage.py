"""Law 17: no row that trained a model, or one that it was started from, judges it unnoticed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runtime.data.fingerprints
from runtime.__main__ import main
from runtime.checkpoint import lineage
from runtime.checkpoint.places import STATE, TRAINED, complete_checkpoints
from runtime.checkpoint.whole import find_checkpoint
from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.data.files import FileSource
from runtime.data.fingerprints import RowSet
from runtime.data.schema import read_schema
from runtime.files import write_sealed
from runtime.run.evaluate import HeldOut, overlap_with
from tests.runtime.clicks_of_a_user import SCHEMA, edited, write_clicks
from tests.runtime.test_torchrun import torchrun

DAYS, A_DAY = 10, 80
"""Of `write_clicks`: rows in order of time, no two alike; days 8 and 9 test."""
SPLIT = '{ column = "day", test_from = 8 }'
SMALL = ["--batch", "32", "--model.hidden", "8", "--rows.dim", "2"]


def schema_in(folder: Path, file: str, split: str = SPLIT, **edits: str) -> Path:
    """A schema of clicks in a file that is named relative to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = edited(edited(SCHEMA, ('"clicks.csv"', json.dumps(file))), (SPLIT, split))
    for before, now in edits.items():
        text = text.replace(before, now)
    (folder / "judged.toml").write_text(text)
    return folder / "judged.toml"


def trained(schema: Path, run: Path, *words: str) -> Path:
    """A run that keeps its model."""
    more = ["--data.name", str(schema), "--checkpoint-every", "end", "--out", str(run), *words]
    assert main(["train", *SMALL, *more]) == 0
    return run


def judged(run: Path, schema: Path, *words: str) -> dict[str, Any]:
    """What `evaluate` finds on the test part of a schema."""
    out = run.parent / "found.json"
    assert main(["evaluate", str(run), "--data", str(schema), "--out", str(out), *words]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with clicks, and a run on the first 512 of the 640 rows that train."""
    home = tmp_path_factory.mktemp("world")
    schema = write_clicks(home / "data")
    return home, trained(schema, home / "run", "--steps", "16")


def table(home: Path) -> pd.DataFrame:
    return pd.read_csv(home / "data" / "clicks.csv", dtype={"tags": str})


# Ways round a check that goes by names.


def in_another_folder(home: Path, here: Path) -> tuple[Path, str]:
    (here / "clicks.csv").symlink_to(home / "data" / "clicks.csv")
    return here / "schemas" / "deep", "../../clicks.csv"


def copied_beside_another_of_its_name(home: Path, here: Path) -> tuple[Path, str]:
    shutil.copy(home / "data" / "clicks.csv", here / "fresh.csv")
    write_clicks(here / "drawn", 40)
    shutil.move(here / "drawn" / "clicks.csv", here / "clicks.csv")
    return here, "fresh.csv"


def as_parquet(home: Path, here: Path) -> tuple[Path, str]:
    table(home).to_parquet(here / "fresh.parquet")
    return here, "fresh.parquet"


def with_more_columns_and_rows_in_another_order(home: Path, here: Path) -> tuple[Path, str]:
    """And the label is another one."""
    frame = table(home)[["label", "tags", "day", "price", "user", "item"]]
    frame = frame.sample(frac=1, random_state=3)
    frame.assign(index=range(len(frame)), label=1 - frame.label).to_csv(here / "fresh.csv")
    return here, "fresh.csv"


def cut_into_files(home: Path, here: Path) -> tuple[Path, str]:
    """Whose names do not come in the order of time."""
    frame = table(home)
    for name, rows in {"b": frame[:300], "a": frame[300:450], "c": frame[450:]}.items():
        rows.to_csv(here / f"fresh-{name}.csv", index=False)
    return here, "fresh-*.csv"


WAYS = [
    in_another_folder,
    copied_beside_another_of_its_name,
    as_parquet,
    with_more_columns_and_rows_in_another_order,
    cut_into_files,
]
EARLY = '{ column = "day", test_from = 5 }'
"""400 rows, of which 112 have trained."""


@pytest.mark.law17
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_trained_are_known_whatever_their_file_is(way, world, tmp_path, capsys):
    home, run = world
    schema = schema_in(*way(home, tmp_path), EARLY)
    found = judged(run, schema)
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (112, 400)
    assert "warning: 112 of the 400 samples trained this model" in capsys.readouterr().out
    more = ["--data.name", str(schema), "--warm-start", str(run), "--out", str(tmp_path / "new")]
    assert main(["train", *SMALL, *more]) == 2
    assert "112 samples of the test part were trained on by" in capsys.readouterr().err
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.law17
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_did_not_train_judge_whatever_their_file_is(way, world, tmp_path, capsys):
    home, run = world
    schema = schema_in(*way(home, tmp_path))
    found = judged(run, schema)
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (0, 160)
    assert "samples trained this model" not in capsys.readouterr().out
    trained(schema, tmp_path / "new", "--warm-start", str(run), "--steps", "1")


@pytest.mark.first_case
@pytest.mark.law17
@pytest.mark.parametrize("way", WAYS)
def test_predictions_beside_labels_are_said_to_be_of_rows_that_trained(
    way, world, tmp_path, capsys
):
    """Without a label nobody can judge by them."""
    home, run = world
    _, name = way(home, tmp_path)
    assert main(["export", str(run), "--out", str(tmp_path / "export")]) == 0
    place = tmp_path / Path(name).name
    if "*" in name:  # each file is a table of its own; the rows of b and a have trained
        counts = {"fresh-b.csv": "300 of the 300", "fresh-a.csv": "150 of the 150"}
    else:
        counts = {place.name: "512 of the 800"}
    for file, count in counts.items():
        for k, model in enumerate([run, tmp_path / "export"]):
            words = ["predict", str(model), "--out", str(tmp_path / f"{file}{k}.csv")]
            assert main([*words, "--data", str(tmp_path / file)]) == 0
            assert f"warning: {count} samples trained this model" in capsys.readouterr().err


def test_predictions_without_labels_judge_nothing(world, tmp_path, capsys):
    home, run = world
    table(home).drop(columns="label").to_csv(tmp_path / "fresh.csv", index=False)
    words = ["--data", str(tmp_path / "fresh.csv"), "--out", str(tmp_path / "found.csv")]
    assert main(["predict", str(run), *words]) == 0
    assert "trained" not in "".join(capsys.readouterr())


# A property: any choice of rows.


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@pytest.mark.long
@pytest.mark.law17
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.integers(0, DAYS * A_DAY - 1), min_size=4, max_size=60),
    name=st.sampled_from(["clicks.csv", "x.csv.gz", "z.parquet", "a-b c.csv"]),
    fresh=st.integers(0, 40),
    first=st.none() | st.integers(4, 60),
)
def test_any_choice_of_rows_is_counted_right_in_any_order_and_file(
    world, drawn, rows, name, fresh, first
):
    """512 rows have trained; some of those drawn did, also twice over; fresh ones are new."""
    home, run = world
    new = table(home).sample(fresh, random_state=1)
    new["price"] = 2 + np.arange(fresh) / 100
    frame = pd.concat([table(home).iloc[rows], new]).sample(frac=1, random_state=len(rows))
    frame["label"] = np.arange(len(frame)) % 2
    spare = table(home)[600:640].assign(part="train", label=lambda f: np.arange(len(f)) % 2)
    whole = pd.concat([spare, frame.assign(part="test")])
    write: Callable[..., Any] = whole.to_parquet if "parquet" in name else whole.to_csv
    write(drawn / name, index=False)

    schema = schema_in(drawn, name, '{ column = "part", test_equals = "test" }')
    source = FileSource(schema=read_schema(schema)[0], folder=drawn)
    found = overlap_with(find_checkpoint(run).trained_on(), HeldOut(source, first))

    order = frame.merge(table(home).reset_index(), how="left", on=["user", "item", "tags", "price"])
    assert len(order) == len(frame)
    count = (order["index"][:first] < 512).sum()
    assert found.alike == count
    assert found.rows == len(frame[:first])

    # A single one may be chance: no two of the 512 are equal, so that of as many pairs twice over 4
    # may be, and two deviations more.
    expected = 4 * len(frame[:first]) * 512 / (512 * 511 / 2)
    assert found.trained == (count if count > expected + 2 * expected**0.5 else 0)


# The whole line.


@pytest.mark.law17
@pytest.mark.parametrize("copied_as", ["clicks.csv", "other.parquet"])
def test_a_warm_start_keeps_the_rows_of_all_its_ancestors(copied_as, tmp_path, capsys):
    """Day 0 trains the first model, 64 rows of day 3 the second, day 5 the third."""
    home = tmp_path / "world"
    write_clicks(home / "data")
    run = None
    for k, day in enumerate([0, 3, 5]):
        rows = table(home)[day * A_DAY :][:A_DAY]
        apart = table(home)[8 * A_DAY + 40 * (day == 0) :]
        pd.concat([rows, apart]).to_csv(home / f"leg{k}.csv", index=False)
        warm = [] if run is None else ["--warm-start", str(run)]
        schema = schema_in(home / f"schema{k}", f"../leg{k}.csv")
        run = trained(schema, home / f"run{k}", "--steps", "2", *warm)
    assert run is not None

    write: Any = table(home).to_csv if copied_as.endswith("csv") else table(home).to_parquet
    write(tmp_path / copied_as, index=False)
    schema = schema_in(tmp_path, copied_as, '{ column = "day", test_equals = "0" }')
    assert judged(run, schema)["rows_trained_on"] == 64
    schema = schema_in(tmp_path, copied_as, '{ column = "day", test_equals = "3" }')
    assert judged(run, schema)["rows_trained_on"] == 64
    more = ["--data.name", str(schema), "--warm-start", str(run), "--out", str(tmp_path / "new")]
    capsys.readouterr()
    assert main(["train", *SMALL, *more]) == 2
    said = capsys.readouterr().err
    assert "64 samples of the test part were trained on by" in said
    assert all(str(home / f"run{k}") in said for k in range(3))
    for origin in range(2):  # a checkpoint has all of it
        shutil.rmtree(home / f"run{origin}")
    schema = schema_in(tmp_path, copied_as, '{ column = "day", test_from = 0 }')
    assert find_checkpoint(run).trained_on().rows.size == 64 * 3


def out_of_a_buffer(rows: int, size: int, seed: int) -> list[int]:
    """As tf.data shuffles: of a buffer, a drawn sample goes out and the next one comes in."""
    generator = np.random.default_rng([seed, 0, size])
    buffer, out = list(range(size)), []
    for row, place in enumerate(generator.integers(0, size, rows - size), size):
        out.append(buffer[place])
        buffer[place] = row
    return out + [buffer[place] for place in generator.permutation(size)]


@pytest.mark.first_case
@pytest.mark.law17
@pytest.mark.parametrize("leg", ["one", "two"])
@pytest.mark.parametrize("other", [False, True], ids=["the same file", "another file"])
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--data.shuffle"],
        ["--data.shuffle", "--data.rows", "300"],
        ["--data.shuffle-buffer", "200"],
        ["--data.shuffle-buffer", "90", "--data.rows", "300"],
    ],
    ids=["in order", "shuffled", "shuffled rows", "in a buffer", "rows in a buffer"],
)
def test_of_an_interrupted_run_the_rows_that_it_read_are_known(leg, other, more, tmp_path):
    """Of a shuffled one by the order that its seed draws; a resume reads on."""
    schema = write_clicks(tmp_path / "data")
    words = ["--seed", "5", *more]
    run = trained(schema, tmp_path / "run", *words, "--steps", "4")
    if leg == "two":
        assert main(["train", "--resume", str(run), "--steps", "7"]) == 0
    samples = {"one": 4 * 32, "two": 7 * 32}[leg]
    limit = 300 if "--data.rows" in more else 640
    order = np.random.default_rng([5, 0, 0]).permutation(limit) if more else np.arange(limit)
    if "--data.shuffle-buffer" in more:
        order = np.array(out_of_a_buffer(limit, int(more[1]), seed=5))
    expected = int((order[:samples] >= 2 * A_DAY).sum())
    assert expected < samples
    if other:
        table(tmp_path).to_parquet(tmp_path / "other.parquet")
    file = "other.parquet" if other else "data/clicks.csv"
    judges = schema_in(tmp_path, file, '{ column = "day", test_from = 2 }')
    assert judged(run, judges)["rows_trained_on"] == expected


@pytest.mark.parametrize("more", [[], ["--data.shuffle"]], ids=["in order", "shuffled"])
def test_rows_that_a_window_leaves_out_before_it_count_as_read(more, tmp_path):
    """Of a shuffled window all of it counts: nobody is told that a row is new which has trained."""
    schema = write_clicks(tmp_path / "data")
    words = ["--data.skip-rows", "200", "--steps", "3", *more]
    run = trained(schema, tmp_path / "run", *words)
    judges = schema_in(tmp_path, "data/clicks.csv", '{ column = "day", test_from = 2 }')
    first = 2 * A_DAY
    expected = 640 - first if more else 200 + 3 * 32 - first
    assert judged(run, judges)["rows_trained_on"] == expected


@given(
    size=st.integers(1, 60),
    buffer_rows=st.integers(2, 70),
    block=st.integers(1, 20),
    samples=st.integers(0, 130),
    bad=st.sets(st.integers(0, 59), max_size=3),
    seed=st.integers(0, 3),
)
def test_what_a_buffer_has_given_out_is_drawn_again(size, buffer_rows, block, samples, bad, seed):
    """Against the stream itself, as far as it was read; rows that wait in the buffer did not train.
    Where bad rows were left out none that trained is missed."""
    skipped = {row for row in bad if row < size}
    good = np.array([row for row in range(size) if row not in skipped])
    nothing = np.empty((len(good), 0), np.float32)
    chunk = Batch(good.astype(np.uint64), None, nothing, nothing)
    origin = lineage.Origin(
        run="", samples=samples, skipped=len(skipped), train_rows=size, seed=seed,
        shuffle_buffer=buffer_rows,
        files=[{"sha256": "", "part": None, "rows": size, "trains": size}],
        split={"test_fraction": 0.5},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.data.source, "_LEAST_BLOCK_ROWS", block)
        chunks = iter([chunk] if len(good) else [])
        stream = runtime.data.source.shuffled_in_buffer(chunks, seed, 0, buffer_rows)
        every = [int(row) for batch in stream for row in batch.ids]
        found = set(np.flatnonzero(origin.read(np.arange(1, size + 1))).tolist())
    runtime.data.source.held_in_buffer.cache_clear()
    assert found >= set(every[:samples])
    if not skipped:
        assert found == set(every[:samples])


# What cannot be known for sure.


def few_values(seed: int, rows: int = 1000) -> pd.DataFrame:
    """600 different rows at most, which repeat by nature."""
    draw = np.random.default_rng(seed)
    columns = {"user": draw.integers(0, 30, rows), "item": draw.integers(0, 20, rows)}
    return pd.DataFrame(
        columns | {"label": draw.integers(0, 2, rows), "day": np.arange(rows) // 100}
    )


FEW = SCHEMA[: SCHEMA.index("[[columns]]")] + 'columns = ["user", "item"]\n'


def test_rows_of_few_values_that_meet_by_chance_are_no_training_rows(tmp_path, capsys):
    """Another draw of them may judge, and begin a warm start; those that trained are known by the
    bytes of their file all the same."""
    few_values(1).to_csv(tmp_path / "clicks.csv", index=False)
    (tmp_path / "then.toml").write_text(FEW)
    run = trained(tmp_path / "then.toml", tmp_path / "run")
    few_values(2).to_csv(tmp_path / "others.csv", index=False)
    (tmp_path / "now.toml").write_text(FEW.replace("clicks.csv", "others.csv"))
    found = judged(run, tmp_path / "now.toml")
    assert found["rows_trained_on"] == 0 and found["rows_alike"] > 100
    assert "test samples hold what a sample held that was trained on" in capsys.readouterr().out
    trained(tmp_path / "now.toml", tmp_path / "new", "--warm-start", str(run), "--steps", "1")
    (tmp_path / "early.toml").write_text(FEW.replace("test_from = 8", "test_from = 5"))
    assert judged(run, tmp_path / "early.toml")["rows_trained_on"] == 300


@pytest.mark.law17
def test_rows_of_few_values_are_known_by_their_order_in_another_file(tmp_path, capsys):
    """800 rows train; saved again, with the split moved, 300 of them are to judge."""
    few_values(1).to_csv(tmp_path / "clicks.csv", index=False)
    (tmp_path / "then.toml").write_text(FEW)
    run = trained(tmp_path / "then.toml", tmp_path / "run")
    few_values(1).to_parquet(tmp_path / "again.parquet")
    early = FEW.replace("clicks.csv", "again.parquet").replace("test_from = 8", "test_from = 5")
    (tmp_path / "early.toml").write_text(early)
    assert judged(run, tmp_path / "early.toml")["rows_trained_on"] == 300
    capsys.readouterr()
    words = ["--data.name", str(tmp_path / "early.toml"), "--warm-start", str(run)]
    assert main(["train", *SMALL, *words, "--out", str(tmp_path / "new")]) == 2
    assert "300 samples of the test part were trained on" in capsys.readouterr().err


def test_a_full_sketch_gives_an_estimate(tmp_path, monkeypatch, capsys):
    """With room for 64 of 640 rows; 560 of 720 have trained: four standard deviations of a sample
    of 64 of these are 11 %."""
    monkeypatch.setattr(runtime.data.fingerprints, "MOST_ROWS", 64)
    schema = write_clicks(tmp_path / "data")
    run = trained(schema, tmp_path / "run")
    table(tmp_path).to_parquet(tmp_path / "other.parquet")
    judges = schema_in(tmp_path, "other.parquet", '{ column = "day", test_from = 1 }')
    assert judged(run, judges)["rows_trained_on"] == pytest.approx(560, rel=0.25)
    assert "warning: about " in capsys.readouterr().out
    same = schema_in(tmp_path, "data/clicks.csv", '{ column = "day", test_from = 1 }')
    assert judged(run, same)["rows_trained_on"] == 560
    assert (complete_checkpoints(run)[0] / TRAINED).stat().st_size < 2 * 64 * 12 + 512


def test_loaders_give_their_rows_to_be_known_too(tmp_path):
    schema = write_clicks(tmp_path / "data")
    words = ["--loaders", "2", "--executor", "concurrent", "--ranks", "3", "--steps", "16"]
    run = trained(schema, tmp_path / "run", *words)
    table(tmp_path).to_parquet(tmp_path / "other.parquet")
    assert judged(run, schema_in(tmp_path, "other.parquet", EARLY))["rows_trained_on"] == 112


@pytest.mark.long
@pytest.mark.parametrize(("loaders", "told"), [(0, "112"), (1, "at least 48")])
def test_of_ranks_that_are_processes_the_first_knows_what_it_sees(loaders, told, tmp_path, capsys):
    """By hand: of rows 400 to 511 rank 0 takes the first 16 of each 32 from row 416 on."""
    schema = write_clicks(tmp_path / "data")
    words = [*SMALL, "--data.name", str(schema), "--steps", "16", "--loaders", str(loaders)]
    run = tmp_path / "run"
    code, _, said = torchrun(tmp_path, *words, "--checkpoint-every", "end", "--out", str(run))
    assert code == 0, said
    table(tmp_path).to_parquet(tmp_path / "other.parquet")
    judged(run, schema_in(tmp_path, "other.parquet", EARLY))
    assert f"warning: {told} of the 400 samples trained this model" in capsys.readouterr().out


def test_a_lineage_does_not_grow_for_ever(world, monkeypatch):
    """Of older runs the files go first, then the runs; the sketch has their rows all the same."""
    home, _ = world
    source = FileSource(schema=read_schema(home / "data" / "clicks.toml")[0], folder=home / "data")
    monkeypatch.setattr(lineage, "MOST_RUNS", 5)
    monkeypatch.setattr(lineage, "MOST_FILES", 3)
    before = lineage.TrainedOn()
    for day in range(9):
        run = lineage.RunLineage(source, TrainConfig(), f"day{day}", before)
        own = RowSet(
            values=np.array([day], np.uint64), counts=np.ones(1, np.uint32), limit=2**64 - 1, size=1
        )
        before = run.trained(32, own, in_part=False)
    runs = [(origin.run, len(origin.files)) for origin in before.lineage.origins]
    assert runs == [("day8", 1), ("day7", 1), ("day6", 1), ("day5", 0), ("day4", 0)]
    assert before.rows.values.tolist() == list(range(9))


def without_lineage(run: Path) -> None:
    """As an older version has written its checkpoints."""
    for folder in complete_checkpoints(run):
        state = json.loads((folder / STATE).read_text())
        for key in ("lineage", "digest"):
            del state[key]
        del state["files"][TRAINED]
        (folder / TRAINED).unlink()
        write_sealed(folder / STATE, state)


def test_an_older_checkpoint_loads_and_its_lineage_is_said_to_be_unknown(tmp_path, capsys):
    schema = write_clicks(tmp_path / "data")
    run = trained(schema, tmp_path / "run", "--steps", "4")
    without_lineage(run)
    early = schema_in(tmp_path, "data/clicks.csv", EARLY)
    found = judged(run, early)
    assert found["rows_trained_on"] is None
    unknown = f"nobody knows which rows trained {complete_checkpoints(run)[0]}"
    assert f"warning: {unknown}" in capsys.readouterr().out

    # Who begins with it says so, too, and knows what trained afterwards.
    new = trained(schema, tmp_path / "new", "--warm-start", str(run))
    assert f"warning: {unknown}" in capsys.readouterr().out
    found = judged(new, early)
    assert found["rows_trained_on"] == 240
    assert f"warning: {unknown}" in capsys.readouterr().out

    # And who goes on with it knows the files that it had.
    assert main(["train", "--resume", str(run), "--steps", "18"]) == 0
    assert judged(run, early)["rows_trained_on"] == 18 * 32 - 400


def test_damage_of_a_sketch_is_named(world, tmp_path, refused):
    shutil.copytree(world[1], tmp_path / "run")
    file = complete_checkpoints(tmp_path / "run")[0] / TRAINED
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert f"{file} is damaged" in refused("evaluate", str(tmp_path / "run"))
