"""Named clusters, workloads and costs, each constant with its source; or the same from files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from persia_sim.model.cluster import Cluster
    from persia_sim.model.costs import Costs
    from persia_sim.model.workload import Workload


def cluster(name: str) -> Cluster:
    """A named cluster, or one from a .toml file. Raises ValueError where there is none."""
    return _cluster_and_costs(name)[0]


def costs_for(name: str) -> Costs:
    """The cost laws (seconds of each stage) that belong to a named cluster, or to one from a .toml
    file. Raises ValueError where there is none."""
    return _cluster_and_costs(name)[1]


def workload(name: str) -> Workload:
    """A named workload, or one from a .toml file. Raises ValueError where there is none."""
    from persia_sim.presets import catalogue, from_file  # late: the package is imported first

    if name.endswith(".toml"):
        return from_file.read_workload(Path(name))
    known = catalogue.workloads()
    if name not in known:
        raise ValueError(f"workload is {name!r}: must be one of {', '.join(known)}")
    return known[name]


def _cluster_and_costs(name: str) -> tuple[Cluster, Costs]:
    from persia_sim.presets import catalogue, from_file  # late: the package is imported first

    if name.endswith(".toml"):
        return from_file.read_cluster(Path(name))
    if name not in catalogue.CLUSTERS:
        raise ValueError(f"cluster is {name!r}: must be one of {', '.join(catalogue.CLUSTERS)}")
    return catalogue.CLUSTERS[name](), catalogue.costs_of(name)
