"""Parsed data that is kept: the bytes of parsing anew, for as long as nothing has changed."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from runtime.config import DataConfig, EvaluationConfig, ModelConfig, TrainConfig
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.open import (
    CachedSource,
    folder_bytes,
    make_room,
    open_source,
    with_cache,
)
from runtime.data.schema import Column, Schema
from runtime.data.source import rebatch
from runtime.data.split import Split
from runtime.run.session import train

SCHEMA = Schema(
    name="mine",
    columns=(
        Column(name="user"),
        Column(name="tags", kind="multi"),
        Column(name="age", kind="numeric"),
    ),
    split=Split(column="day", test_from=3),
    file="data.csv",
)


def write_file(folder: Path, rows: int = 60, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    tags = ["a,b", "c", "a,b,c", ""]
    pd.DataFrame(
        {
            "user": draw.integers(0, 9, rows),
            "tags": [tags[k] for k in draw.integers(0, 4, rows)],
            "age": draw.normal(size=rows).round(3),
            "day": np.arange(rows) * 4 // rows,
            "label": draw.integers(0, 2, rows),
        }
    ).to_csv(folder / "data.csv", index=False)


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_file(folder)
    return folder


def parsed(folder: Path, schema: Schema = SCHEMA, rows: int | None = None) -> FileSource:
    return FileSource(schema=schema, folder=folder, rows=rows)


def content(source, part: str = "train") -> tuple[bytes, ...]:
    (batch,) = rebatch(source.chunks(part), 10**6)
    arrays = batch.ids, batch.offsets, batch.dense, batch.labels
    assert [a.dtype.name for a in arrays] == ["uint64", "int64", "float32", "float32"]
    return tuple(a.tobytes() for a in arrays)


class Unreadable(FileSource):
    """Fails when it is parsed: what is given was kept."""

    def chunks(self, part):
        raise AssertionError(f"{part} was parsed")

    def census(self):
        raise AssertionError("labels were counted")


def read_from(root: Path, folder: Path, **changes) -> CachedSource:
    return CachedSource(Unreadable(schema=SCHEMA, folder=folder, **changes), root)


def test_kept_parts_hold_the_bytes_of_parsing(data, tmp_path):
    first = CachedSource(parsed(data), tmp_path / "kept")
    expected = {part: content(parsed(data), part) for part in ("train", "test")}
    assert {part: content(first, part) for part in expected} == expected
    facts = first.provenance()
    again = read_from(tmp_path / "kept", data)
    assert {part: content(again, part) for part in expected} == expected
    assert again.provenance() == facts == parsed(data).provenance()
    assert (facts.train_rows, facts.test_rows) == (45, 15)


@pytest.mark.parametrize("what", ["file", "schema", "rows", "parser"])
def test_what_has_changed_is_parsed_anew(what, data, tmp_path, monkeypatch):
    root = tmp_path / "kept"
    before = content(CachedSource(parsed(data), root))
    schema, rows = SCHEMA, None
    if what == "file":
        write_file(data, seed=1)
    elif what == "schema":
        columns = (*SCHEMA.columns[:2], Column(name="age", kind="numeric", log=False))
        schema = Schema(name="mine", columns=columns, split=SCHEMA.split, file="data.csv")
    elif what == "rows":
        rows = 7
    else:
        monkeypatch.setattr("runtime.data.open.parser_version", lambda: "another")
    with pytest.raises(AssertionError, match="train was parsed"):
        list(CachedSource(Unreadable(schema=schema, folder=data, rows=rows), root).chunks("train"))
    after = content(CachedSource(parsed(data, schema, rows), root))
    assert after == content(parsed(data, schema, rows))
    assert (after == before) == (what == "parser")


def test_what_changes_while_a_run_reads_it_is_not_kept_as_what_was_there_before(data, tmp_path):
    """The old file may come back: then nothing of the other may stand in its place."""
    before, text = content(parsed(data)), (data / "data.csv").read_bytes()
    facts = with_cache(parsed(data), tmp_path / "apart").provenance()
    running = with_cache(parsed(data), tmp_path / "kept")
    content(running)
    write_file(data, seed=1)
    other = content(running, "test")  # of the other file, which the run was not to read
    running.provenance()
    (data / "data.csv").write_bytes(text)
    again = with_cache(parsed(data), tmp_path / "kept")
    assert (content(again), again.provenance()) == (before, facts)
    assert content(again, "test") == content(parsed(data), "test") != other


def test_a_stream_that_stops_early_keeps_nothing(data, tmp_path, monkeypatch):
    monkeypatch.setattr(FileSource, "chunks", in_pieces(FileSource.chunks))
    source = CachedSource(parsed(data), tmp_path / "kept")
    stream = source.chunks("train")
    assert next(stream).size == 10
    stream.close()
    assert not [p for p in (tmp_path / "kept").rglob("*") if p.is_file()]
    assert content(source) == content(parsed(data))
    assert content(read_from(tmp_path / "kept", data)) == content(parsed(data))


def in_pieces(chunks):
    def smaller(self, part):
        for chunk in chunks(self, part):
            for start in range(0, chunk.size, 10):
                yield chunk.rows(start, min(start + 10, chunk.size))

    return smaller


def test_a_bad_row_is_told_as_ever_and_nothing_is_kept(data, tmp_path):
    lines = (data / "data.csv").read_text().splitlines()
    lines[9] = lines[9].rsplit(",", 1)[0] + ",7"
    (data / "data.csv").write_text("\n".join(lines) + "\n")
    source = CachedSource(parsed(data), tmp_path / "kept")
    for _ in range(2):
        with pytest.raises(DataError, match="row 9, column label: '7'"):
            list(source.chunks("train"))
    assert not [p for p in (tmp_path / "kept").rglob("*") if p.is_file()]


@pytest.mark.parametrize("harm", ["cut", "flip", "no summary", "summary"])
def test_a_damaged_part_is_parsed_anew(harm, data, tmp_path):
    root = tmp_path / "kept"
    expected = content(CachedSource(parsed(data), root))
    (folder,) = root.glob("*/train")
    file = folder / ("part.json" if "summary" in harm else "0")
    whole = file.read_bytes()
    if harm == "no summary":
        file.unlink()
    else:
        middle = len(whole) // 2
        file.write_bytes(
            whole[:-8] if harm == "cut" else whole[:middle] + b"\x99" + whole[middle + 1 :]
        )
    with pytest.raises(AssertionError, match="train was parsed"):
        list(read_from(root, data).chunks("train"))
    assert content(CachedSource(parsed(data), root)) == expected
    if harm != "no summary":
        assert content(read_from(root, data)) == expected


def test_many_at_once_keep_one_and_all_have_the_same_bytes(data, tmp_path):
    expected = content(parsed(data))
    with ThreadPoolExecutor(8) as pool:
        sources = [CachedSource(parsed(data), tmp_path / "kept") for _ in range(16)]
        assert set(pool.map(content, sources)) == {expected}
    (folder,) = (tmp_path / "kept").glob("*")
    assert sorted(p.name for p in folder.iterdir()) == ["train"]


def test_what_was_used_longest_ago_goes_first(data, tmp_path):
    root = tmp_path / "kept"
    folders = []
    for rows in (5, 6, 7):
        source = CachedSource(parsed(data, rows=rows), root)
        content(source)
        (new,) = set(root.iterdir()) - set(folders)
        folders.append(new)
        os.utime(new, (rows, rows))
    content(CachedSource(parsed(data, rows=5), root))  # used again: now the youngest
    one = folder_bytes(folders[0])
    make_room(root, 2 * one + 200, folders[0])
    assert set(root.iterdir()) == {folders[0], folders[2]}


@pytest.mark.parametrize("harm", ["flipped", "removed"])
def test_a_kept_part_that_is_lost_on_the_way_is_parsed_from_there(
    harm, data, tmp_path, monkeypatch
):
    monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 150)
    root, whole = tmp_path / "kept", list(parsed(data).chunks("train"))
    assert len(whole) > 3 and content(CachedSource(parsed(data), root)) == content(parsed(data))
    (folder,) = root.glob("*/train")
    stream = CachedSource(parsed(data), root).chunks("train")
    first = [next(stream), next(stream)]
    if harm == "removed":
        shutil.rmtree(folder)
    else:
        (folder / "2").write_bytes((folder / "2").read_bytes()[:-1] + b"\x99")
        monkeypatch.setattr("runtime.data.table.CSV_BLOCK_BYTES", 500)  # the same rows, cut anew
    rest = list(stream)
    assert all(batch.size for batch in rest)
    (found,) = rebatch(iter([*first, *rest]), 10**6)
    assert found.labels.tobytes() + found.ids.tobytes() == b"".join(
        np.concatenate([getattr(batch, name) for batch in whole]).tobytes()
        for name in ("labels", "ids")
    )


def test_a_folder_that_may_not_be_written_is_no_error(data, tmp_path):
    (tmp_path / "kept").write_text("a file in the way")
    source = CachedSource(parsed(data), tmp_path / "kept")
    assert content(source) == content(parsed(data))
    assert source.provenance() == parsed(data).provenance()


def test_a_run_from_kept_data_has_the_bytes_of_one_that_parses(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (data / "mine.toml").write_text(
        'name = "mine"\nfile = "data.csv"\n[split]\ncolumn = "day"\ntest_from = 3\n'
        '[[columns]]\nname = "user"\n[[columns]]\nname = "tags"\nkind = "multi"\n'
    )
    states = []
    for keep in (False, True, True):
        named = DataConfig(name=str(data / "mine.toml"))
        outcome = train(
            TrainConfig(
                batch=8,
                data=named,
                model=ModelConfig(hidden=(8,)),
                evaluation=EvaluationConfig(evaluate_every_steps=2),
            ),
            None if keep else open_source(named.name),
        )
        rows = outcome.store.export()["rows"]
        states.append((*(a.tobytes() for a in rows), outcome.final.predictions.tobytes()))
        kept_now = list((tmp_path / "cache").rglob("part.json"))
        assert len(kept_now) == (2 if keep else 0)
    assert states[0] == states[1] == states[2]
    assert isinstance(open_source(str(data / "mine.toml"), keep=True), CachedSource)
