"""The table of `fit`: constants, batches, errors, hypotheses, rivals, and what the points test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, hypot, log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from experiments.published.compare import DATA, Point
from experiments.published.descriptions import number, read_csv
from experiments.published.persia_fit import SHARED, Edit, SharedFit, cluster_of, fit_shared, rate
from experiments.published.rivals import RIVALS, refitted, samples_per_s, told, within
from persia_sim.model.cluster import Cluster
from persia_sim.model.costs import Costs
from persia_sim.model.workload import Workload
from persia_sim.presets.catalogue import workloads


def without_sync_fixed(cluster: str, costs: Costs) -> Costs:
    """The fixed cost of an all-reduce only where peer-to-peer was off (the 2021 machines)."""
    if cluster == "v100-2021-09":
        return costs
    return replace(costs, dense_sync=replace(costs.dense_sync, overhead_s=0.0))


def moves(known: Sequence[Point], found: SharedFit) -> dict[str, list[Point]]:
    """Part made 10 % faster -> points whose predicted rate gains 1 % or more by it."""

    def faster(*laws: str) -> Edit:
        parts = ("fixed_s", "per_item_s", "per_byte_s")

        def edit(_: str, costs: Costs) -> Costs:
            old = {law: getattr(costs, law) for law in laws}
            return replace(costs, **{
                law: replace(own, **{part: getattr(own, part) / 1.1 for part in parts})
                for law, own in old.items()
            })  # fmt: skip

        return edit

    def gpu(_: str, costs: Costs) -> Costs:
        points = tuple((batch, min(1.0, 1.1 * share)) for batch, share in costs.gpu_efficiency)
        return replace(costs, gpu_efficiency=points,
                       gpu_fixed_s=costs.gpu_fixed_s / 1.1)  # fmt: skip

    def dense_sync(_: str, costs: Costs) -> Costs:
        sync, reach = costs.dense_sync, costs.reach
        quicker = replace(sync, overhead_s=sync.overhead_s / 1.1)
        links = replace(
            reach, mesh=1.1 * reach.mesh, switch=1.1 * reach.switch, nic=1.1 * reach.nic
        )
        return replace(costs, dense_sync=quicker, reach=links)

    edits = {
        "GPUs": gpu, "all-reduce": dense_sync, "loaders": faster("load"),
        "embedding workers": faster("worker_forward", "worker_rpc", "worker_pool",
                                    "worker_scatter"),
        "servers": faster("server_lookup", "server_update"),
    }  # fmt: skip

    def rates(edit: Edit | None) -> list[float]:
        return [rate(point, found.values, found.batches, edit)[0] for point in known]

    before = rates(None)
    return {
        part: [
            point
            for point, old, new in zip(known, before, rates(edit), strict=True)
            if old and new / old >= 1.01
        ]
        for part, edit in edits.items()
    }


def divided_bar(bar: float, other: float, divisor: int, reading: float, model: float) -> float:
    """Log likelihood ratio: a bar is another one divided, against both were measured.

    ``reading`` is the relative error of reading a bar off the plot, ``model`` how well the ratio of
    two measurements could have been predicted (relative standard deviation), by which the chance
    that it comes out as the divisor is spread.

    >>> divided_bar(50.0, 100.0, 2, 0.01, 0.2) > 2, divided_bar(45.0, 100.0, 2, 0.01, 0.2) < -10
    (True, True)
    """
    away = log(bar * divisor / other)

    def density(spread: float) -> float:
        return -0.5 * (away / spread) ** 2 - log(spread * sqrt(2 * pi))

    return density(reading * sqrt(2.0)) - density(hypot(model, reading * sqrt(2.0)))


def divided_bars(data: Path = DATA) -> dict[str, float]:
    """Log likelihood ratio of each bar that may be another one divided."""
    found = {}
    public: dict[str, dict[int, float]] = {}
    for line in read_csv(data / "throughput_public.csv", "published"):
        if line["system"] == "Persia" and "dashed" not in line["note"]:
            public.setdefault(line["dataset"], {})[int(line["gpus"])] = number(
                line, "samples_per_s"
            )
    for name, rates in public.items():
        ratio = divided_bar(rates[1], rates[2], 2, 150 / rates[2], 0.3)
        found[f"{name} hybrid: 1 GPU = 2 GPUs / 2"] = ratio
    kwai: dict[str, dict[int, float]] = {}
    for line in read_csv(data / "throughput_kwai.csv", "published"):
        kwai.setdefault(line["mode"], {})[int(line["gpus"])] = number(line, "samples_per_s")
    for mode, rates in kwai.items():
        for gpus in (1, 4):
            ratio = divided_bar(rates[gpus], rates[8], 8 // gpus, 4000 / rates[gpus], 0.3)
            found[f"kwai-video {mode}: {gpus} GPUs = 8 GPUs / {8 // gpus}"] = ratio
    return found


def rivals(data: Path = DATA) -> list[str]:
    """A line for each rival: its constants fitted again, and its errors."""
    lines = []
    for (system, mode), rival in RIVALS.items():
        measured = [_bar(line) for line in _bars(system, mode, data)]
        again, errors = refitted(rival, measured)
        lines.append(f"  {rival.name:20} {told(again)}; {len(measured)} points: {within(errors)}")
    return lines


def _bars(system: str, mode: str, data: Path) -> list[dict[str, str]]:
    lines = read_csv(data / "throughput_public.csv", "published")
    return [line for line in lines if (line["system"], line["mode"]) == (system, mode)]


def _bar(line: dict[str, str]) -> tuple[Cluster, Workload, float]:
    cluster = cluster_of(line["cluster"], int(line["gpus"]))
    return cluster, workloads()[line["dataset"]], number(line, "samples_per_s")


def left_out(
    data_set: str, known: Sequence[Point], batches: dict[str, int], data: Path = DATA
) -> list[dict[str, object]]:
    """A line for each bar of a public data set, predicted by constants fitted without the set."""
    values = fit_shared([p for p in known if p.workload != data_set], batches).values
    found = [
        ("Persia hybrid", p.gpus, p.samples_per_s, rate(p, values, batches)[0])
        for p in known
        if p.workload == data_set
    ]
    for (system, mode), rival in RIVALS.items():
        lines = _bars(system, mode, data)
        again, _ = refitted(rival, [_bar(x) for x in lines if x["dataset"] != data_set])
        for line in (x for x in lines if x["dataset"] == data_set):
            cluster, work, measured = _bar(line)
            found.append((rival.name, cluster.ranks, measured, samples_per_s(again, cluster, work)))
    return [
        {"left_out": data_set, "system": system, "gpus": gpus, "published": published,
         "predicted": predicted, "ln_rate_error": log(predicted / published)}
        for system, gpus, published, predicted in found
    ]  # fmt: skip


def left_out_table(lines: Sequence[dict[str, Any]]) -> str:
    """How far the predictions are off, and the speed-ups at 8 GPUs that they give."""
    size = np.abs([float(line["ln_rate_error"]) for line in lines])
    set_, at_8 = lines[0]["left_out"], {x["system"]: x for x in lines if x["gpus"] == 8}
    told = [
        f"{set_} left out of the fit: its {len(lines)} bars are predicted within"
        f" {exp(float(np.median(size))) - 1:.0%} (median), {exp(float(size.max())) - 1:.0%} (most)"
    ]
    own = at_8.pop("Persia hybrid")
    for system, line in at_8.items():
        predicted, published = (own[c] / line[c] for c in ("predicted", "published"))
        told.append(f"  over {system:20} {predicted:5.2f} predicted, {published:5.2f} published")
    return "\n".join(told)


def report(found: Sequence[SharedFit], known: Sequence[Point]) -> str:
    """Constants, batches, errors, hypotheses and what the points test."""
    best = found[0]
    lines = [f"Persia: {len(SHARED)} constants and 2 batches for {len(known)} points", ""]
    lines.append(f"{'constant':20} {'value':>10} {'low 95':>10} {'high 95':>10}  identified")
    for name, value in best.values.items():
        wide = exp(1.96 * best.spread[name])
        known_word = "yes" if name in best.identified else "no"
        lines.append(f"{name:20} {value:10.3g} {value / wide:10.3g} {value * wide:10.3g}  "
                     f"{known_word}")  # fmt: skip
    lines += ["", "batch a rank, Kwai and 100T: log likelihood below the best"]
    lines += [
        f"  {each.batches['v100-paper']:5} {each.batches['gcp-100t']:5}  "
        f"{best.cost - each.cost:6.1f}"
        for each in found[:6]
    ]
    lines += ["", f"{'series':28} {'n':>3} {'median':>8} {'largest':>8}  at"]
    groups: dict[str, list[int]] = {}
    for place, point in enumerate(known):
        groups.setdefault(point.series, []).append(place)
    for name, places in groups.items():
        errors = best.errors[places]
        worst = places[int(np.argmax(np.abs(errors)))]
        lines.append(
            f"{name:28} {len(places):3} {np.median(np.abs(errors)):8.1%} "
            f"{best.errors[worst]:+8.1%}  {known[worst].gpus} GPUs"
        )
    everything = np.abs(best.errors)
    lines.append(f"{'all':28} {len(known):3} {np.median(everything):8.1%} {everything.max():8.1%}")
    ratio = best.cost - fit_shared(known, best.batches, without_sync_fixed).cost
    alike = best.cost - fit_shared(known, best.batches, held=["path_100t"]).cost
    lines += [
        "",
        "hypotheses, log likelihood ratio (above 3: clearly yes, below -3: clearly no)",
        f"  {'an all-reduce has a fixed cost only without peer-to-peer':60} {ratio:+.1f}",
        f"  {'a byte at a worker costs the same on Kwai and 100T hosts':60} {alike:+.1f}",
    ]
    lines += [f"  {name:60} {ratio:+.1f}" for name, ratio in divided_bars().items()]
    lines += ["", "rivals, as modes of the simulator", *rivals()]
    lines += ["", "points whose rate gains 1 % or more where a part is 10 % faster"]
    for part, gained in moves(known, best).items():
        by_mode: dict[str, int] = {}
        for point in gained:
            by_mode[point.mode] = by_mode.get(point.mode, 0) + 1
        told = ", ".join(f"{count} {mode}" for mode, count in by_mode.items())
        lines.append(
            f"  {part:18} {len(gained):3} of {len(known)}" + (f" ({told})" if told else "")
        )
    return "\n".join(lines)
