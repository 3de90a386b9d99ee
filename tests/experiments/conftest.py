"""Points of sweeps are forks of one server that has loaded torch; tables of published steps."""

from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.runtime.spawned import FORK


@pytest.fixture(scope="session", autouse=True)
def _fork_from_a_server_with_torch(_keep_nothing_at_home: None) -> None:
    """A server is started once, with what `FORK` loads; else each point would, for two seconds."""
    assert FORK.get_start_method() == "forkserver"
    forkserver.ensure_running()


EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture(scope="module")
def published():
    """The project's own table of published steps."""
    from experiments.published.gpu_rows import MeasuredFiles  # not for tests without it

    measured, left_out = MeasuredFiles().load(())
    assert left_out == []
    assert all(row.samples_per_s for row in measured)
    return measured


@pytest.fixture(scope="module")
def rows():
    """Measured steps of the examples."""
    from experiments.published.descriptions import hosts_of, rankers_of
    from experiments.published.gpu_rows import measured_of

    workloads = rankers_of(EXAMPLES / "workloads.csv")
    systems = hosts_of(EXAMPLES / "systems.csv")
    measured, _ = measured_of(EXAMPLES / "rows.csv", workloads, systems)
    return measured
