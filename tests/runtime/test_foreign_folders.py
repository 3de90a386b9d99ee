"""A run's folder may be a stranger's: nothing outside of it is asked, sent, written or removed."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from runtime.__main__ import main
from runtime.checkpoint.places import SEALED, STATE, complete_checkpoints, fetched
from runtime.checkpoint.whole import read_state
from runtime.files import BrokenFileError, write_sealed
from runtime.object_store import URL_FILE, Store, store_behind, working_folder

WORDS = "--data.name synthetic --data.rows 600 --batch 60 --test-rows 60 --model.hidden 8"
EVERY = "--mode sync --checkpoint-every 2 --keep-checkpoints 2"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that could go on, beside files of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    precious = tmp_path / "victim" / "papers" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    assert main(["train", *WORDS.split(), *EVERY.split(), "--steps", "4", "--out", "run"]) == 0
    return tmp_path / "run"


def resumed(run: Path) -> int:
    return main(["train", "--resume", str(run), "--steps", "8"])


def ours(tmp_path: Path) -> dict[str, bytes]:
    """All that lies in the user's folder."""
    victim = tmp_path / "victim"
    return {str(f.relative_to(victim)): f.read_bytes() for f in victim.rglob("*") if f.is_file()}


@pytest.mark.parametrize("place", ["", "checkpoints/000000000000001"])
def test_a_run_folder_names_no_store(place, run, tmp_path, capsys):
    """Neither is the folder that it names emptied or filled, nor does anything else happen."""
    (run / place).mkdir(exist_ok=True)
    url = {"url": f"file://{tmp_path}/victim"}
    (run / place / URL_FILE).write_text(json.dumps(url))
    before = [folder.name for folder in complete_checkpoints(run)]
    assert resumed(run) == 2
    told = capsys.readouterr().err
    assert str(run / place / URL_FILE) in told and "remove this file" in told
    assert ours(tmp_path) == {"papers/thesis.txt": b"precious"}
    assert [folder.name for folder in complete_checkpoints(run)] == before
    if place in ("", "checkpoints"):
        assert main(["evaluate", str(run)]) == 2
        assert str(run / place / URL_FILE) in capsys.readouterr().err


def test_only_a_working_folder_of_this_cache_names_a_store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = working_folder("memory://bucket/a", "runs")
    assert store_behind(folder / "checkpoints").url == "memory://bucket/a/checkpoints"
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(BrokenFileError, match="names a store"):
        store_behind(tmp_path / "link")
    for content in ('{"url": "memory://bucket/b"}', "[]", '{"url": 1}', "{", ""):
        (folder / URL_FILE).write_text(content)
        with pytest.raises(BrokenFileError, match="names a store"):
            store_behind(folder)
    (folder / URL_FILE).unlink()
    (folder / URL_FILE).symlink_to("/nowhere")
    with pytest.raises(BrokenFileError, match="names a store"):
        store_behind(folder)


def test_a_cache_behind_a_link_is_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = working_folder("memory://bucket/a", "runs")
    assert store_behind(folder).url == store_behind(folder.resolve()).url == "memory://bucket/a"


def test_checkpoints_that_are_a_link_are_not_filled(run, tmp_path, capsys):
    (run / "checkpoints").rename(tmp_path / "victim" / "checkpoints")
    (run / "checkpoints").symlink_to(tmp_path / "victim" / "checkpoints")
    before = ours(tmp_path)
    assert resumed(run) == 2
    assert f"{run}/checkpoints is a link" in capsys.readouterr().err
    assert ours(tmp_path) == before


@pytest.mark.parametrize("name", ["000000000000240", "1 notes"])
@pytest.mark.parametrize("place", ["", "rows"])
def test_what_a_run_has_not_written_stays_where_old_checkpoints_go(name, place, run, tmp_path):
    """Files of others beside its own, folders of other names, and what links lead to."""
    folder = run / "checkpoints" / name / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "papers").symlink_to(tmp_path / "victim" / "papers")
    for link in ("dense.pt", "123456789abc-shard-0000.rows"):
        if not (folder / link).exists():
            (folder / link).symlink_to(tmp_path / "victim" / "papers" / "thesis.txt")
    assert resumed(run) == 0
    assert ours(tmp_path) == {"papers/thesis.txt": b"precious"}
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "papers").is_symlink()
    assert not (run / "checkpoints" / name / STATE).exists()


@pytest.mark.parametrize("link", ["000000000000240", "000000000000001/rows"])
def test_a_link_in_place_of_a_checkpoint_goes_and_what_it_leads_to_stays(link, run, tmp_path):
    place = run / "checkpoints" / link
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.rename(tmp_path / "victim" / "moved")
    else:
        (tmp_path / "victim" / "moved").mkdir()
        (tmp_path / "victim" / "moved" / "123456789abc-shard-0000.rows").write_text("rows")
    place.symlink_to(tmp_path / "victim" / "moved")
    before = ours(tmp_path)
    assert resumed(run) == 0
    assert ours(tmp_path) == before and not place.is_symlink()


@pytest.mark.parametrize("name", ["../../victim/papers/thesis.txt", "rows/x"])
def test_a_state_names_the_files_of_a_checkpoint_alone(name, run):
    folder = complete_checkpoints(run)[-1]
    document = json.loads((folder / STATE).read_text())
    document.pop("digest")
    document["files"][name] = "0" * 64
    write_sealed(folder / STATE, document)
    with pytest.raises(BrokenFileError, match="a name in files") as refused:
        read_state(folder)
    assert all(one in str(refused.value) for one in (str(folder / STATE), *SEALED))


def test_names_in_a_store_lead_nowhere_else(tmp_path, monkeypatch):
    """An object store takes any name; what is not one of ours is not brought here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    names = ["config.json", "store_url.json", ".bashrc.json", "checkpoints/000000000000001/x"]
    names += ["checkpoints/000000000000001/state.json", "checkpoints/1/state.json"]
    names += [
        "checkpoints/a/../../../../evil/state.json",
        "checkpoints/000000000000002/a/state.json",
    ]
    for name in names:
        memory.store[f"/bucket/a/{name}"] = None
    listed = {name: b"{}" for name in names}
    monkeypatch.setattr(
        Store, "names",
        lambda self, below="", depth=None: [
            name for name in listed
            if name.startswith(below) and (depth is None or "/" not in name)
        ],
    )  # fmt: skip
    monkeypatch.setattr(Store, "get", lambda self, name, file, digest=None: _put(file))
    folder = fetched("memory://bucket/a")
    here = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
    assert here == ["checkpoints/000000000000001/state.json", "config.json", URL_FILE]
    assert store_behind(folder).url == "memory://bucket/a"
    assert not list(tmp_path.rglob("evil"))


def _put(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"{}")
