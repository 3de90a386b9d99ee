"""Points of sweeps are forks of one server that has loaded torch, whichever test starts it."""

import multiprocessing
from multiprocessing import forkserver

import pytest

from experiments.sweep import PRELOADED


@pytest.fixture(scope="session", autouse=True)
def _fork_from_a_server_with_torch(_keep_nothing_at_home: None) -> None:
    """A server is started once; without torch each point would import it, for two seconds."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
