"""A cluster and a workload so small that every figure can be worked out on paper.

Each constant is written where it is used, and no two that could be mistaken for each other are
equal. Rates and times are sums of powers of two, so results are exact.

Bytes of a batch of 4 samples, 3 fields of one row each, 2 ids a field and sample, rows of 8 numbers
(24 ids, 3 of them distinct), 5 dense features, layers of 7 and 2:

    loader 268 and 96 (to the rank), request 48, rows 96, activations 192, gradients 192, push 120

Seconds alone on the NICs (GPU host 24, worker 16, server 12 payload bytes a second; one way 0.5):

    load 16.75 and 4, request 4, rows 8, activations 12, gradients 12, push 10
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.allreduce import Algorithm, DenseSync
from persia_sim.cluster.cluster import Cluster, Link, Role
from persia_sim.cluster.costs import Costs, Law
from persia_sim.cluster.machine import Gpu, Host, Reach
from persia_sim.cluster.scenario import DenseHome, Discipline, Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.report.report import Report
from persia_sim.report.screen import facts

HAND = "written by hand"


ABACUS = Gpu(name="abacus", fp32_flops=4096.0, pcie_bytes_per_s=64.0, source=HAND)
WHOLE = Reach(
    fp32=1.0, tf32=1.0, fp16=1.0, hbm=1.0, switch=1.0, mesh=1.0, pcie=1.0, nic=0.5, tcp=1.0,
    host=1.0, source="everything at its nominal rate, NICs at half of it as the link's",
)  # fmt: skip


def host(name: str, nic: float, speed: float, dollars: float) -> Host:
    return Host(
        name=name, cores=8, ram_bytes=1e6, nic_bytes_per_s=nic, core_speed=speed, gpu=ABACUS,
        gpus=8, usd_per_hour=dollars, source=HAND,
    )  # fmt: skip


def role(of: Host, processes: int = 1, cores: int = 1) -> Role:
    return Role(
        host=of, hosts=1, processes_per_host=processes, cores_per_process=cores,
        ram_bytes_per_process=1e5,
    )  # fmt: skip


def hand_cluster(ranks: int = 1, **changes: Any) -> Cluster:
    """GPU hosts of one GPU, one worker, one server; half of a NIC's nominal rate is payload."""
    nn = replace(role(host("gpu host", 48.0, 0.5, 8.0)), hosts=ranks)
    base = Cluster(
        name="hand",
        ranks=ranks,
        nn=nn,
        embedding_workers=role(host("worker host", 32.0, 2.0, 4.0)),
        servers=role(host("server host", 24.0, 0.25, 2.0)),
        loaders=1,
        link=Link(latency_s=0.5, header_efficiency=0.5, source=HAND),
        source=HAND,
    )
    return replace(base, **changes)


def law(fixed_s: float = 0.0, per_item_s: float = 0.0, per_byte_s: float = 0.0) -> Law:
    return Law(fixed_s=fixed_s, per_item_s=per_item_s, per_byte_s=per_byte_s, source=HAND)


def hand_costs(**changes: Any) -> Costs:
    """Fixed times only (for a core of speed 1), so that a stage's time is one division."""
    base = Costs(
        load=law(1.125),  # rank's core speed 0.5: 2.25 s
        worker_forward=law(4.0),  # worker's core speed 2: 2 s
        worker_rpc=law(0.0),
        worker_pool=law(12.0),  # 6 s
        worker_scatter=law(14.0),  # 7 s
        server_lookup=law(0.75),  # server's core speed 0.25: 3 s
        server_update=law(2.75),  # 11 s
        server_create=law(0.0),
        copy_in=law(0.25),  # 0.5 s, and 192 + 96 bytes over a bus of 64 a second: 4.5 s more
        copy_out=law(3.0),  # 6 s, and 3 s
        gpu_fixed_s=12.0,  # 4 s forward, 8 s backward
        gpu_efficiency=((1, 1.0), (65535, 1.0)),
        dense_sync=DenseSync(
            algorithm=Algorithm.RING, intra_bytes_per_s=1024.0, inter_bytes_per_s=113.0,
            intra_latency_s=0.25, inter_latency_s=0.25, overhead_s=0.5, bucket_bytes=1e9,
            source=HAND,
        ),
        reach=WHOLE,
        dense_server_bytes_per_s=226.0,  # a copy of 904 bytes takes 4 s
        source=HAND,
    )  # fmt: skip
    return replace(base, **changes)


def hand_workload(**changes: Any) -> Workload:
    base = Workload(
        name="hand", fields=3, ids_per_field=2.0, dim=8, rows=3.0, zipf=1.0, dense_features=5,
        mlp=(7, 2), batch_per_rank=4, source=HAND,
    )  # fmt: skip
    return replace(base, **changes)


def hand_scenario(mode: Mode = Mode.SYNC, ranks: int = 1, **changes: Any) -> Scenario:
    """Nothing is shared; compute is the fixed part alone (an endless peak rate)."""
    cluster = hand_cluster(ranks)
    cluster = cluster.with_gpu(fp32_flops=float("inf"))
    base = Scenario(
        cluster=cluster, workload=hand_workload(), costs=hand_costs(), mode=mode, tau=None,
        discipline=Discipline.UNSHARED, infinite_cpus=True, steps=5,
        dense_home=DenseHome.APART if mode.has_dense_server else None,
    )  # fmt: skip
    return replace(base, **changes)


def sync_of_two(steps: int = 40) -> Scenario:
    """A step takes 113 s: 104 of one batch and 9 of all-reduce (test_timeline_by_hand)."""
    return hand_scenario(Mode.SYNC, ranks=2, steps=steps)


def facts_of(result: Report) -> dict[str, str]:
    """Every fact of a report by its name."""
    return {name: content for lines in facts(result).values() for name, content in lines}


def facts_on(screen: str) -> dict[str, dict[str, str]]:
    """A printed screen, read back: question -> fact -> what it says, line by line."""
    found: dict[str, dict[str, str]] = {}
    columns = set()
    for block in screen.split("\n\n"):
        question, *lines = block.splitlines()
        told = found.setdefault(question, {})
        for line in lines:
            if named := re.match(r"  (\S.*?)  +", line):
                columns.add(named.end())
                told[named[1]] = line[named.end() :]
            else:
                told[list(told)[-1]] += f"\n{line.strip()}"
    assert len(columns) == 1, f"the facts begin in several columns: {columns}"
    return found
