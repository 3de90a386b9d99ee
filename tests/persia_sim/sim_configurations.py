"""Small clusters and random configurations for the simulator's tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.allreduce import DenseSync
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.scenario import Discipline, Noise, Queues, Scenario
from persia_sim.presets.catalogue import gcp_100t, workloads
from persia_sim.presets.costs import CATALOGUE

COSTS = replace(
    CATALOGUE,
    launching=None,
    gpu_efficiency=((512, 0.384),),
    reach=replace(CATALOGUE.reach, activation_passes=0.0, host=0.75),
    dense_sync=DenseSync(
        intra_bytes_per_s=8.4e9, inter_bytes_per_s=12.5e9 * 0.97, intra_latency_s=20e-6,
        inter_latency_s=20e-6, source="a test",
    ),
)  # fmt: skip
"""The GPU and the all-reduce weigh about as much as the other stages."""


def small_cluster(ranks: int = 4, workers: int = 3, server_hosts: int = 2) -> Cluster:
    cluster = gcp_100t()
    hosts = -(-ranks // 2)
    nn = replace(cluster.nn, processes_per_host=2, hosts=hosts)
    cluster = replace(cluster, ranks=ranks, nn=nn, loaders=5)
    return cluster.with_workers(workers).with_servers(server_hosts)


def small_scenario(mode: Mode = Mode.HYBRID, **changes: object) -> Scenario:
    base = Scenario(
        cluster=small_cluster(),
        workload=replace(workloads()["criteo-ad"], batch_per_rank=256),
        costs=COSTS,
        mode=mode,
        tau=2 if mode.reads_late_rows else None,
        merge_pushes=False if mode.may_merge else None,
        steps=12,
    )
    return replace(base, **changes)


LOOKAHEADS = st.sampled_from(["reread", "forwarded"])


@st.composite
def uncontended(draw: st.DrawFn) -> Scenario:
    """A random configuration in which nothing is shared."""
    mode = draw(st.sampled_from([m for m in Mode if not m.averages_replicas]))
    late = mode.reads_late_rows
    cluster = small_cluster(draw(st.integers(1, 6)), draw(st.integers(1, 4)))
    cluster = replace(
        cluster,
        loaders=draw(st.integers(1, 8)),
        link=replace(cluster.link, latency_s=draw(st.sampled_from([0.0, 5e-5, 1e-3]))),
    )
    small = st.integers(1, 4)
    queues = Queues(
        dataset=draw(small),
        lookups_in_flight=draw(small),
        forwarded=draw(small),
        on_gpu=draw(small),
        backward=draw(small),
        copied_back=draw(small),
        push_tasks=draw(small),
        reserve=draw(st.booleans()),
        at_servers=draw(st.booleans()),
    )
    scale = st.sampled_from([0.1, 1.0, 10.0])
    costs = replace(
        COSTS,
        load=replace(CATALOGUE.load, fixed_s=2e-3 * draw(scale)),
        worker_pool=replace(CATALOGUE.worker_pool, per_byte_s=1e-9 * draw(scale)),
        copy_in=replace(CATALOGUE.copy_in, fixed_s=1e-3 * draw(scale)),
        copy_out=replace(CATALOGUE.copy_out, fixed_s=1e-3 * draw(scale)),
        gpu_fixed_s=1e-3 * draw(scale),
        server_update=replace(CATALOGUE.server_update, fixed_s=1e-3 * draw(scale)),
        dense_server_bytes_per_s=1e10 * draw(scale),
    )
    return Scenario(
        cluster=cluster,
        workload=replace(workloads()["criteo-ad"], batch_per_rank=draw(st.sampled_from([16, 256]))),
        costs=costs,
        mode=mode,
        tau=draw(st.none() | st.integers(0, 5)) if late else None,
        permits=draw(st.none() | st.integers(1, 5)) if late else None,
        ahead=draw(st.none() | st.integers(1, 4)) if mode.prefetches_rows else None,
        lookahead=draw(LOOKAHEADS) if mode.prefetches_rows else "reread",
        merge_pushes=draw(st.booleans()) if mode.may_merge else None,
        discipline=Discipline.UNSHARED,
        infinite_cpus=True,
        queues=queues,
        noise=Noise(
            gpu_cv=draw(st.sampled_from([0.0, 0.2])), server_cv=draw(st.sampled_from([0.0, 0.3]))
        ),
        steps=draw(st.integers(1, 25)),
        seed=draw(st.integers(0, 5)),
    )
