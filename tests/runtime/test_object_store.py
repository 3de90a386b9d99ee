"""A store is asked again and again, and what comes from it is what its digest says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from runtime import object_store
from runtime.files import BrokenFileError, digest_of
from runtime.object_store import (
    URL_FILE,
    Store,
    address_of,
    brought,
    cached_file,
    cached_files,
    opened_file,
    store_behind,
    working_folder,
)
from runtime.stop import StoreError
from tests.runtime.stores import FaultyStore


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that would have been slept."""
    slept = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(object_store, "time", clock)
    return slept


@pytest.fixture
def faulty(monkeypatch):
    """The store in memory, whose calls can be made to fail."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    double = FaultyStore(memory)
    monkeypatch.setattr(object_store, "_opened", lambda url: (double, memory._strip_protocol(url)))
    return double


def a_file(folder: Path, content: bytes = b"some bytes") -> Path:
    file = folder / "a file"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_is_sent_is_listed_brought_and_removed(kind, tmp_path):
    url = f"file://{tmp_path}/there" if kind == "file" else f"memory://{tmp_path.name}"
    store = Store(url)
    file = a_file(tmp_path)
    assert store.names() == [] and store.info("a/b") is None
    store.put(file, "a/b")
    store.put(file, "c")
    store.put(file, "d/b")
    assert store.names(depth=1) == ["c"]
    assert store.names() == ["a/b", "c", "d/b"]
    assert store.names("a") == ["a/b"]
    assert store.info("d/b")["size"] == len(b"some bytes")
    store.get("d/b", tmp_path / "new" / "here", digest_of(file))
    assert (tmp_path / "new" / "here").read_bytes() == b"some bytes"
    store.remove("a")
    store.remove("a")
    assert store.names() == ["c", "d/b"]


def test_a_call_that_fails_is_tried_again_after_growing_pauses(faulty, pauses, tmp_path):
    store = Store("memory://x")
    faulty.fails_one_in = 3
    for number in range(40):
        store.put(a_file(tmp_path), str(number))
        assert store.info(str(number)) is not None
    assert faulty.failed["put_file"] > 5 and faulty.failed["info"] > 5
    assert set(pauses) >= {1.0, 2.0, 4.0}


def test_a_store_of_which_nothing_is_installed_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"nostore://x: this kind of store .*pip install"):
        Store("nostore://x")


def test_an_object_that_is_not_what_its_digest_says_is_refused_by_its_name(tmp_path):
    store = Store(f"memory://{tmp_path.name}")
    file = a_file(tmp_path)
    store.put(file, "b")
    digest = digest_of(a_file(tmp_path, b"other bytes"))
    with pytest.raises(BrokenFileError, match=rf"^memory://{tmp_path.name}/b is damaged"):
        store.get("b", tmp_path / "b", digest)
    assert not (tmp_path / "b").exists()
    with (
        pytest.raises(BrokenFileError, match=rf"^memory://{tmp_path.name}/b is damaged"),
        opened_file(store.url, "b", digest),
    ):
        pass


def test_a_path_below_a_working_folder_has_its_place_in_the_store(tmp_path):
    url = f"memory://{tmp_path.name}/run"
    folder = working_folder(url, "tests")
    assert json.loads((folder / URL_FILE).read_text()) == {"url": url}
    assert address_of(folder) == url
    assert address_of(folder / "checkpoints" / "7" / "rows") == f"{url}/checkpoints/7/rows"
    assert address_of(tmp_path) == str(tmp_path) and store_behind(tmp_path / "a" / "b") is None


def test_a_file_comes_from_behind_its_folder_once_and_never_from_elsewhere(tmp_path):
    url = f"memory://{tmp_path.name}/run"
    folder = working_folder(url, "tests")
    file = a_file(tmp_path)
    Store(url).put(file, "sub/x")
    assert brought(folder / "sub" / "x", digest_of(file)).read_bytes() == b"some bytes"
    Store(url).remove("sub/x")
    assert brought(folder / "sub" / "x", digest_of(file)).is_file()
    with pytest.raises(BrokenFileError, match="leaves its folder"):
        brought(folder / ".." / "x", digest_of(file))


def test_a_cached_file_is_that_which_is_there_now(tmp_path):
    url = f"memory://{tmp_path.name}/day-1.csv"
    Store(f"memory://{tmp_path.name}").put(a_file(tmp_path, b"one"), "day-1.csv")
    first = cached_file(url)
    assert (first.name, first.read_bytes()) == ("day-1.csv", b"one")
    assert first.stat().st_mode & 0o777 == 0o600
    cached_file.cache_clear()  # as of a new process
    Store(f"memory://{tmp_path.name}").put(a_file(tmp_path, b"other"), "day-1.csv")
    assert cached_file(url).read_bytes() == b"other"
    assert cached_files(f"memory://{tmp_path.name}/day-*.csv") == [cached_file(url)]
    with pytest.raises(ValueError, match=r"no file matches memory://.*night"):
        cached_files(f"memory://{tmp_path.name}/night-*.csv")


@pytest.fixture
def impatient(monkeypatch):
    """A tenth of a second a request."""
    monkeypatch.setenv(object_store.REQUEST_S, "0.1")
    monkeypatch.setattr(object_store, "REPORTED_AFTER_S", 0.2)
    monkeypatch.setattr(object_store, "_given_up", "")


@pytest.mark.parametrize("call", ["put_file", "info"])
def test_a_call_that_gets_no_answer_is_given_up_with_words(
    call, faulty, impatient, tmp_path, capsys
):
    # Of its own: what hangs here goes on when the test has ended.
    store = Store(f"memory://{call}")
    store.put(a_file(tmp_path), "a")
    calls = {
        "put_file": lambda: store.put(a_file(tmp_path), "b"),
        "get_file": lambda: store.get("a", tmp_path / "a"),
        "info": lambda: store.info("a"),
        "find": lambda: store.names(),
        "rm": lambda: store.remove("a"),
        "ukey": lambda: store.version("a"),
    }
    calls[call]()
    faulty.hangs.set()
    given_up = rf"^memory://{call}/.*no answer within 0.5 s.*--store-timeout"
    with pytest.raises(StoreError, match=given_up):
        calls[call]()
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and f"memory://{call} has not answered" in told
    faulty.hangs.clear()


def test_a_slow_store_that_gives_signs_is_waited_for(faulty, impatient, tmp_path, monkeypatch):
    def slowly(file, at, callback):
        for _ in range(10):
            time.sleep(0.1)
            callback.relative_update(1)

    monkeypatch.setattr(faulty, "put_file", slowly, raising=False)
    Store("memory://x").put(a_file(tmp_path), "a")
