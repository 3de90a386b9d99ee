"""Named clusters and workloads, each constant with its source; or the same from files.

Each function takes a preset's name or a .toml file's, and raises ValueError where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persia_sim.cluster.cluster import Cluster
    from persia_sim.cluster.workload import Workload


def cluster(name: str) -> Cluster:
    """Machines in roles."""
    from persia_sim.presets import from_file  # late: the package is imported first

    return from_file.find_cluster(name)[0]


def workload(name: str) -> Workload:
    """Data and network."""
    from persia_sim.presets import from_file

    return from_file.find_workload(name)
