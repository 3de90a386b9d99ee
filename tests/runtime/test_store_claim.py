"""Two runs at one URL: the second is refused, and one that was cut off writes no more."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from runtime import object_store, store_claim
from runtime.__main__ import main
from runtime.checkpoint.places import complete_checkpoints, fetched
from runtime.config import DataConfig
from runtime.object_store import Store, working_folder
from runtime.run.folder import claimed
from runtime.run.record import run_into
from runtime.stop import Ending, Interrupted, StoreError
from runtime.store_claim import CLAIM, Claim, check_claim, claimed_at
from tests.runtime.worlds import config

OTHERS = Claim(token="0123456789abcdef", host="elsewhere", boot="", process=7)
WORDS = "train --data.name synthetic --data.rows 600 --batch 60 --test-rows 60 --model.hidden 8"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(store_claim, "RENEWED_EVERY_S", 0.05)
    monkeypatch.setattr(store_claim, "EXPIRES_AFTER_S", 1.0)
    monkeypatch.setattr(store_claim, "SETTLES_WITHIN_S", 0.05)
    monkeypatch.setattr(object_store, "_given_up", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path) -> Store:
    fsspec.filesystem("memory").store.clear()
    return Store(f"file://{tmp_path}/there" if request.param == "file" else "memory://bucket/a")


def put(store: Store, claim: Claim) -> None:
    store.write(CLAIM, json.dumps(dataclasses.asdict(claim)).encode())


def test_a_claim_that_two_write_at_once_is_that_of_one(tmp_path):
    """Once the end of a longer one was left behind a shorter one."""
    stores = [Store(f"file://{tmp_path}") for _ in range(2)]
    claims = [OTHERS, dataclasses.replace(OTHERS, host="elsewhere" * 2_000)]
    contents = [json.dumps(dataclasses.asdict(claim)).encode() for claim in claims]
    put(stores[0], OTHERS)
    is_over = threading.Event()

    def write(store: Store, claim: Claim) -> None:
        while not is_over.is_set():
            put(store, claim)

    threads = [
        threading.Thread(target=write, args=each) for each in zip(stores, claims, strict=True)
    ]
    for thread in threads:
        thread.start()
    seen = [Store(f"file://{tmp_path}").read(CLAIM, 1 << 20) for _ in range(300)]
    is_over.set()
    for thread in threads:
        thread.join()
    assert set(seen) <= set(contents)


@contextmanager
def renewed(store: Store, claim: Claim = OTHERS) -> Iterator[None]:
    """Somebody's claim, renewed again and again."""
    is_over = threading.Event()
    put(store, claim)

    def renew() -> None:
        for times in range(10**6):
            if is_over.wait(0.05):
                return
            put(store, dataclasses.replace(claim, renewed=times))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def no_loss(why: str) -> None:
    raise AssertionError(why)


def test_a_claim_is_made_renewed_and_removed(store):
    with claimed_at(store, no_loss) as has_waited:
        assert not has_waited
        first = store.read(CLAIM, 4096)
        check_claim(store.url)
        time.sleep(0.5)
        assert store.read(CLAIM, 4096) != first
    assert store.read(CLAIM, 4096) is None
    check_claim(store.url)  # nobody's now


def test_a_second_run_is_refused_by_the_name_of_the_first(store):
    with renewed(store), pytest.raises(ValueError, match=r"another run .*7 on elsewhere") as told:
        claimed_at(store, no_loss).__enter__()
    assert store.url in str(told.value) and "--out" in str(told.value)
    assert b"elsewhere" in store.read(CLAIM, 4096)


def test_of_two_that_begin_at_once_one_is_refused(store):
    """Both in processes that are alive: the second waits for a sign of life, and sees one."""
    outcomes = []

    def begin() -> None:
        try:
            with claimed_at(store, no_loss):
                time.sleep(1.0)
            outcomes.append("held")
        except (ValueError, KeyError):
            outcomes.append("refused")

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused"]


