"""What a command refuses; and servers of a test's runs, which end with the test."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest

from runtime.__main__ import main


@pytest.fixture(autouse=True)
def _servers_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever compares runs keeps their stores open."""
    try:
        from runtime.hosts.rows.remote_store import RemoteStore
    except ModuleNotFoundError:  # where the annexes are left out (tests/test_annexes.py)
        yield
        return
    opened: list[weakref.ref[RemoteStore]] = []
    begin = RemoteStore.__init__

    def noted(store, *args, **kwargs) -> None:
        begin(store, *args, **kwargs)
        opened.append(weakref.ref(store))

    monkeypatch.setattr(RemoteStore, "__init__", noted)
    yield
    for found in opened:
        store = found()
        if store is not None:
            store.close()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Carries out a command that must end in a sentence, with exit code 2; gives the sentence."""

    def said(*words: str) -> str:
        try:
            code: object = main(list(words))
        except SystemExit as left:
            code = left.code
        told = capsys.readouterr().err
        assert code == 2, (words, code, told)
        assert "error: " in told and "Traceback" not in told
        return " ".join(told.split())

    return said
