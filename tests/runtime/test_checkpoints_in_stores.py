"""Checkpoints whose folder is a URL: the bytes of local ones, whole or not there, from any host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from runtime import object_store
from runtime.__main__ import main
from runtime.checkpoint.places import complete_checkpoints, fetched
from runtime.checkpoint.whole import find_checkpoint, newest
from runtime.config import DataConfig
from runtime.data.open import open_source
from runtime.files import BrokenFileError
from runtime.inference import open_model
from runtime.object_store import Store, cached_file, working_folder
from runtime.run.record import run_into
from runtime.run.saver import Saving
from runtime.run.session import train
from runtime.stop import Ending, Interrupted
from tests.runtime.clicks_of_a_user import write_clicks
from tests.runtime.stores import FaultyStore, Killed
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, on_engine

SOURCE = ArraySource(300)  # 12 steps of 24 samples and one of 12
URL = "memory://bucket/runs/a"


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """The store in memory, empty; a host of its own for each test, whose cache is empty, too."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    double = FaultyStore(memory)
    real = object_store._opened

    def opened(url):
        return (double, memory._strip_protocol(url)) if "memory:" in url else real(url)

    monkeypatch.setattr(object_store, "_opened", opened)
    monkeypatch.setattr(object_store, "pause_before", lambda tried: 0.0)
    on_another_host(monkeypatch, tmp_path / "first host")
    return double


