"""Clusters, workloads and costs by name."""

from __future__ import annotations

from functools import cache

from persia_sim.model.costs import Costs
from persia_sim.model.workload import Workload
from persia_sim.presets.clusters import gcp_100t, this_host, v100_2021_09, v100_paper
from persia_sim.presets.costs import CATALOGUE, fitted
from persia_sim.presets.workloads import criteo_syn, kwai_video, public_set

CLUSTERS = {
    "v100-2021-09": v100_2021_09,
    "v100-paper": v100_paper,
    "gcp-100t": gcp_100t,
    "this-host": this_host,
}


@cache
def workloads() -> dict[str, Workload]:
    """All named workloads."""
    syn = {f"criteo-syn{n}": criteo_syn(n) for n in range(1, 6)}
    return {
        "taobao-ad": public_set("taobao-ad", 14, 0, 29e6),
        "avazu-ad": public_set("avazu-ad", 22, 0, 134e6),
        "criteo-ad": public_set("criteo-ad", 26, 13, 540e6),
        "kwai-video": kwai_video(),
        **syn,
    }


@cache
def costs_of(cluster: str) -> Costs:
    """The cost laws that belong to a cluster's preset: fitted where it has published figures."""
    return CATALOGUE if cluster not in CLUSTERS or cluster == "this-host" else fitted(cluster)
