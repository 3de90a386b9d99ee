"""Servers of a test's runs end with the test: whoever compares runs keeps their stores open."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest

from runtime.engines.processes.remote_store import RemoteStore


@pytest.fixture(autouse=True)
def _servers_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