def on_another_host(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def every(steps, **changes):
    base = {"checkpoint_every": steps, "keep_checkpoints": 100, "mode": "hybrid", "tau": 2}
    return config(**base | changes)


def trained(settings, folder: Path, start=None):
    return train(settings, SOURCE, saving=Saving(folder, start))


@pytest.mark.law11
def test_a_run_goes_on_from_a_store_on_another_host_with_the_bytes_of_one_undisturbed(
    tmp_path, monkeypatch
):
    settings = every(4, shards=2)
    undisturbed = trained(settings, tmp_path / "local")
    trained(settings, working_folder(URL, "runs"))
    on_another_host(monkeypatch, tmp_path / "second host")
    here = fetched(URL, "runs")
    before = complete_checkpoints(here)[-2]
    for later in complete_checkpoints(here)[-1:]:
        Store(URL).remove(f"checkpoints/{later.name}")
    here = fetched(URL, "runs")
    start = newest(here)
    assert start.folder == before
    went_on = trained(every(4, shards=3), here, start)
    assert_same_bytes(undisturbed, went_on)


def test_servers_that_are_processes_send_their_rows_themselves(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store/a"
    settings = every(4, mode="sync", tau=0, **on_engine("processes", 2))
    here = working_folder(url, "runs")
    outcome = trained(settings, here)
    try:
        of_threads = trained(every(4, mode="sync", tau=0, shards=2), tmp_path / "local")
        assert_same_bytes(of_threads, outcome)
    finally:
        outcome.store.close()
    assert not list(here.rglob("*.rows"))
    assert len(list((tmp_path / "store").rglob("*.rows"))) == 2 * len(complete_checkpoints(here))
    on_another_host(monkeypatch, tmp_path / "second host")
    here = fetched(url, "runs")
    start = find_checkpoint(complete_checkpoints(here)[0])
    went_on = trained(settings, here, start)
    try:
        assert_same_bytes(of_threads, went_on)
    finally:
        went_on.store.close()


def test_old_checkpoints_go_from_the_store_and_half_written_ones_too(tmp_path):
    Store(URL).put(write(tmp_path / "x"), "checkpoints/000000000000001/dense.pt")
    here = working_folder(URL, "runs")
    trained(every(3, keep_checkpoints=2), here)
    kept = {name.split("/")[1] for name in Store(URL).names("checkpoints")}
    assert kept == {folder.name for folder in complete_checkpoints(here)}
    assert len(kept) == 2


def write(file: Path) -> Path:
    file.write_bytes(b"x")
    return file


def test_a_store_that_fails_once_in_twenty_calls_changes_no_byte(store, tmp_path):
    store.fails_one_in = 20
    settings = every(1, shards=3, keep_checkpoints=3)
    undisturbed = trained(settings, tmp_path / "local")
    here = working_folder(URL, "runs")
    outcome = trained(settings, here)
    assert store.failed.total() > 5
    assert outcome.figures.checkpoints_failed == 0
    assert_same_bytes(undisturbed, outcome)
    again = trained(settings, here, newest(fetched(URL, "runs")))
    assert_same_bytes(undisturbed, again)


def test_a_store_that_stays_away_costs_checkpoints_and_not_the_run(store, tmp_path):
    here = working_folder(URL, "runs")
    told = []
    asked = config(checkpoint_every=4, mode="sync")

    def fail(samples: int) -> None:
        store.fails_one_in = 1

    saving = Saving(here, on_warning=told.append)
    outcome = train(asked, SOURCE, saving=saving, on_samples=fail)
    assert outcome.figures.checkpoints_failed == 4 and outcome.figures.checkpoints_written == 0
    assert all("memory://bucket/runs/a" in text and "tried 6 times" in text for text in told)


def test_a_run_that_is_asked_to_end_while_its_store_hangs_keeps_what_there_is(store, monkeypatch):
    monkeypatch.setenv(object_store.REQUEST_S, "0.3")
    monkeypatch.setattr(object_store, "_given_up", "")
    settings = config(
        checkpoint_every=2, data=DataConfig(name="synthetic", rows=300), test_rows=50, mode="sync"
    )
    ending = Ending()

    def hang(samples: int) -> None:
        one_is_there = len([n for n in Store(URL).names() if n.endswith("state.json")]) == 1
        if one_is_there and not ending:
            store.hangs.set()
            ending.ask("SIGTERM")

    with pytest.raises(Interrupted) as interrupted:
        run_into(working_folder(URL, "runs"), settings, hang, ending=ending)
    assert interrupted.value.status == 75
    assert URL in str(interrupted.value)
    store.hangs.clear()
    monkeypatch.setattr(object_store, "_given_up", "")
    here = fetched(URL, "runs")
    assert f"--resume {URL}" in str(interrupted.value)
    assert newest(here).state.samples == 48
    run_into(here, settings, resume=True)


@pytest.mark.first_case
def test_an_upload_that_is_killed_leaves_the_checkpoint_before_the_newest(
    store, tmp_path, monkeypatch
):
    """At each call of the store that writing the second checkpoint makes, in turn."""
    settings = every(4, shards=2)
    undisturbed = trained(settings, tmp_path / "local")
    trained(replace(settings, steps=4), working_folder(URL, "runs"))
    first = dict(store._system.store)
    begun = store.calls
    trained(replace(settings, steps=8), fetched(URL, "runs"), newest(fetched(URL, "runs")))
    calls = store.calls - begun
    for number in range(1, calls, 3):
        on_another_host(monkeypatch, tmp_path / f"host {number}")
        store._system.store.clear()
        store._system.store.update(first)
        store.dies_at = store.calls + number
        with pytest.raises(Killed):
            here = fetched(URL, "runs")
            trained(replace(settings, steps=8), here, newest(here))
        store.dies_at = None
        on_another_host(monkeypatch, tmp_path / f"host behind {number}")
        here = fetched(URL, "runs")
        start = newest(here)
        assert start.state.samples in (96, 192)
        assert_same_bytes(undisturbed, trained(settings, here, start))


@pytest.mark.parametrize("name", ["dense.pt", ".rows"])
def test_a_damaged_object_is_refused_by_its_name(name, store):
    with pytest.raises(BrokenFileError) as refused:
        settings = config(
            checkpoint_every="end", data=DataConfig(name="synthetic", rows=300), test_rows=50
        )
        run_into(working_folder(URL, "runs"), settings)
        (damaged,) = [path for path in store._system.store if path.endswith(name)]
        content = bytearray(store._system.cat_file(damaged))
        content[len(content) // 2] ^= 1
        store._system.pipe_file(damaged, bytes(content))
        open_model(URL)
    assert f"memory:/{damaged} is" in str(refused.value), refused.value


def test_a_model_from_a_url_is_the_local_one_bit_by_bit(tmp_path, monkeypatch):
    settings = config(
        checkpoint_every=4, data=DataConfig(name="synthetic", rows=300), test_rows=50, shards=2
    )
    run_into(tmp_path / "local", settings)
    run_into(working_folder(URL, "runs"), settings)
    on_another_host(monkeypatch, tmp_path / "second host")
    below = f"/checkpoints/{complete_checkpoints(tmp_path / 'local')[0].name}"
    local, there = open_model(f"{tmp_path}/local{below}"), open_model(URL + below)
    assert local.tables.keys() == there.tables.keys()
    for table in local.tables:
        ids = np.arange(5000)
        assert local.lookup(table, ids).tobytes() == there.lookup(table, ids).tobytes()
    batch = next(iter(open_source("synthetic", rows=300).chunks("test")))
    assert local.predict(batch).tobytes() == there.predict(batch).tobytes()


@pytest.mark.long
def test_the_commands_take_urls(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = write_clicks(tmp_path / "data")
    words = ["--data.name", str(schema), "--batch", "50", "--checkpoint-every", "4"]
    options = [*words, "--model.hidden", "8", "--test-rows", "100"]
    url = f"file://{tmp_path}/store/runs/a"
    assert main(["train", *options, "--out", "local"]) == 0
    capsys.readouterr()
    assert main(["train", *options, "--out", url]) == 0
    assert f"run folder: {url}" in capsys.readouterr().out
    assert (tmp_path / "store/runs/a/summary.json").is_file()

    # What reads a model, on another host, says of both the same.
    on_another_host(monkeypatch, tmp_path / "second host")
    for place, out in (("local", "l"), (url, "u")):
        assert main(["evaluate", place, "--out", f"{out}.json"]) == 0
        data = str(tmp_path / "data/clicks.csv")
        assert main(["predict", place, "--data", data, "--out", f"{out}.csv"]) == 0
        assert main(["export", place, "--out", out]) == 0
    scores = [json.loads((tmp_path / f"{out}.json").read_text()) for out in "lu"]
    assert scores[1]["checkpoint"].startswith(url)
    assert scores[0]["tasks"] == scores[1]["tasks"]
    assert (tmp_path / "l.csv").read_bytes() == (tmp_path / "u.csv").read_bytes()
    for name in ("rows/rows.parquet", "dense.safetensors"):
        files = [list((tmp_path / out).rglob(Path(name).name)) for out in "lu"]
        assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    exported = f"file://{tmp_path}/l"
    assert main(["predict", exported, "--data", data, "--out", "e.csv"]) == 0
    of_graph, of_run = (np.loadtxt(tmp_path / f"{out}.csv", skiprows=1) for out in "el")
    np.testing.assert_allclose(of_graph, of_run, rtol=1e-6)


@pytest.mark.parametrize("file", ["clicks.csv", "cl*.csv"])
def test_data_at_a_url_are_the_same_data(file, store, tmp_path):
    schema = write_clicks(tmp_path / "data")
    content = (tmp_path / "data/clicks.csv").read_bytes()
    store._system.pipe_file("/bucket/data/clicks.csv", content)
    there = tmp_path / "there.toml"
    text = schema.read_text()
    assert 'file = "clicks.csv"' in text
    there.write_text(text.replace("clicks.csv", f"memory://bucket/data/{file}"))
    cached_file.cache_clear()
    local, far = open_source(str(schema)), open_source(str(there))
    assert local.provenance().sha256 == far.provenance().sha256
    assert local.provenance().files == far.provenance().files
    one, other = (next(iter(s.chunks("train"))) for s in (local, far))
    assert one.ids.tobytes() == other.ids.tobytes()
    there.write_text(text.replace("clicks.csv", "memory://bucket/data/none.csv"))
    with pytest.raises(ValueError, match=r"memory://bucket/data/none\.csv is not there"):
        open_source(str(there)).provenance()