@pytest.mark.parametrize("how", ["cut off", "killed here", "damaged"])
def test_a_claim_that_is_not_renewed_is_taken_over(how, store, capsys):
    here = dataclasses.replace(OTHERS, host=store_claim.socket.gethostname(), process=2**22 + 1)
    here = dataclasses.replace(here, boot=store_claim._boot())
    put(store, here if how == "killed here" else OTHERS)
    if how == "damaged":
        store.write(CLAIM, b"{}")
        with pytest.raises(ValueError, match=f"{store.url}/{CLAIM}"):
            claimed_at(store, no_loss).__enter__()
        return
    with claimed_at(store, no_loss) as has_waited:
        assert has_waited == (how == "cut off")
        assert json.loads(store.read(CLAIM, 4096))["process"] == os.getpid()
    assert ("no sign of life" in capsys.readouterr().err) == (how == "cut off")


def test_a_claim_that_is_seen_while_it_is_written_is_looked_at_again(store, monkeypatch):
    read = Store.read
    torn = [b"", b'{"token": "00']

    def read_early(self: Store, name: str, most: int) -> bytes | None:
        content = read(self, name, most)
        return torn.pop() if content and torn else content

    monkeypatch.setattr(Store, "read", read_early)
    with claimed_at(store, no_loss):
        check_claim(store.url)
    assert not torn


def test_who_was_cut_off_and_comes_back_writes_no_more(store):
    lost = []
    with claimed_at(store, lost.append):
        put(store, OTHERS)
        for _ in range(100):
            if lost:
                break
            time.sleep(0.05)
        with pytest.raises(StoreError, match="7 on elsewhere has taken it over"):
            check_claim(store.url)
        with pytest.raises(StoreError, match="7 on elsewhere"):
            store.write("state.json", b"")
    object_store.give_up_stores("")
    assert store.url in lost[0] and b"elsewhere" in store.read(CLAIM, 4096)
    assert store.names() == [CLAIM]


def test_a_store_that_knows_no_making_of_what_is_not_there_is_claimed_too(store, monkeypatch):
    def cannot(*arguments: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Store, "create", cannot)
    with claimed_at(store, no_loss) as has_waited:
        assert not has_waited
    with renewed(store), pytest.raises(ValueError, match="another run"):
        claimed_at(store, no_loss).__enter__()


def test_the_command_is_refused_where_another_run_fills_the_url(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/there"
    with renewed(Store(url)):
        assert main([*WORDS.split(), "--out", url]) == 2
    told = capsys.readouterr().err
    assert f"another run (process 7 on elsewhere) is filling {url}" in told
    assert Store(url).names() == [CLAIM]


def test_a_run_that_lost_its_url_ends_with_75_and_leaves_it_to_the_other(tmp_path):
    place = tmp_path / "there"
    url = f"file://{place}"
    settings = config(
        checkpoint_every=2, data=DataConfig(name="synthetic", rows=6000), test_rows=50, mode="sync"
    )
    ending = Ending()
    folder = working_folder(url, "runs")
    there: list[dict[str, bytes]] = []

    def take_over(samples: int) -> None:
        """Again where the run has just written its own over it, as the other would see."""
        if complete_checkpoints(folder) and b"elsewhere" not in (place / CLAIM).read_bytes():
            put(Store(url), OTHERS)
            there[:] = [_files(place)]

    with pytest.raises(Interrupted) as interrupted, claimed(folder, on_lost=ending.ask):
        run_into(folder, settings, take_over, ending=ending)
    assert interrupted.value.status == 75 and "7 on elsewhere" in str(interrupted.value)
    object_store.give_up_stores("")
    after = _files(place)
    states = [name for name in after if name.endswith("state.json")]
    assert states == [name for name in there[0] if name.endswith("state.json")]
    assert b"elsewhere" in after[CLAIM]
    assert len(complete_checkpoints(fetched(url, "read"))) == len(states)


def _files(place: Path) -> dict[str, bytes]:
    """From the disk: the run itself reads nothing more of a URL that it has lost."""
    return {
        file.relative_to(place).as_posix(): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }
