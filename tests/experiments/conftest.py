"""Points of sweeps are forks of one server that has loaded torch, whichever test starts it."""

from multiprocessing import forkserver

import pytest

from tests.runtime.spawned import FORK


@pytest.fixture(scope="session", autouse=True)
def _fork_from_a_server_with_torch(_keep_nothing_at_home: None) -> None:
    """A server is started once, with what `FORK` loads; else each point would, for two seconds."""
    assert FORK.get_start_method() == "forkserver"
    forkserver.ensure_running()
