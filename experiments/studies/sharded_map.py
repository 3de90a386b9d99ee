"""Hybrid training against tables on the GPUs: who wins at which model size and network, and price.

What the two systems are: `experiments/published/two_systems.py`. Hybrid's hosts are chosen by the
closed form, then simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Annotated, Any

from experiments.kept import Kept, sole_writer
from experiments.options import OneOf, Planned, SimulatedSteps, Some
from experiments.published.two_systems import (
    GPUS_OF_HYBRID,
    MACHINE_OF,
    hybrid_of,
    price_date,
    sharded_of,
    workload_of,
)
from experiments.studies.predict_published import seconds_by_part
from experiments.tables import aligned, drawn, write_csv
from persia_sim.engine.simulate import simulate
from persia_sim.insight.critical_path import blame_of_resources
from persia_sim.insight.measure import throughput
from persia_sim.oracle.closed_form import answer
from persia_sim.presets.catalogue import ranker_of
from persia_sim.presets.software import SOFTWARE
from persia_sim.words.schema import Within

Rate = Annotated[float, Within(0.1, 1e4)]
Size = Annotated[float, Within(1e7, 1e15)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Every GPU at every NIC and model size: samples/s and dollars of hybrid over sharded."""

    gpus: Some[Annotated[str, OneOf(MACHINE_OF)]] = tuple(MACHINE_OF)
    """v100, a100, h100, in machines of eight."""
    software: Some[Annotated[str, OneOf(SOFTWARE)]] = ("torchrec", "hugectr")
    """What the sharded side runs; hybrid launches its dense network as quickly."""
    nic_gbit_per_s: Some[Rate] = (
        10.0,
        25.0,
        50.0,
        100.0,
        200.0,
        400.0,
    )
    """NICs of every host, of both systems."""
    parameters: Some[Size] = (
        1e10,
        1e11,
        1e12,
        6.25e12,
        2.5e13,
        1e14,
    )
    """Numbers in all tables."""
    batch: Annotated[int, Within(GPUS_OF_HYBRID, 65_535 * GPUS_OF_HYBRID)] = 55_296
    """Samples of a dense update, both systems."""
    steps: SimulatedSteps = 24
    """Steps of hybrid's simulations."""


Cell = dict[str, Any]
"""One place on the map: both systems, and what one has over the other."""


def run(options: Options) -> None:
    """Fill the map, write the table and the figure, print where hybrid wins."""
    places = [*product(options.gpus, options.software, options.nic_gbit_per_s, options.parameters)]
    kept = Kept(options.out / "cells.jsonl")
    tail = f"{options.batch}/{options.steps}"
    labels = ["/".join(map(str, place)) + f"/{tail}" for place in places]
    missing = sum(label not in kept for label in labels)
    print(f"{len(places)} cells ({missing} to run)")
    if options.dry_run:
        return
    with sole_writer(options.out):
        work = {
            label: partial(cell_of, *place, options.batch, options.steps)
            for label, place in zip(labels, places, strict=True)
        }
        cells: list[Cell] = kept.fill(work, "cells")
    path = write_csv(options.out / "sharded_map.csv", cells)
    print(table(cells))
    print(summary(cells))
    print(f"{len(cells)} cells in {path}; {drawn(path)}")


def cell_of(gpu: str, software: str, nic: float, parameters: float, batch: int, steps: int) -> Cell:
    """Both systems at one place; hybrid is simulated for so many steps."""
    sharded = sharded_of(gpu, software, nic, parameters, batch)
    sharded_rate, sharded_usd = batch / sharded.step_s, sharded.job.system.usd_per_hour
    scenario = replace(hybrid_of(gpu, software, nic, parameters, batch), steps=steps)
    found = simulate(scenario)
    rate, bound = throughput(found).mean, answer(scenario).samples_per_s
    blame = blame_of_resources(found)
    cluster = scenario.cluster
    usd, parts = cluster.usd_per_hour, seconds_by_part(sharded.parts)
    hybrid_price, sharded_price = (
        usd_per_million(usd, rate),
        usd_per_million(sharded_usd, sharded_rate),
    )
    return {
        "gpu": gpu,
        "software": software,
        "nic_gbit_per_s": nic,
        "parameters": parameters,
        "table_bytes": ranker_of(workload_of(parameters, batch)).table_bytes,
        "hybrid_samples_per_s": rate,
        "hybrid_bound_samples_per_s": bound,  # by the closed form
        "hybrid_binds": max(blame, key=lambda name: blame[name]),
        "hybrid_gpus": cluster.ranks,
        "hybrid_workers": cluster.embedding_workers.hosts,
        "hybrid_servers": cluster.servers.hosts,
        "hybrid_server_host": cluster.servers.host.name,
        "hybrid_usd_per_hour": usd,
        "hybrid_usd_per_million_samples": hybrid_price,
        "sharded_samples_per_s": sharded_rate,
        "sharded_binds": max(parts, key=lambda name: parts[name]),
        "sharded_gpus": sharded.job.system.gpus,
        "sharded_gpus_for_memory": sharded.gpus_for_memory,
        "sharded_plan": sharded.plan,
        "sharded_usd_per_hour": sharded_usd,
        "sharded_usd_per_million_samples": sharded_price,
        "throughput_ratio": rate / sharded_rate,  # above 1 hybrid is faster
        "dollar_ratio": sharded_price / hybrid_price,  # above 1 hybrid is cheaper
        "prices": f"{price_date(sharded.job.system.host)}; CPU hosts 2021-11",
    }


def usd_per_million(usd_per_hour: float, samples_per_s: float) -> float:
    """Dollars for a million samples.

    >>> usd_per_million(36.0, 1e4)
    1.0
    """
    return usd_per_hour / 3600 / samples_per_s * 1e6


def table(cells: Sequence[Cell]) -> str:
    """A line for each GPU, software and size: ratios at every NIC."""
    nics = list(dict.fromkeys(cell["nic_gbit_per_s"] for cell in cells))
    groups: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["gpu"], cell["software"], cell["parameters"]), []).append(cell)
    lines = []
    for (gpu, software, parameters), own in groups.items():
        ratios = [f"{c['throughput_ratio']:.2f} / {c['dollar_ratio']:.2f}" for c in own]
        lines.append([gpu, software, f"{parameters:.3g}", f"{own[0]['sharded_gpus']:,}", *ratios])
    header = ["GPU", "against", "parameters", "its GPUs", *(f"{n:g} Gbit/s" for n in nics)]
    return aligned(header, lines)


def summary(cells: Sequence[Cell]) -> str:
    """In how many cells hybrid is faster, cheaper; how far the closed form is off."""
    faster = sum(cell["throughput_ratio"] > 1 for cell in cells)
    cheaper = sum(cell["dollar_ratio"] > 1 for cell in cells)
    told = (
        f"samples/s hybrid over sharded / dollars sharded over hybrid: hybrid is faster in {faster}"
        f" and cheaper in {cheaper} of {len(cells)} cells"
    )
    off = [cell["hybrid_bound_samples_per_s"] / cell["hybrid_samples_per_s"] - 1 for cell in cells]
    told += f"\nclosed form over simulation: median {median(off):+.1%}, largest {max(off):+.1%}"
    return told
